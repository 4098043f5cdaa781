#include "worker/client/state_registry.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/wire/rank_codec.h"

// All of the hash is compiled into this file: no symbol of it leaves, and none of another copy comes in.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace everstep::client {
namespace {

constexpr uint64_t kTensorAlignmentBytes = 64;
constexpr size_t kChunkBytes = 256u << 10;  // stays in the second-level cache between copy and hash
constexpr size_t kInterruptCheckBytes = 4u << 20;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kTensorAlignmentBytes - 1) / kTensorAlignmentBytes * kTensorAlignmentBytes; }

Digest128 ToDigest(XXH128_hash_t hash) { return {hash.low64, hash.high64}; }

void HashText(XXH3_state_t* state, std::string_view text) {
  const uint64_t size = text.size();
  XXH3_128bits_update(state, &size, sizeof size);
  XXH3_128bits_update(state, text.data(), text.size());
}

void HashShape(XXH3_state_t* state, const std::vector<int64_t>& shape) {
  const uint64_t size = shape.size();
  XXH3_128bits_update(state, &size, sizeof size);
  XXH3_128bits_update(state, shape.data(), shape.size() * sizeof(int64_t));
}

void HashDescription(XXH3_state_t* state, const TensorInfo& info) {
  HashText(state, info.name);
  HashText(state, info.dtype);
  HashShape(state, info.global_shape);
  HashShape(state, info.offsets);
  HashShape(state, info.shape);
  XXH3_128bits_update(state, &info.bytes, sizeof info.bytes);
}

struct HashState {
  HashState() : state(XXH3_createState()) { XXH3_128bits_reset(state); }
  ~HashState() { XXH3_freeState(state); }
  HashState(const HashState&) = delete;
  HashState& operator=(const HashState&) = delete;
  XXH3_state_t* state;
};

}  // namespace

Status StateRegistry::Register(TensorInfo info, void* data) {
  const auto wrong = [&](const std::string& what) { return InvalidArgument("tensor '" + info.name + "': " + what); };
  if (info.name.empty() || info.name.size() > kTensorNameBytesMax) {
    return InvalidArgument("a tensor's name has 1 to " + std::to_string(kTensorNameBytesMax) + " bytes");
  }
  if (info.dtype.empty() || info.dtype.size() > kDtypeBytesMax) return wrong("its dtype is empty or too long");
  if (data == nullptr && info.bytes > 0) return wrong("its memory is null");
  const size_t dimensions = info.global_shape.size();
  if (dimensions > kWireDimensionsMax) return wrong("it has more than " + std::to_string(kWireDimensionsMax) + " dimensions");
  if (!info.offsets.empty() && info.offsets.size() != dimensions) return wrong("offsets and global shape differ in length");
  if (!info.shape.empty() && info.shape.size() != dimensions) return wrong("shape and global shape differ in length");
  for (size_t i = 0; i < dimensions; ++i) {
    const int64_t offset = info.offsets.empty() ? 0 : info.offsets[i];
    const int64_t extent = info.shape.empty() ? info.global_shape[i] : info.shape[i];
    if (offset < 0 || extent < 0 || offset > info.global_shape[i] || extent > info.global_shape[i] - offset) {
      return wrong("its piece lies outside of the global shape in dimension " + std::to_string(i));
    }
  }
  if (!tensors_.contains(info.name) && tensors_.size() >= kWireTensorsMax) {
    return ResourceExhausted("a shard has at most " + std::to_string(kWireTensorsMax) + " tensors");
  }
  std::string name = info.name;
  tensors_.insert_or_assign(std::move(name), RegisteredTensor{std::move(info), static_cast<std::byte*>(data)});
  return OkStatus();
}

std::vector<RegisteredTensor> StateRegistry::Tensors() const {
  std::vector<RegisteredTensor> tensors;
  tensors.reserve(tensors_.size());
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors_) {
    tensors.push_back(tensor);
    tensors.back().info.buffer_offset = offset;
    offset = AlignUp(offset + tensor.info.bytes);
  }
  return tensors;
}

uint64_t StateRegistry::buffer_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes = AlignUp(bytes + tensor.info.bytes);
  return bytes;
}

uint64_t StateRegistry::state_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.info.bytes;
  return bytes;
}

Digest128 StateRegistry::Digest() const {
  HashState hash;
  for (const auto& [name, tensor] : tensors_) {
    HashDescription(hash.state, tensor.info);
    XXH3_128bits_update(hash.state, tensor.data, tensor.info.bytes);
  }
  return ToDigest(XXH3_128bits_digest(hash.state));
}

Digest128 StateRegistry::DescriptionDigest() const {
  HashState hash;
  for (const auto& [name, tensor] : tensors_) HashDescription(hash.state, tensor.info);
  return ToDigest(XXH3_128bits_digest(hash.state));
}

Status StateRegistry::CopyFrom(std::span<const std::byte> buffer, const std::vector<TensorInfo>& tensors,
                               const Interrupted& interrupted) {
  std::map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo& info : tensors) by_name.emplace(info.name, &info);
  for (auto& [name, tensor] : tensors_) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) return DataLoss("the snapshot lacks tensor '" + name + "'");
    const TensorInfo& info = *found->second;
    if (info.dtype != tensor.info.dtype || info.bytes != tensor.info.bytes || info.offsets != tensor.info.offsets) {
      return DataLoss("tensor '" + name + "' of the snapshot has another type, size or place");
    }
    if (info.buffer_offset > buffer.size() || info.bytes > buffer.size() - info.buffer_offset) {
      return DataLoss("tensor '" + name + "' lies outside of the snapshot");
    }
    for (uint64_t at = 0; at < info.bytes; at += kInterruptCheckBytes) {
      if (interrupted()) return Aborted("interrupted while restoring");
      std::memcpy(tensor.data + at, buffer.data() + info.buffer_offset + at,
                  std::min<uint64_t>(kInterruptCheckBytes, info.bytes - at));
    }
  }
  return OkStatus();
}

bool DigestOf(std::span<const std::byte> buffer, const Interrupted& interrupted, Digest128& digest) {
  HashState hash;
  for (size_t at = 0; at < buffer.size(); at += kInterruptCheckBytes) {
    if (interrupted()) return false;
    XXH3_128bits_update(hash.state, buffer.data() + at, std::min(kInterruptCheckBytes, buffer.size() - at));
  }
  digest = ToDigest(XXH3_128bits_digest(hash.state));
  return true;
}

HashingCopier::HashingCopier() : state_(XXH3_createState()) { Reset(); }
HashingCopier::~HashingCopier() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void HashingCopier::Reset() { XXH3_128bits_reset(static_cast<XXH3_state_t*>(state_)); }

void HashingCopier::Copy(const std::byte* from, std::byte* to, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kChunkBytes) {
    const size_t count = std::min(kChunkBytes, bytes - at);
    std::memcpy(to + at, from + at, count);
    XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), to + at, count);
  }
}

void HashingCopier::Zeros(std::byte* to, size_t bytes) {
  std::memset(to, 0, bytes);
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state_), to, bytes);
}

Digest128 HashingCopier::Finish() const {
  return ToDigest(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state_)));
}

}  // namespace everstep::client
