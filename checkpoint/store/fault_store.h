// A store that fails on command: the faults that disks have. For tests, and for drills on a live agent. Thread-safe.
#pragma once

#include <condition_variable>
#include <mutex>

#include "checkpoint/store/snapshot_store.h"

namespace everstep::checkpoint {

class FaultStore final : public SnapshotStore {
 public:
  explicit FaultStore(SnapshotStore& store) : store_(store) {}

  enum class Fault : uint8_t {
    kNone,
    kDiskFull,     // Put: RESOURCE_EXHAUSTED
    kSyncError,    // Put: written, but not durable: UNAVAILABLE, and the snapshot is not visible
    kReadError,    // Read: UNAVAILABLE
    kBitFlip,      // Read: one bit differs and the check says so: DATA_LOSS
    kSlow,         // every Put and Read waits until Clear or another Set
  };
  // Applies to calls from now on, `count` times at most; calls that kSlow holds go on.
  void Set(Fault fault, int count = 1 << 30);
  void Clear() { Set(Fault::kNone); }
  // Calls that kSlow holds at this moment.
  int waiting() const;

  Status Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
             std::span<const std::byte> bytes) override;
  Result<StoredSnapshot> Find(const JobUid& job, StateId state, ShardIndex shard) override;
  Status Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) override;
  Result<std::vector<std::pair<JobUid, SnapshotInfo>>> List() override;
  Status Delete(const JobUid& job, StateId state, ShardIndex shard) override;
  size_t Damaged() const override { return store_.Damaged(); }

 private:
  Fault Take(bool put);  // the fault for one call

  SnapshotStore& store_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Fault fault_ = Fault::kNone;
  int count_ = 0;
  int waiting_ = 0;
};

}  // namespace everstep::checkpoint
