// The bytes of snapshot descriptions: on disk (manifests of a store) and on the wire between agents. Little-endian,
// counts before content, every count bounded before anything is allocated; versions belong to the records that use
// it. Pure; reader and writer are thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/core/chunk_registry.h"
#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

inline constexpr size_t kRecordTextBytesMax = 4096;
inline constexpr size_t kRecordTensorsMax = 16384;
inline constexpr size_t kRecordDimensionsMax = 8;
inline constexpr size_t kRecordChunksMax = 1u << 20;  // of 1 MiB each

class RecordWriter {
 public:
  template <typename Number>
  void Put(Number value) {
    static_assert(std::is_integral_v<Number>);
    for (size_t i = 0; i < sizeof(Number); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void PutText(std::string_view text);
  void PutDigest(const Digest128& digest);
  void PutInfo(const SnapshotInfo& info);
  void PutTensors(const std::vector<TensorInfo>& tensors);
  // XXH3-64 of everything so far, as the last thing.
  void PutChecksum();
  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what the writer wrote. After the first failure every read returns nothing useful and ok() is false, so that a
// caller checks once, at the end.
class RecordReader {
 public:
  explicit RecordReader(std::string_view bytes) : rest_(bytes) {}
  template <typename Number>
  Number Get() {
    static_assert(std::is_integral_v<Number>);
    if (rest_.size() < sizeof(Number)) return Fail(), Number{};
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(Number); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(rest_[i])) << (8 * i);
    }
    rest_.remove_prefix(sizeof(Number));
    return static_cast<Number>(value);
  }
  std::string GetText();
  Digest128 GetDigest();
  SnapshotInfo GetInfo();
  std::vector<TensorInfo> GetTensors();
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && rest_.empty(); }
  void Fail() { ok_ = false; rest_ = {}; }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

// Splits the checksum off a record. DATA_LOSS: too short, or it does not match.
Result<std::string_view> CheckedBody(std::string_view record);

// Whether a shard's description is one that we could have made: sizes, bounds of tensors within the buffer.
// INVALID_ARGUMENT names the tensor.
Status ValidateTensors(const std::vector<TensorInfo>& tensors, uint64_t buffer_bytes);

// What a store keeps about one shard.
struct ShardManifest {
  SnapshotInfo info;
  std::vector<TensorInfo> tensors;
  std::vector<ChunkName> chunks;      // in order of the buffer
  bool operator==(const ShardManifest&) const = default;
};
std::string EncodeManifest(const ShardManifest& manifest);
Result<ShardManifest> DecodeManifest(std::string_view record);  // DATA_LOSS

}  // namespace everstep::checkpoint
