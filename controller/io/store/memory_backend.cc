#include "controller/io/store/memory_backend.h"

namespace everstep {

Result<StoredLedger> MemoryLedgerBackend::Load() {
  std::lock_guard lock(disk_->mutex);
  StoredLedger out;
  out.snapshot_upto = disk_->snapshot_upto;
  out.snapshot = disk_->snapshot;
  for (const auto& [sequence, bytes] : disk_->records) out.records.push_back({sequence, bytes});
  return out;
}

Status MemoryLedgerBackend::Write(const std::vector<StoredRecord>& records) {
  std::lock_guard lock(disk_->mutex);
  ++disk_->write_count;
  for (const StoredRecord& record : records) disk_->records[record.sequence] = record.bytes;
  return OkStatus();
}

Status MemoryLedgerBackend::WriteSnapshot(const std::string& snapshot, LedgerSequence upto) {
  std::lock_guard lock(disk_->mutex);
  disk_->snapshot = snapshot;
  disk_->snapshot_upto = upto;
  disk_->records.erase(disk_->records.begin(), disk_->records.upper_bound(upto));
  return OkStatus();
}

template <typename F>
Status FaultyLedgerBackend::Faulty(F&& write) {
  std::function<void()> before;
  Status failure;
  bool write_anyway = false;
  {
    std::lock_guard lock(faults_->mutex);
    before = faults_->before_write;
  }
  if (before) before();
  {
    std::lock_guard lock(faults_->mutex);
    failure = faults_->write_failure;
    write_anyway = faults_->write_then_fail;
  }
  if (failure.ok()) return write();
  if (write_anyway) EVERSTEP_RETURN_IF_ERROR(write());
  return failure;
}

Status FaultyLedgerBackend::Write(const std::vector<StoredRecord>& records) {
  return Faulty([&] { return inner_->Write(records); });
}

Status FaultyLedgerBackend::WriteSnapshot(const std::string& snapshot, LedgerSequence upto) {
  return Faulty([&] { return inner_->WriteSnapshot(snapshot, upto); });
}

}  // namespace everstep
