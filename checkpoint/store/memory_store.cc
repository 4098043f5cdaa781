#include "checkpoint/store/memory_store.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/store/digest.h"

namespace everstep::checkpoint {

Status MemoryStore::Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                        std::span<const std::byte> bytes) {
  EVERSTEP_RETURN_IF_ERROR(ValidatePut(job, info, tensors, bytes));
  const std::lock_guard lock(mutex_);
  const Key key(job, info.state, info.shard);
  if (const auto found = manifests_.find(key); found != manifests_.end()) {
    if (found->second.info.digest == info.digest) return OkStatus();
    return AlreadyExists("another content is stored under this state and shard");
  }
  ShardManifest manifest{info, tensors, {}};
  manifest.info.tier = SnapshotTier::kStored;
  const Epoch intent = registry_.OpenIntent();
  std::vector<ChunkName> written;
  for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
    const auto chunk = bytes.subspan(at, std::min(kChunkBytes, bytes.size() - at));
    const auto [name, must_write] = registry_.Choose(intent, DigestOf(chunk), chunk.size());
    if (must_write) {
      if (chunk_bytes_ + chunk.size() > bytes_max_) {
        for (const ChunkName& undo : written) {
          chunk_bytes_ -= undo.bytes;
          chunks_.erase(undo);
        }
        registry_.Abandon(intent);
        (void)registry_.TakeDeletable();  // erased just above
        return ResourceExhausted(fmt::format("the memory store is full at {} bytes", bytes_max_));
      }
      chunks_[name].assign(chunk.begin(), chunk.end());
      chunk_bytes_ += chunk.size();
      written.push_back(name);
    }
    manifest.chunks.push_back(name);
  }
  registry_.Commit(intent, manifest.chunks);
  manifests_.emplace(key, std::move(manifest));
  return OkStatus();
}

Result<StoredSnapshot> MemoryStore::Find(const JobUid& job, StateId state, ShardIndex shard) {
  const std::lock_guard lock(mutex_);
  const auto found = manifests_.find({job, state, shard});
  if (found == manifests_.end()) return NotFound("no such snapshot");
  return StoredSnapshot{found->second.info, found->second.tensors};
}

Status MemoryStore::Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  const auto found = manifests_.find({job, state, shard});
  if (found == manifests_.end()) return NotFound("no such snapshot");
  const ShardManifest& manifest = found->second;
  if (out.size() != manifest.info.bytes) return InvalidArgument("the buffer has another size than the snapshot");
  size_t at = 0;
  for (const ChunkName& name : manifest.chunks) {
    const std::vector<std::byte>& chunk = chunks_.at(name);
    std::memcpy(out.data() + at, chunk.data(), chunk.size());
    at += chunk.size();
  }
  if (DigestOf(out) != manifest.info.digest) return DataLoss("the digest of a snapshot in memory does not match");
  return OkStatus();
}

Result<std::vector<std::pair<JobUid, SnapshotInfo>>> MemoryStore::List() {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<JobUid, SnapshotInfo>> all;
  for (const auto& [key, manifest] : manifests_) all.emplace_back(std::get<0>(key), manifest.info);
  return all;
}

Status MemoryStore::Delete(const JobUid& job, StateId state, ShardIndex shard) {
  const std::lock_guard lock(mutex_);
  const auto found = manifests_.find({job, state, shard});
  if (found == manifests_.end()) return OkStatus();
  for (const ChunkName& name : found->second.chunks) registry_.DropReference(name);
  manifests_.erase(found);
  for (const ChunkName& name : registry_.TakeDeletable()) {
    if (chunks_.erase(name) > 0) chunk_bytes_ -= name.bytes;
  }
  return OkStatus();
}

uint64_t MemoryStore::chunk_bytes() const {
  const std::lock_guard lock(mutex_);
  return chunk_bytes_;
}

}  // namespace everstep::checkpoint
