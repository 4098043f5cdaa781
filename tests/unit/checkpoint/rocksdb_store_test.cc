// What only a store on a real disk can do: survive, be full, be damaged, be locked.
#include "checkpoint/store/rocksdb_store.h"

#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include <gtest/gtest.h>

#include "tests/unit/checkpoint/snapshot_samples.h"

namespace everstep::checkpoint {
namespace {

const JobUid kJob("job-1");

std::unique_ptr<RocksDbStore> MustOpen(const std::string& path, RocksDbStore::Options options = {}) {
  auto opened = RocksDbStore::Open(path, options);
  EXPECT_TRUE(opened.ok()) << opened.status().ToString();
  return opened.ok() ? std::move(*opened) : nullptr;
}

Status Put(RocksDbStore& store, const Sample& sample) {
  return store.Put(kJob, sample.info, sample.tensors, sample.bytes);
}

uint64_t DirectoryBytes(const std::string& path) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) bytes += entry.file_size();
  }
  return bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(RocksDbStore, SnapshotsSurviveAReopen) {
  const TemporaryDirectory directory;
  const Sample small = SampleOf(1, RandomBytes(1, 5000));
  const Sample large = SampleOf(2, RandomBytes(2, 6 * kChunkBytes));
  {
    const auto store = MustOpen(directory.path());
    ASSERT_TRUE(Put(*store, small).ok());
    ASSERT_TRUE(Put(*store, large).ok());
  }
  const auto store = MustOpen(directory.path());
  ASSERT_EQ(store->List()->size(), 2u);
  const auto got = store->Get(kJob, large.info.state, large.info.shard);
  ASSERT_TRUE(got.ok()) << got.status().ToString();
  EXPECT_TRUE(got->second == large.bytes);
  EXPECT_TRUE(store->Get(kJob, small.info.state, small.info.shard).ok());
}

TEST(RocksDbStore, EqualChunksAreStoredOnceAlsoAcrossAReopen) {
  const TemporaryDirectory directory;
  const Sample first = SampleOf(1, RandomBytes(1, 8 * kChunkBytes));
  {
    const auto store = MustOpen(directory.path());
    ASSERT_TRUE(Put(*store, first).ok());
  }
  const uint64_t before = DirectoryBytes(directory.path());
  const auto store = MustOpen(directory.path());
  ASSERT_TRUE(Put(*store, SampleOf(2, first.bytes)).ok());
  EXPECT_EQ(store->chunk_count(), 8u);
  EXPECT_LT(DirectoryBytes(directory.path()), before + kChunkBytes);
}

TEST(RocksDbStore, DeletingGivesTheDiskItsSpaceBack) {
  const TemporaryDirectory directory;
  const auto store = MustOpen(directory.path());
  ASSERT_TRUE(Put(*store, SampleOf(1, RandomBytes(1, 16 * kChunkBytes))).ok());
  ASSERT_TRUE(Put(*store, SampleOf(2, RandomBytes(2, 16 * kChunkBytes))).ok());
  EXPECT_GT(DirectoryBytes(directory.path()), 32 * kChunkBytes);
  ASSERT_TRUE(store->Delete(kJob, {Step(1), Generation(1)}, ShardIndex(0)).ok());
  EXPECT_LT(DirectoryBytes(directory.path()), 18 * kChunkBytes);
  EXPECT_TRUE(store->Get(kJob, {Step(2), Generation(1)}, ShardIndex(0)).ok());
}

// Flips one bit in the middle of a chunk of the sample, wherever it lies in the directory. The store must be closed.
int FlipBitOfChunk(const std::string& path, const Sample& sample, size_t chunk) {
  const std::string needle(reinterpret_cast<const char*>(sample.bytes.data()) + chunk * kChunkBytes + kChunkBytes / 2,
                           64);
  int flipped = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() != ".sst") continue;
    std::string content = ReadFile(entry.path().string());
    const size_t at = content.find(needle);
    if (at == std::string::npos) continue;
    content[at] = static_cast<char>(content[at] ^ 0x10);
    std::ofstream(entry.path(), std::ios::binary) << content;
    ++flipped;
  }
  return flipped;
}

TEST(RocksDbStore, AFlippedBitOnTheDiskIsDetected) {
  const TemporaryDirectory directory;
  const Sample sample = SampleOf(1, RandomBytes(1, 9 * kChunkBytes));
  const Sample other = SampleOf(2, RandomBytes(2, 9 * kChunkBytes));
  {
    const auto store = MustOpen(directory.path());
    ASSERT_TRUE(Put(*store, sample).ok());
    ASSERT_TRUE(Put(*store, other).ok());
  }
  ASSERT_EQ(FlipBitOfChunk(directory.path(), sample, 1), 1);
  const auto store = MustOpen(directory.path());
  ASSERT_NE(store, nullptr);
  const auto got = store->Get(kJob, sample.info.state, sample.info.shard);
  EXPECT_EQ(got.status().code(), StatusCode::kDataLoss) << got.status().ToString();
  EXPECT_EQ(got.status().message().find('\n'), std::string::npos);
  EXPECT_TRUE(store->Get(kJob, other.info.state, other.info.shard).ok());
}

TEST(RocksDbStore, ADamagedChunkIsNotSharedWithALaterSnapshot) {
  const TemporaryDirectory directory;
  const Sample sample = SampleOf(1, RandomBytes(1, 9 * kChunkBytes));
  {
    const auto store = MustOpen(directory.path());
    ASSERT_TRUE(Put(*store, sample).ok());
  }
  ASSERT_EQ(FlipBitOfChunk(directory.path(), sample, 3), 1);
  const Sample later = SampleOf(2, sample.bytes);
  const auto store = MustOpen(directory.path());
  ASSERT_NE(store, nullptr);
  ASSERT_TRUE(Put(*store, later).ok());
  EXPECT_EQ(store->chunk_count(), 10u);  // the damaged one and its replacement
  EXPECT_TRUE(store->Get(kJob, later.info.state, later.info.shard).ok());
  EXPECT_EQ(store->Get(kJob, sample.info.state, sample.info.shard).status().code(), StatusCode::kDataLoss);
  ASSERT_TRUE(store->Delete(kJob, sample.info.state, sample.info.shard).ok());
  EXPECT_TRUE(store->Get(kJob, later.info.state, later.info.shard).ok());
}

TEST(RocksDbStore, ALockedDirectoryIsAOneLineError) {
  const TemporaryDirectory directory;
  const auto first = MustOpen(directory.path());
  const auto second = RocksDbStore::Open(directory.path());
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(directory.path()), std::string::npos);
  EXPECT_NE(second.status().message().find("locked"), std::string::npos);
  EXPECT_EQ(second.status().message().find('\n'), std::string::npos);
}

TEST(RocksDbStore, ADirectoryThatCanNotBeMadeIsAOneLineError) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() + "/file") << "not a directory";
  const auto opened = RocksDbStore::Open(directory.path() + "/file/store");
  EXPECT_EQ(opened.status().code(), StatusCode::kPermissionDenied);
  EXPECT_NE(opened.status().message().find(directory.path()), std::string::npos);
  EXPECT_EQ(opened.status().message().find('\n'), std::string::npos);
}

TEST(RocksDbStore, RefusesAPutThatWouldFillTheDisk) {
  const TemporaryDirectory directory;
  RocksDbStore::Options options;
  options.free_bytes_min = uint64_t{1} << 60;
  const auto store = MustOpen(directory.path(), options);
  EXPECT_EQ(Put(*store, SampleOf(1, RandomBytes(1, 1000))).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store->List()->empty());
}

// A file-size limit stands for a full disk: the write fails in the middle of a file. In a child, because the limit
// holds for a whole process.
class RocksDbStoreFull : public testing::TestWithParam<uint64_t> {};

TEST_P(RocksDbStoreFull, AFullDiskIsSaidAndLeavesTheStoreUsable) {
  const TemporaryDirectory directory;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    RocksDbStore::Options options;
    options.ingest_bytes_min = GetParam();
    auto opened = RocksDbStore::Open(directory.path(), options);
    if (!opened.ok()) _exit(1);
    RocksDbStore& store = **opened;
    if (!Put(store, SampleOf(1, RandomBytes(1, 1000))).ok()) _exit(2);
    rlimit limit{2u << 20, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(3);
    const Sample large = SampleOf(2, RandomBytes(2, 8 * kChunkBytes));
    if (Put(store, large).code() != StatusCode::kResourceExhausted) _exit(4);
    if (store.Find(kJob, large.info.state, large.info.shard).ok()) _exit(5);
    if (!store.Get(kJob, {Step(1), Generation(1)}, ShardIndex(0)).ok()) _exit(6);
    limit.rlim_cur = RLIM_INFINITY;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(7);
    if (!Put(store, large).ok()) _exit(8);
    if (!store.Get(kJob, large.info.state, large.info.shard).ok()) _exit(9);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the exit code names the step that failed";
  // What the failed put left behind is swept, and what was stored is there.
  const auto store = MustOpen(directory.path());
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(store->List()->size(), 2u);
  EXPECT_TRUE(store->Get(kJob, {Step(2), Generation(1)}, ShardIndex(0)).ok());
}

INSTANTIATE_TEST_SUITE_P(PutsAndIngestion, RocksDbStoreFull, testing::Values(uint64_t{1} << 40, uint64_t{1}));

// A process that dies at some moment of a put: afterwards the snapshot is either whole or not there, and the next
// put works.
TEST(RocksDbStore, APutThatIsKilledIsWholeOrInvisible) {
  const TemporaryDirectory directory;
  for (int round = 0; round < 6; ++round) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto opened = RocksDbStore::Open(directory.path());
      if (!opened.ok()) _exit(1);
      (void)!write(ready[1], "r", 1);
      for (int64_t step = 1;; ++step) {
        (void)Put(**opened, SampleOf(round * 1000 + step, RandomBytes(static_cast<uint64_t>(round * 1000 + step),
                                                                       5 * kChunkBytes)));
        (void)!write(ready[1], "p", 1);
      }
    }
    close(ready[1]);
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    ASSERT_EQ(byte, 'r');
    // Kill it inside its second put: after the first, plus a little that differs from round to round.
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    for (int i = 0; i < round * 300; ++i) sched_yield();
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    close(ready[0]);
    const auto store = MustOpen(directory.path());
    ASSERT_NE(store, nullptr);
    const auto all = store->List();
    ASSERT_TRUE(all.ok());
    EXPECT_GE(all->size(), static_cast<size_t>(round) + 1);
    for (const auto& [job, info] : *all) {
      const auto got = store->Get(job, info.state, info.shard);
      ASSERT_TRUE(got.ok()) << got.status().ToString();
      EXPECT_TRUE(got->second == RandomBytes(static_cast<uint64_t>(info.state.step.value), 5 * kChunkBytes));
    }
    EXPECT_EQ(store->Damaged(), 0u);
  }
}

}  // namespace
}  // namespace everstep::checkpoint
