// The ledger in RocksDB: column family "records" (big-endian sequence -> record) and "snapshot" (one entry). Every write
// is synced. One process per data directory, held by a lock file that names its owner. Used by one thread at a time.
#pragma once

#include <memory>
#include <string>

#include "controller/io/store/ledger_store.h"

namespace everstep {

// The data directory, created when missing (mode 0700) and locked until this object goes. Thread-compatible.
class DataDirectory {
 public:
  // kFailedPrecondition: another process holds it, or it is not writable; one line that names path and remedy.
  static Result<std::unique_ptr<DataDirectory>> Open(const std::string& path);
  ~DataDirectory();
  DataDirectory(const DataDirectory&) = delete;
  DataDirectory& operator=(const DataDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  DataDirectory(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  const std::string path_;
  const int lock_;
};

// Opens or creates the ledger in `directory`/ledger. kDataLoss: it is corrupt · kFailedPrecondition: it can't be opened;
// the message names the path.
Result<std::unique_ptr<LedgerBackend>> OpenRocksDbLedger(const std::string& directory);

}  // namespace everstep
