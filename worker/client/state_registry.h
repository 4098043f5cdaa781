// The program's named tensors, and what the library does with them as one shard: digest, staging order, copies by
// name. Owned by Session; used on the training thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep::client {

inline constexpr size_t kTensorNameBytesMax = 255;
inline constexpr size_t kDtypeBytesMax = 15;

// Says that the work is no longer wanted: copies look at it between chunks.
using Interrupted = std::function<bool()>;

struct RegisteredTensor {
  TensorInfo info;  // buffer_offset: its place when the shard is laid out as one buffer
  std::byte* data = nullptr;
};

class StateRegistry {
 public:
  // INVALID_ARGUMENT: a bound of worker/wire is exceeded, or sizes contradict each other.
  Status Register(TensorInfo info, void* data);
  void Clear() { tensors_.clear(); }

  // By name; buffer offsets are filled in, each tensor on a cache-line border.
  std::vector<RegisteredTensor> Tensors() const;
  // Of the shard as one buffer. Gaps are zero.
  uint64_t buffer_bytes() const;
  uint64_t state_bytes() const;  // of the tensors alone

  // XXH3-128 over names, dtypes, shapes and bytes of all tensors, in the order of their names. With Describe only over
  // all but the bytes.
  Digest128 Digest() const;
  Digest128 DescriptionDigest() const;

  // Fills every registered tensor from a buffer that holds `tensors`. Tensors that aren't registered are ignored.
  // DATA_LOSS: one is missing or has another type or size. ABORTED: interrupted.
  Status CopyFrom(std::span<const std::byte> buffer, const std::vector<TensorInfo>& tensors,
                  const Interrupted& interrupted);

 private:
  std::map<std::string, RegisteredTensor, std::less<>> tensors_;
};

// XXH3-128 of a buffer, in chunks; zero digest and false when interrupted.
bool DigestOf(std::span<const std::byte> buffer, const Interrupted& interrupted, Digest128& digest);

// Copies and hashes in one pass, so that the bytes are read from memory once. Digests of consecutive calls continue.
class HashingCopier {
 public:
  HashingCopier();
  ~HashingCopier();
  HashingCopier(const HashingCopier&) = delete;
  HashingCopier& operator=(const HashingCopier&) = delete;
  void Reset();
  void Copy(const std::byte* from, std::byte* to, size_t bytes);
  void Zeros(std::byte* to, size_t bytes);
  Digest128 Finish() const;

 private:
  void* state_;
};

}  // namespace everstep::client
