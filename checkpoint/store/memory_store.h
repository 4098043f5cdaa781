// A store in memory, for tests and for servers without a disk (its snapshots die with the agent). Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/core/chunk_registry.h"
#include "checkpoint/store/record_codec.h"
#include "checkpoint/store/snapshot_store.h"

namespace everstep::checkpoint {

class MemoryStore final : public SnapshotStore {
 public:
  explicit MemoryStore(uint64_t bytes_max = uint64_t{1} << 40) : bytes_max_(bytes_max) {}

  Status Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
             std::span<const std::byte> bytes) override;
  Result<StoredSnapshot> Find(const JobUid& job, StateId state, ShardIndex shard) override;
  Status Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) override;
  Result<std::vector<std::pair<JobUid, SnapshotInfo>>> List() override;
  Status Delete(const JobUid& job, StateId state, ShardIndex shard) override;
  size_t Damaged() const override { return 0; }

  uint64_t chunk_bytes() const;  // held by chunks, each counted once

 private:
  using Key = std::tuple<JobUid, StateId, ShardIndex>;
  mutable std::mutex mutex_;
  const uint64_t bytes_max_;
  // Guarded by mutex_:
  ChunkRegistry registry_{Epoch(1)};
  std::map<Key, ShardManifest> manifests_;
  std::map<ChunkName, std::vector<std::byte>> chunks_;
  uint64_t chunk_bytes_ = 0;
};

}  // namespace everstep::checkpoint
