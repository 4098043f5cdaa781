#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "controller/io/store/memory_backend.h"
#include "controller/io/store/rocksdb_backend.h"
#include "controller/io/store/threaded_store.h"

namespace everstep {
namespace {

namespace fs = std::filesystem;

class TempDir {
 public:
  TempDir() {
    std::string pattern = ::testing::TempDir() + "/ledgerXXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TempDir() {
    fs::permissions(path_, fs::perms::owner_all);
    fs::remove_all(path_);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Waits until `count` completions came, and keeps their statuses in order.
class Completions {
 public:
  LedgerStore::Completion Next() {
    return [this](const Status& status) {
      std::lock_guard lock(mutex_);
      statuses_.push_back(status);
      changed_.notify_all();
    };
  }
  std::vector<Status> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return statuses_.size() >= count; });
    return statuses_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Status> statuses_;
};

std::vector<StoredRecord> Records(uint64_t first, uint64_t last) {
  std::vector<StoredRecord> out;
  for (uint64_t i = first; i <= last; ++i) out.push_back({LedgerSequence(i), "record " + std::to_string(i)});
  return out;
}

uint64_t BytesIn(const std::string& folder) {
  uint64_t sum = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) sum += entry.file_size();
  }
  return sum;
}

TEST(RocksDbLedger, GivesBackWhatWasWrittenInOrder) {
  TempDir dir;
  {
    auto ledger = OpenRocksDbLedger(dir.path());
    ASSERT_TRUE(ledger.ok()) << ledger.status().ToString();
    ASSERT_TRUE((*ledger)->Write(Records(1, 300)).ok());
    ASSERT_TRUE((*ledger)->Write(Records(301, 302)).ok());
  }
  auto ledger = OpenRocksDbLedger(dir.path());
  ASSERT_TRUE(ledger.ok());
  const auto loaded = (*ledger)->Load();
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->snapshot_upto, LedgerSequence(0));
  EXPECT_EQ(loaded->records, Records(1, 302));
}

TEST(RocksDbLedger, ASnapshotReplacesItsRecords) {
  TempDir dir;
  {
    auto ledger = OpenRocksDbLedger(dir.path());
    ASSERT_TRUE(ledger.ok());
    ASSERT_TRUE((*ledger)->Write(Records(1, 20)).ok());
    ASSERT_TRUE((*ledger)->WriteSnapshot("state at 15", LedgerSequence(15)).ok());
  }
  auto ledger = OpenRocksDbLedger(dir.path());
  ASSERT_TRUE(ledger.ok());
  const auto loaded = (*ledger)->Load();
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded->snapshot, "state at 15");
  EXPECT_EQ(loaded->snapshot_upto, LedgerSequence(15));
  EXPECT_EQ(loaded->records, Records(16, 20));
}

TEST(RocksDbLedger, AMissingRecordIsDataLoss) {
  TempDir dir;
  auto ledger = OpenRocksDbLedger(dir.path());
  ASSERT_TRUE(ledger.ok());
  ASSERT_TRUE((*ledger)->Write(Records(1, 3)).ok());
  ASSERT_TRUE((*ledger)->Write(Records(5, 6)).ok());
  EXPECT_EQ((*ledger)->Load().status(), DataLoss("the ledger's record 4 is missing"));
}

TEST(RocksDbLedger, RefusesARecordThatIsTooLarge) {
  TempDir dir;
  auto ledger = OpenRocksDbLedger(dir.path());
  ASSERT_TRUE(ledger.ok());
  EXPECT_EQ((*ledger)->Write({{LedgerSequence(1), std::string(kRecordBytesMax + 1, 'x')}}).code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE((*ledger)->Load()->records.empty());
}

TEST(RocksDbLedger, DamageIsNotTakenForAnEmptyLedger) {
  TempDir dir;
  {
    auto ledger = OpenRocksDbLedger(dir.path());
    ASSERT_TRUE((*ledger)->Write(Records(1, 100)).ok());
    ASSERT_TRUE((*ledger)->Write(Records(101, 200)).ok());
  }
  for (const auto& entry : fs::directory_iterator(dir.path() + "/ledger")) {
    if (entry.path().extension() != ".log" || entry.file_size() < 100) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(40);
    file.put('\x7f');
  }
  auto ledger = OpenRocksDbLedger(dir.path());
  EXPECT_EQ(ledger.status().code(), StatusCode::kDataLoss) << ledger.status().ToString();
}

TEST(RocksDbLedger, StaysBoundedWhenCompacted) {
  TempDir dir;
  auto ledger = OpenRocksDbLedger(dir.path());
  ASSERT_TRUE(ledger.ok());
  const std::string payload(1000, 'p');
  uint64_t sequence = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<StoredRecord> batch;
    for (int i = 0; i < 1000; ++i) batch.push_back({LedgerSequence(++sequence), payload});
    ASSERT_TRUE((*ledger)->Write(batch).ok());
    ASSERT_TRUE((*ledger)->WriteSnapshot(payload, LedgerSequence(sequence)).ok());
  }
  EXPECT_LT(BytesIn(dir.path()), 40u << 20);  // 60 MB went through
  EXPECT_TRUE((*ledger)->Load()->records.empty());
}

TEST(DataDirectory, NamesTheProcessThatHoldsIt) {
  TempDir dir;
  auto first = DataDirectory::Open(dir.path() + "/new/data");
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  const auto second = DataDirectory::Open(dir.path() + "/new/data");
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find("(process " + std::to_string(getpid()) + ")"), std::string::npos)
      << second.status().message();
  first->reset();
  EXPECT_TRUE(DataDirectory::Open(dir.path() + "/new/data").ok());
}

TEST(DataDirectory, NamesPathAndRemedyWhenItCannotBeUsed) {
  TempDir dir;
  std::ofstream(dir.path() + "/file") << "x";
  for (const std::string& path : {dir.path() + "/file", dir.path() + "/file/below", std::string("/proc/everstep")}) {
    const auto opened = DataDirectory::Open(path);
    ASSERT_FALSE(opened.ok()) << path;
    EXPECT_NE(opened.status().message().find(path), std::string::npos) << opened.status().message();
    EXPECT_NE(opened.status().message().find("--data-dir"), std::string::npos) << opened.status().message();
    EXPECT_EQ(opened.status().message().find('\n'), std::string::npos);
  }
}

TEST(ThreadedStore, WhatGathersWhileAWriteRunsBecomesOneWrite) {
  auto disk = std::make_shared<MemoryDisk>();
  auto faults = std::make_shared<FaultyLedgerBackend::Faults>();
  std::mutex gate;
  std::condition_variable changed;
  bool entered = false, open = false;
  faults->before_write = [&] {
    std::unique_lock lock(gate);
    entered = true;
    changed.notify_all();
    changed.wait(lock, [&] { return open; });
  };
  Completions completions;
  {
    ThreadedLedgerStore store(
        std::make_unique<FaultyLedgerBackend>(std::make_unique<MemoryLedgerBackend>(disk), faults));
    store.Append(Records(1, 1), completions.Next());
    {
      std::unique_lock lock(gate);
      changed.wait(lock, [&] { return entered; });
    }
    for (uint64_t i = 2; i <= 50; ++i) store.Append(Records(i, i), completions.Next());
    {
      std::lock_guard lock(gate);
      open = true;
    }
    changed.notify_all();
    EXPECT_EQ(completions.Wait(50).size(), 50u);
  }
  EXPECT_EQ(disk->write_count, 2);
  EXPECT_EQ(disk->records.size(), 50u);
}

TEST(ThreadedStore, AFailureIsReportedAndSticks) {
  auto disk = std::make_shared<MemoryDisk>();
  auto faults = std::make_shared<FaultyLedgerBackend::Faults>();
  ThreadedLedgerStore store(
      std::make_unique<FaultyLedgerBackend>(std::make_unique<MemoryLedgerBackend>(disk), faults));
  Completions completions;
  store.Append(Records(1, 1), completions.Next());
  completions.Wait(1);
  {
    std::lock_guard lock(faults->mutex);
    faults->write_failure = ResourceExhausted("no space left");
  }
  store.Append(Records(2, 2), completions.Next());
  completions.Wait(2);
  {
    std::lock_guard lock(faults->mutex);
    faults->write_failure = OkStatus();
  }
  store.Append(Records(3, 3), completions.Next());
  store.Compact("state", LedgerSequence(3), completions.Next());
  const std::vector<Status> statuses = completions.Wait(4);
  EXPECT_TRUE(statuses[0].ok());
  for (int i : {1, 2, 3}) EXPECT_EQ(statuses[i], ResourceExhausted("no space left"));
  EXPECT_EQ(disk->records.size(), 1u);
  EXPECT_EQ(disk->snapshot, "");
}

TEST(ThreadedStore, CompactionComesAfterTheAppendsBeforeIt) {
  auto disk = std::make_shared<MemoryDisk>();
  Completions completions;
  {
    ThreadedLedgerStore store(std::make_unique<MemoryLedgerBackend>(disk));
    store.Append(Records(1, 9), completions.Next());
    store.Compact("state at 9", LedgerSequence(9), completions.Next());
    store.Append(Records(10, 11), completions.Next());
  }
  EXPECT_EQ(completions.Wait(3).size(), 3u);
  const auto loaded = MemoryLedgerBackend(disk).Load();
  EXPECT_EQ(loaded->snapshot, "state at 9");
  EXPECT_EQ(loaded->records, Records(10, 11));
}

}  // namespace
}  // namespace everstep
