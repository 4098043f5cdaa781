#include "controller/io/store/rocksdb_backend.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/write_batch.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <filesystem>
#include <memory>

namespace everstep {
namespace {

constexpr char kRecordsFamily[] = "records";
constexpr char kSnapshotFamily[] = "snapshot";
constexpr char kSnapshotKey[] = "snapshot";

std::string Key(LedgerSequence sequence) {
  std::string key(8, '\0');
  for (int i = 0; i < 8; ++i) key[i] = static_cast<char>(sequence.value >> (56 - 8 * i));
  return key;
}

uint64_t FromKey(const rocksdb::Slice& key) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | static_cast<uint8_t>(key[i]);
  return value;
}

Status FromRocks(const rocksdb::Status& status, const char* what) {
  if (status.ok()) return OkStatus();
  const std::string message = fmt::format("{}: {}", what, status.ToString());
  if (status.IsNoSpace()) return ResourceExhausted(message);
  if (status.IsCorruption()) return DataLoss(message);
  return Unavailable(message);
}

// RocksDB's own log would share the ledger's disk, and its writer aborts the process (an assertion of packaged builds)
// when that disk is full, before the failure reaches us. Its statuses say what matters.
class NoLog : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}
};

class RocksDbLedgerBackend : public LedgerBackend {
 public:
  RocksDbLedgerBackend(rocksdb::DB* db, std::vector<rocksdb::ColumnFamilyHandle*> families)
      : db_(db), families_(std::move(families)), records_(families_[1]), snapshot_(families_[2]) {}

  ~RocksDbLedgerBackend() override {
    for (rocksdb::ColumnFamilyHandle* family : families_) {
      const rocksdb::Status ignored = db_->DestroyColumnFamilyHandle(family);
      (void)ignored;
    }
    const rocksdb::Status ignored = db_->Close();  // all that matters was synced when it was written
    (void)ignored;
  }

  Result<StoredLedger> Load() override {
    StoredLedger out;
    std::string stored;
    const rocksdb::Status found = db_->Get(rocksdb::ReadOptions(), snapshot_, kSnapshotKey, &stored);
    if (!found.ok() && !found.IsNotFound()) return FromRocks(found, "reading the ledger's snapshot");
    if (found.ok()) {
      if (stored.size() < 8) return DataLoss("the ledger's snapshot is damaged: it is too short");
      out.snapshot_upto = LedgerSequence(FromKey(rocksdb::Slice(stored.data(), 8)));
      out.snapshot = stored.substr(8);
    }
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions(), records_));
    uint64_t expected = out.snapshot_upto.value + 1;
    for (it->Seek(Key(LedgerSequence(expected))); it->Valid(); it->Next(), ++expected) {
      if (it->key().size() != 8 || FromKey(it->key()) != expected) {
        return DataLoss(fmt::format("the ledger's record {} is missing", expected));
      }
      out.records.push_back({LedgerSequence(expected), it->value().ToString()});
    }
    EVERSTEP_RETURN_IF_ERROR(FromRocks(it->status(), "reading the ledger"));
    return out;
  }

  Status Write(const std::vector<StoredRecord>& records) override {
    rocksdb::WriteBatch batch;
    for (const StoredRecord& record : records) {
      if (record.bytes.size() > kRecordBytesMax) {
        return ResourceExhausted(fmt::format("ledger record {} has {} bytes; at most {} are allowed",
                                             record.sequence.value, record.bytes.size(), kRecordBytesMax));
      }
      EVERSTEP_RETURN_IF_ERROR(
          FromRocks(batch.Put(records_, Key(record.sequence), record.bytes), "writing the ledger"));
    }
    return FromRocks(db_->Write(Synced(), &batch), "writing the ledger");
  }

  Status WriteSnapshot(const std::string& snapshot, LedgerSequence upto) override {
    rocksdb::WriteBatch batch;
    EVERSTEP_RETURN_IF_ERROR(
        FromRocks(batch.Put(snapshot_, kSnapshotKey, Key(upto) + snapshot), "compacting the ledger"));
    EVERSTEP_RETURN_IF_ERROR(
        FromRocks(batch.DeleteRange(records_, Key(LedgerSequence(0)), Key(upto.Next())), "compacting the ledger"));
    return FromRocks(db_->Write(Synced(), &batch), "compacting the ledger");
  }

 private:
  static rocksdb::WriteOptions Synced() {
    rocksdb::WriteOptions options;
    options.sync = true;
    return options;
  }

  const std::unique_ptr<rocksdb::DB> db_;
  const std::vector<rocksdb::ColumnFamilyHandle*> families_;
  rocksdb::ColumnFamilyHandle* const records_;
  rocksdb::ColumnFamilyHandle* const snapshot_;
};

}  // namespace

Result<std::unique_ptr<DataDirectory>> DataDirectory::Open(const std::string& path) {
  std::error_code error;
  const bool existed = std::filesystem::exists(path, error);
  if (!existed) {
    std::filesystem::create_directories(path, error);
    if (error) {
      return FailedPrecondition(fmt::format("data directory {} cannot be created: {}; choose another with --data-dir",
                                            path, error.message()));
    }
    ::chmod(path.c_str(), 0700);
  } else if (!std::filesystem::is_directory(path, error)) {
    return FailedPrecondition(fmt::format("data directory {} is not a folder; choose another with --data-dir", path));
  }
  const std::string lock_path = path + "/lock";
  const int lock = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0) {
    return FailedPrecondition(
        fmt::format("data directory {} is not writable: {}; make it writable for this user or choose another with "
                    "--data-dir", path, strerror(errno)));
  }
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = {};
    const ssize_t length = ::read(lock, owner, sizeof(owner) - 1);
    ::close(lock);
    return FailedPrecondition(
        fmt::format("data directory {} is in use by another everstep-controller (process {}); stop that one or choose "
                    "another with --data-dir", path, length > 0 ? owner : "unknown"));
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(lock, 0) != 0 || ::write(lock, pid.data(), pid.size()) != static_cast<ssize_t>(pid.size())) {
    const Status status = FailedPrecondition(
        fmt::format("data directory {} is not writable: {}; free space or choose another with --data-dir", path,
                    strerror(errno)));
    ::close(lock);
    return status;
  }
  return std::unique_ptr<DataDirectory>(new DataDirectory(path, lock));
}

DataDirectory::~DataDirectory() { ::close(lock_); }

Result<std::unique_ptr<LedgerBackend>> OpenRocksDbLedger(const std::string& directory) {
  const std::string path = directory + "/ledger";
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.paranoid_checks = true;
  // A write that was cut off was never acknowledged; damage anywhere else must not pass silently.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  // A log goes only when every family that it holds something of was flushed. What the compaction of the ledger made
  // obsolete stays on disk until then: these two sizes are what bounds it.
  options.max_total_wal_size = 2 << 20;
  options.max_background_jobs = 2;
  options.max_bgerror_resume_count = 0;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.info_log = std::make_shared<NoLog>();
  rocksdb::ColumnFamilyOptions family;
  family.write_buffer_size = 1 << 20;
  family.compression = rocksdb::kNoCompression;
  std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
  descriptors.emplace_back(rocksdb::kDefaultColumnFamilyName, family);
  descriptors.emplace_back(kRecordsFamily, family);
  descriptors.emplace_back(kSnapshotFamily, family);
  rocksdb::DB* db = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> families;
  const rocksdb::Status opened = rocksdb::DB::Open(options, path, descriptors, &families, &db);
  if (opened.IsCorruption()) {
    return DataLoss(fmt::format("ledger {} is corrupt: {}; restore a backup of it", path, opened.ToString()));
  }
  if (!opened.ok()) {
    return FailedPrecondition(fmt::format("ledger {} cannot be opened: {}; choose another directory with --data-dir",
                                          path, opened.ToString()));
  }
  return std::unique_ptr<LedgerBackend>(new RocksDbLedgerBackend(db, std::move(families)));
}

}  // namespace everstep
