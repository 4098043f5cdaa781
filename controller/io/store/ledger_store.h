// Where the ledger is durable. The loop appends what the core decided and hears, on another thread, when it is safe.
// Implementations: ThreadedLedgerStore over a blocking backend (RocksDB, memory); a leader-elected one fits the same
// interface. Thread-safe, except that Load comes first and alone.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"

namespace everstep {

struct StoredRecord {
  LedgerSequence sequence;
  std::string bytes;
  bool operator==(const StoredRecord&) const = default;
};

struct StoredLedger {
  LedgerSequence snapshot_upto;        // 0: there is no snapshot
  std::string snapshot;
  std::vector<StoredRecord> records;   // contiguous, the first one is snapshot_upto + 1
};

inline constexpr size_t kRecordBytesMax = 32 * 1024 * 1024;

class LedgerStore {
 public:
  // Called on the store's thread, in the order of the calls. After the first failure every later call fails too:
  // whoever gets one must stop promising, and the process ends.
  using Completion = std::function<void(const Status&)>;

  virtual ~LedgerStore() = default;
  // kDataLoss: a record is damaged or missing.
  virtual Result<StoredLedger> Load() = 0;
  // Makes the records durable, all or none. REQUIRES: sequences go on where the last call ended.
  virtual void Append(std::vector<StoredRecord> records, Completion done) = 0;
  // Replaces all records up to and with `upto` by the snapshot. REQUIRES: all of them were given to Append.
  virtual void Compact(std::string snapshot, LedgerSequence upto, Completion done) = 0;
  // Finishes what was given, then no more calls are allowed. Idempotent.
  virtual void Close() = 0;
};

// A blocking store, used by one thread at a time. ThreadedLedgerStore gives it a thread.
class LedgerBackend {
 public:
  virtual ~LedgerBackend() = default;
  virtual Result<StoredLedger> Load() = 0;
  // Durable when it returns OK. kResourceExhausted: the disk is full · kUnavailable: another I/O error, a failed sync
  // included · kDataLoss: corruption.
  virtual Status Write(const std::vector<StoredRecord>& records) = 0;
  virtual Status WriteSnapshot(const std::string& snapshot, LedgerSequence upto) = 0;
};

}  // namespace everstep
