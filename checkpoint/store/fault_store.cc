#include "checkpoint/store/fault_store.h"

#include "checkpoint/store/digest.h"

namespace everstep::checkpoint {

void FaultStore::Set(Fault fault, int count) {
  {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    count_ = count;
  }
  changed_.notify_all();
}

int FaultStore::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

FaultStore::Fault FaultStore::Take(bool put) {
  std::unique_lock lock(mutex_);
  if (fault_ == Fault::kSlow) {
    ++waiting_;
    changed_.wait(lock, [this] { return fault_ != Fault::kSlow; });
    --waiting_;
  }
  const bool concerns = fault_ != Fault::kNone &&
                        put == (fault_ == Fault::kDiskFull || fault_ == Fault::kSyncError);
  if (!concerns || count_ <= 0) return Fault::kNone;
  --count_;
  return fault_;
}

Status FaultStore::Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                       std::span<const std::byte> bytes) {
  switch (Take(true)) {
    case Fault::kDiskFull: return ResourceExhausted("injected: no space left on device");
    case Fault::kSyncError: {
      // The kernel may or may not have written the pages: the store must not show them either way.
      const bool existed = store_.Find(job, info.state, info.shard).ok();
      const Status put = store_.Put(job, info, tensors, bytes);
      if (put.ok() && !existed) (void)store_.Delete(job, info.state, info.shard);
      return Unavailable("injected: fsync failed: input/output error");
    }
    default: return store_.Put(job, info, tensors, bytes);
  }
}

Result<StoredSnapshot> FaultStore::Find(const JobUid& job, StateId state, ShardIndex shard) {
  return store_.Find(job, state, shard);
}

Status FaultStore::Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) {
  const Fault fault = Take(false);
  if (fault == Fault::kReadError) return Unavailable("injected: input/output error");
  EVERSTEP_RETURN_IF_ERROR(store_.Read(job, state, shard, out));
  if (fault != Fault::kBitFlip || out.empty()) return OkStatus();
  const Digest128 before = DigestOf(out);
  out[out.size() / 2] ^= std::byte{1};
  return DigestOf(out) == before ? OkStatus() : DataLoss("injected: a chunk does not match its hash");
}

Result<std::vector<std::pair<JobUid, SnapshotInfo>>> FaultStore::List() { return store_.List(); }

Status FaultStore::Delete(const JobUid& job, StateId state, ShardIndex shard) {
  return store_.Delete(job, state, shard);
}

}  // namespace everstep::checkpoint
