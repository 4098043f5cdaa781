// A ledger store with a thread of its own over a blocking backend. Group commit: all appends that gathered while the
// last write ran become one synced write. Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "controller/io/store/ledger_store.h"

namespace everstep {

class ThreadedLedgerStore : public LedgerStore {
 public:
  explicit ThreadedLedgerStore(std::unique_ptr<LedgerBackend> backend);
  ~ThreadedLedgerStore() override;

  Result<StoredLedger> Load() override;
  void Append(std::vector<StoredRecord> records, Completion done) override;
  void Compact(std::string snapshot, LedgerSequence upto, Completion done) override;
  void Close() override;

 private:
  struct Task {
    std::vector<StoredRecord> records;  // empty: a compaction
    std::string snapshot;
    LedgerSequence upto;
    Completion done;
  };

  void Run();
  void Push(Task task);
  void WriteAppends(std::vector<Task>& tasks);

  const std::unique_ptr<LedgerBackend> backend_;
  Status failure_;                 // store thread only; sticky
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;         // guarded by mutex_
  bool closing_ = false;           // guarded by mutex_
  std::thread thread_;
};

}  // namespace everstep
