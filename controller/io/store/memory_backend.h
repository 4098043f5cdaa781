// A ledger in memory, and a wrapper that makes any backend fail on command. For tests and for clusters that need not
// survive their controller. The content outlives the backend, as a disk would. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "controller/io/store/ledger_store.h"

namespace everstep {

// What stays when the backend is gone.
struct MemoryDisk {
  std::mutex mutex;
  LedgerSequence snapshot_upto;
  std::string snapshot;
  std::map<LedgerSequence, std::string> records;
  int write_count = 0;
};

class MemoryLedgerBackend : public LedgerBackend {
 public:
  explicit MemoryLedgerBackend(std::shared_ptr<MemoryDisk> disk) : disk_(std::move(disk)) {}
  Result<StoredLedger> Load() override;
  Status Write(const std::vector<StoredRecord>& records) override;
  Status WriteSnapshot(const std::string& snapshot, LedgerSequence upto) override;

 private:
  const std::shared_ptr<MemoryDisk> disk_;
};

// Passes calls on until told otherwise.
class FaultyLedgerBackend : public LedgerBackend {
 public:
  struct Faults {
    std::mutex mutex;
    Status write_failure;           // not OK: returned by the next writes
    bool write_then_fail = false;   // the write happens, the answer is still the failure: an unknown outcome
    std::function<void()> before_write;  // called before each write, without the mutex; may block
  };

  FaultyLedgerBackend(std::unique_ptr<LedgerBackend> inner, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}
  Result<StoredLedger> Load() override { return inner_->Load(); }
  Status Write(const std::vector<StoredRecord>& records) override;
  Status WriteSnapshot(const std::string& snapshot, LedgerSequence upto) override;

 private:
  template <typename F>
  Status Faulty(F&& write);

  const std::unique_ptr<LedgerBackend> inner_;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace everstep
