// What every SnapshotStore owes its callers, for each implementation.
#include "checkpoint/store/snapshot_store.h"

#include <atomic>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "checkpoint/store/fault_store.h"
#include "checkpoint/store/memory_store.h"
#include "checkpoint/store/rocksdb_store.h"
#include "tests/unit/checkpoint/snapshot_samples.h"

namespace everstep::checkpoint {
namespace {

const JobUid kJob("job-1");

enum class Kind { kMemory, kRocksDbPuts, kRocksDbIngestion, kWrapped };

class StoreTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    switch (GetParam()) {
      case Kind::kWrapped:
        inner_ = std::make_unique<MemoryStore>();
        store_ = std::make_unique<FaultStore>(*inner_);
        break;
      case Kind::kMemory: store_ = std::make_unique<MemoryStore>(); break;
      default: {
        RocksDbStore::Options options;
        options.ingest_bytes_min = GetParam() == Kind::kRocksDbIngestion ? 1 : uint64_t{1} << 40;
        auto opened = RocksDbStore::Open(directory_.path() + "/store", options);
        ASSERT_TRUE(opened.ok()) << opened.status().ToString();
        store_ = std::move(*opened);
      }
    }
  }
  Status Put(const Sample& sample, const JobUid& job = kJob) {
    return store_->Put(job, sample.info, sample.tensors, sample.bytes);
  }
  void ExpectHeld(const Sample& sample, const JobUid& job = kJob) {
    const auto got = store_->Get(job, sample.info.state, sample.info.shard);
    ASSERT_TRUE(got.ok()) << got.status().ToString();
    EXPECT_EQ(got->first.info, sample.info);
    EXPECT_EQ(got->first.tensors, sample.tensors);
    EXPECT_TRUE(got->second == sample.bytes);
  }

  TemporaryDirectory directory_;
  std::unique_ptr<SnapshotStore> inner_;
  std::unique_ptr<SnapshotStore> store_;
};

TEST_P(StoreTest, GivesBackWhatWasPut) {
  const Sample small = SampleOf(1, RandomBytes(1, 10));
  const Sample large = SampleOf(2, RandomBytes(2, 3 * kChunkBytes + 17));
  const Sample empty = SampleOf(3, {});
  for (const Sample* sample : {&small, &large, &empty}) {
    ASSERT_TRUE(Put(*sample).ok()) << Put(*sample).ToString();
  }
  for (const Sample* sample : {&small, &large, &empty}) ExpectHeld(*sample);
}

TEST_P(StoreTest, KeepsJobsStatesAndShardsApart) {
  const Sample a = SampleOf(1, RandomBytes(1, 100), 0);
  const Sample b = SampleOf(1, RandomBytes(2, 100), 1);
  const Sample c = SampleOf(1, RandomBytes(3, 100), 0, 2);
  const Sample d = SampleOf(2, RandomBytes(4, 100), 0);
  ASSERT_TRUE(Put(a).ok());
  ASSERT_TRUE(Put(b).ok());
  ASSERT_TRUE(Put(c).ok());
  ASSERT_TRUE(Put(d, JobUid("job-2")).ok());
  for (const Sample* sample : {&a, &b, &c}) ExpectHeld(*sample);
  ExpectHeld(d, JobUid("job-2"));
  EXPECT_EQ(store_->Find(kJob, d.info.state, d.info.shard).status().code(), StatusCode::kNotFound);
  const auto all = store_->List();
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->size(), 4u);
  EXPECT_EQ((*all)[0].second, a.info);
  EXPECT_EQ((*all)[3].first, JobUid("job-2"));
}

TEST_P(StoreTest, TheSamePutTwiceIsFineAnotherContentIsNot) {
  const Sample first = SampleOf(1, RandomBytes(1, 1000));
  ASSERT_TRUE(Put(first).ok());
  EXPECT_TRUE(Put(first).ok());
  EXPECT_EQ(Put(SampleOf(1, RandomBytes(2, 1000))).code(), StatusCode::kAlreadyExists);
  ExpectHeld(first);
}

TEST_P(StoreTest, RefusesBytesThatDoNotFitTheirDescription) {
  Sample sample = SampleOf(1, RandomBytes(1, 1000));
  sample.info.digest[0] ^= 1;
  EXPECT_EQ(Put(sample).code(), StatusCode::kInvalidArgument);
  sample = SampleOf(1, RandomBytes(1, 1000));
  sample.info.bytes = 999;
  EXPECT_EQ(Put(sample).code(), StatusCode::kInvalidArgument);
  sample = SampleOf(1, RandomBytes(1, 1000));
  sample.tensors[0].bytes = 1001;
  EXPECT_EQ(Put(sample).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Put(SampleOf(1, RandomBytes(1, 10)), JobUid()).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->List()->empty());
}

TEST_P(StoreTest, ForgetsWhatIsDeletedAndKeepsSharedChunks) {
  const Sample first = SampleOf(1, RandomBytes(1, 2 * kChunkBytes));
  Sample second = SampleOf(2, RandomBytes(1, 2 * kChunkBytes));
  second.bytes.back() ^= std::byte{1};  // the first chunk is shared, the second differs
  second.info.digest = DigestOf(second.bytes);
  ASSERT_TRUE(Put(first).ok());
  ASSERT_TRUE(Put(second).ok());
  ASSERT_TRUE(store_->Delete(kJob, first.info.state, first.info.shard).ok());
  EXPECT_EQ(store_->Find(kJob, first.info.state, first.info.shard).status().code(), StatusCode::kNotFound);
  ExpectHeld(second);
  ASSERT_TRUE(Put(first).ok());  // again, after its own chunk was deleted
  ASSERT_TRUE(store_->Delete(kJob, second.info.state, second.info.shard).ok());
  ExpectHeld(first);
  EXPECT_TRUE(store_->Delete(kJob, second.info.state, second.info.shard).ok());
}

TEST_P(StoreTest, ReadsOnlyIntoABufferOfTheRightSize) {
  const Sample sample = SampleOf(1, RandomBytes(1, 1000));
  ASSERT_TRUE(Put(sample).ok());
  std::vector<std::byte> out(999);
  EXPECT_EQ(store_->Read(kJob, sample.info.state, sample.info.shard, out).code(), StatusCode::kInvalidArgument);
}

TEST_P(StoreTest, PutsReadsAndDeletesOfManyThreadsDoNotDisturbEachOther) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t step = 1; step <= 6; ++step) {
        // Chunks are shared between the threads at each step.
        std::vector<std::byte> bytes = RandomBytes(static_cast<uint64_t>(step), kChunkBytes + 100);
        bytes.back() = static_cast<std::byte>(thread);
        const Sample sample = SampleOf(step, std::move(bytes), thread);
        failures += !Put(sample).ok();
        const auto got = store_->Get(kJob, sample.info.state, sample.info.shard);
        failures += !got.ok() || got->second != sample.bytes;
        if (step > 2) {
          failures += !store_->Delete(kJob, {Step(step - 2), Generation(1)}, ShardIndex(thread)).ok();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  const auto all = store_->List();
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->size(), 8u);
  for (const auto& [job, info] : *all) EXPECT_TRUE(store_->Get(job, info.state, info.shard).ok());
}

std::string KindName(const testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::kMemory: return "Memory";
    case Kind::kRocksDbPuts: return "RocksDbPuts";
    case Kind::kRocksDbIngestion: return "RocksDbIngestion";
    case Kind::kWrapped: return "Wrapped";
  }
  return "Unknown";
}

INSTANTIATE_TEST_SUITE_P(All, StoreTest,
                         testing::Values(Kind::kMemory, Kind::kRocksDbPuts, Kind::kRocksDbIngestion, Kind::kWrapped),
                         KindName);

TEST(MemoryStore, StoresEqualChunksOnceAndStopsAtItsLimit) {
  MemoryStore store(3 * kChunkBytes);
  const Sample first = SampleOf(1, RandomBytes(1, 2 * kChunkBytes));
  Sample second = SampleOf(2, first.bytes);
  ASSERT_TRUE(store.Put(kJob, first.info, first.tensors, first.bytes).ok());
  ASSERT_TRUE(store.Put(kJob, second.info, second.tensors, second.bytes).ok());
  EXPECT_EQ(store.chunk_bytes(), 2 * kChunkBytes);
  const Sample third = SampleOf(3, RandomBytes(3, 2 * kChunkBytes));
  EXPECT_EQ(store.Put(kJob, third.info, third.tensors, third.bytes).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store.chunk_bytes(), 2 * kChunkBytes);
  ASSERT_TRUE(store.Delete(kJob, first.info.state, first.info.shard).ok());
  EXPECT_EQ(store.chunk_bytes(), 2 * kChunkBytes);
  ASSERT_TRUE(store.Delete(kJob, second.info.state, second.info.shard).ok());
  EXPECT_EQ(store.chunk_bytes(), 0u);
  EXPECT_TRUE(store.Put(kJob, third.info, third.tensors, third.bytes).ok());
}

TEST(FaultStore, FailsAsDisksDo) {
  MemoryStore memory;
  FaultStore store(memory);
  const Sample sample = SampleOf(1, RandomBytes(1, 1000));
  const auto put = [&] { return store.Put(kJob, sample.info, sample.tensors, sample.bytes); };
  store.Set(FaultStore::Fault::kDiskFull, 1);
  EXPECT_EQ(put().code(), StatusCode::kResourceExhausted);
  store.Set(FaultStore::Fault::kSyncError, 1);
  EXPECT_EQ(put().code(), StatusCode::kUnavailable);
  EXPECT_EQ(store.Find(kJob, sample.info.state, sample.info.shard).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(put().ok());
  store.Set(FaultStore::Fault::kBitFlip, 1);
  EXPECT_EQ(store.Get(kJob, sample.info.state, sample.info.shard).status().code(), StatusCode::kDataLoss);
  store.Set(FaultStore::Fault::kReadError, 1);
  EXPECT_EQ(store.Get(kJob, sample.info.state, sample.info.shard).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(store.Get(kJob, sample.info.state, sample.info.shard).ok());
}

TEST(FaultStore, ASlowCallWaitsUntilItIsLetGo) {
  MemoryStore memory;
  FaultStore store(memory);
  store.Set(FaultStore::Fault::kSlow);
  const Sample sample = SampleOf(1, RandomBytes(1, 1000));
  Status outcome = Internal("not done");
  std::thread caller([&] { outcome = store.Put(kJob, sample.info, sample.tensors, sample.bytes); });
  while (store.waiting() == 0) std::this_thread::yield();
  EXPECT_TRUE(memory.List()->empty());
  store.Clear();
  caller.join();
  EXPECT_TRUE(outcome.ok());
}

}  // namespace
}  // namespace everstep::checkpoint
