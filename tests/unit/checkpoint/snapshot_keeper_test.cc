// Two agents' keepers over real sockets, with staging memory that a test writes in a rank's place.
#include "checkpoint/io/snapshot_keeper.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/store/fault_store.h"
#include "checkpoint/store/memory_store.h"
#include "tests/unit/checkpoint/snapshot_samples.h"
#include "tests/unit/checkpoint/staging_writer.h"

namespace everstep::checkpoint {
namespace {

using Outcome = std::optional<Result<ProvidedSnapshot>>;

const JobUid kJob("job-1");
const ShardIndex kShard(0);
StateId At(int64_t step, uint64_t generation = 1) { return {Step(step), Generation(generation)}; }

// A keeper and everything it said.
class Agent {
 public:
  explicit Agent(const char* name, SnapshotKeeper::Options options = {}) : server(name), store(memory) {
    options.self = server;
    if (options.store == nullptr) options.store = &store;
    options.retry_timeout = Milliseconds(200);
    options.fetch.connect_timeout = Seconds(2);
    SnapshotKeeper::Callbacks callbacks;
    callbacks.held = [this](const SnapshotHeld& fact, StagedSlot) {
      Note([&] { held.push_back(fact.snapshot); });
    };
    callbacks.lost = [this](const SnapshotLost& fact, StagedSlot, bool answer) {
      Note([&] { lost.emplace_back(fact, answer); });
    };
    auto started = SnapshotKeeper::Start(options, std::move(callbacks));
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    if (started.ok()) keeper = std::move(*started);
  }

  std::string address() const { return fmt::format("127.0.0.1:{}", keeper->transfer_port()); }
  SnapshotSource Source(StateId state, SnapshotTier tier) const { return {server, tier, address(), state, kShard}; }

  // Waits until the condition holds, evaluated under the lock of what was said.
  template <typename Condition>
  testing::AssertionResult Waits(Condition condition) {
    std::unique_lock lock(mutex);
    if (changed.wait_for(lock, std::chrono::seconds(20), condition)) return testing::AssertionSuccess();
    testing::AssertionResult failure = testing::AssertionFailure();
    failure << "said: " << held.size() << " held";
    for (const auto& [fact, answer] : lost) failure << "; lost: " << ReasonName(fact.reason) << " " << fact.message;
    return failure;
  }
  testing::AssertionResult Holds(StateId state, SnapshotTier tier) {
    return Waits([&] {
      return std::any_of(held.begin(), held.end(), [&](const SnapshotInfo& info) {
        return info.state == state && info.tier == tier && info.server == server;
      });
    });
  }
  testing::AssertionResult Lost(StateId state, SnapshotTier tier, Reason reason, bool answer) {
    return Waits([&] {
      return std::any_of(lost.begin(), lost.end(), [&](const auto& entry) {
        return entry.first.snapshot.state == state && entry.first.snapshot.tier == tier &&
               entry.first.reason == reason && entry.second == answer;
      });
    });
  }
  // Everything that was asked for before has been done on the keeper's loop.
  void Settle() { (void)Provide({}, Generation(1u << 30)); }

  Result<ProvidedSnapshot> Provide(std::vector<SnapshotSource> sources, Generation generation = Generation(1)) {
    Outcome outcome;
    keeper->Provide(kJob, generation, std::move(sources), [&](Result<ProvidedSnapshot> provided) {
      Note([&] { outcome.emplace(std::move(provided)); });
    });
    EXPECT_TRUE(Waits([&] { return outcome.has_value(); }));
    return outcome.has_value() ? std::move(*outcome) : Result<ProvidedSnapshot>(Internal("no answer"));
  }

  CopySnapshot CopyFrom(const Agent& owner, const SnapshotInfo& info, SnapshotTier to) const {
    CopySnapshot copy;
    copy.job = kJob;
    copy.source = owner.Source(info.state, info.tier);
    copy.digest = info.digest;
    copy.bytes = info.bytes;
    copy.to = to;
    return copy;
  }

  const ServerId server;
  MemoryStore memory;
  FaultStore store;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<SnapshotInfo> held;                      // guarded by mutex
  std::vector<std::pair<SnapshotLost, bool>> lost;     // guarded by mutex
  std::unique_ptr<SnapshotKeeper> keeper;              // last: it stops before what its callbacks touch goes

 private:
  template <typename Change>
  void Note(Change change) {
    {
      const std::lock_guard lock(mutex);
      change();
    }
    changed.notify_all();
  }
};

std::vector<std::byte> BytesOf(const ProvidedSnapshot& provided) {
  struct stat file{};
  EXPECT_EQ(fstat(provided.fd.get(), &file), 0);
  EXPECT_EQ(static_cast<uint64_t>(file.st_size), provided.message.bytes);
  std::vector<std::byte> bytes(provided.message.bytes);
  EXPECT_EQ(pread(provided.fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

class SnapshotKeeperTest : public testing::Test {
 protected:
  // The rank on `a` stages a snapshot of this step; returns what `a` says about it.
  SnapshotInfo Stage(int64_t step, uint32_t slot = 0) {
    const SnapshotStaged staged = rank.Stage(slot, At(step), kShard, Bytes(step));
    a.keeper->OnStaged(kJob, kProcess, rank.Descriptor(), staged);
    EXPECT_TRUE(a.Holds(At(step), SnapshotTier::kStaged));
    SnapshotInfo info{At(step), kShard, SnapshotTier::kStaged, a.server, staged.bytes, DigestOf(Bytes(step))};
    return info;
  }
  static std::vector<std::byte> Bytes(int64_t step) {
    return RandomBytes(static_cast<uint64_t>(step), (2u << 20) + static_cast<size_t>(step));
  }

  const ProcessId kProcess{7};
  StagingWriter rank{kProcess};
  Agent a{"s0"};
  Agent b{"s1"};
};

TEST_F(SnapshotKeeperTest, PromisesAStagedSnapshotAfterItVerifiedIt) {
  const SnapshotInfo info = Stage(10);
  ASSERT_EQ(a.keeper->Held().size(), 1u);
  EXPECT_EQ(a.keeper->Held()[0], std::pair(kJob, info));
}

TEST_F(SnapshotKeeperTest, RefusesAStagedSnapshotWhoseBytesDoNotMatch) {
  const SnapshotStaged staged = rank.Stage(0, At(10), kShard, Bytes(10));
  rank.region(0)[1000] ^= std::byte{1};
  a.keeper->OnStaged(kJob, kProcess, rank.Descriptor(), staged);
  EXPECT_TRUE(a.Lost(At(10), SnapshotTier::kStaged, Reason::kStorageCorrupt, true));
  EXPECT_TRUE(a.keeper->Held().empty());
}

TEST_F(SnapshotKeeperTest, RefusesStagingMemoryThatIsNot) {
  const SnapshotStaged staged = rank.Stage(0, At(10), kShard, Bytes(10));
  a.keeper->OnStaged(kJob, kProcess, UniqueFd(), staged);
  EXPECT_TRUE(a.Waits([&] { return !a.lost.empty(); }));
  EXPECT_TRUE(a.keeper->Held().empty());
}

TEST_F(SnapshotKeeperTest, CopiesToAPeerAndProvidesFromThereAfterTheOwnerIsGone) {
  const SnapshotInfo info = Stage(10);
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kPeer));
  ASSERT_TRUE(b.Holds(At(10), SnapshotTier::kPeer));
  a.keeper.reset();
  const auto provided = b.Provide({b.Source(At(10), SnapshotTier::kPeer)});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from, "s1 peer");
  EXPECT_EQ(provided->message.state, At(10));
  EXPECT_EQ(provided->message.tensors.size(), 1u);
  EXPECT_TRUE(BytesOf(*provided) == Bytes(10));
  EXPECT_EQ(b.keeper->counters().bytes_fetched, info.bytes);
}

TEST_F(SnapshotKeeperTest, PersistsItsOwnStagedSnapshotAndListsItAfterARestart) {
  const SnapshotInfo info = Stage(10);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
  SnapshotKeeper::Options options;
  options.store = &a.memory;
  Agent restarted("s0", options);
  ASSERT_EQ(restarted.keeper->Held().size(), 1u);  // the volatile tiers are gone
  EXPECT_EQ(restarted.keeper->Held()[0].second.tier, SnapshotTier::kStored);
  const auto provided = restarted.Provide({restarted.Source(At(10), SnapshotTier::kStored)});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_TRUE(BytesOf(*provided) == Bytes(10));
}

TEST_F(SnapshotKeeperTest, PersistsAPeersSnapshotAndServesItFromTheStore) {
  const SnapshotInfo info = Stage(10);
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(b.Holds(At(10), SnapshotTier::kStored));
  a.keeper->FreeStaging(kProcess);
  b.keeper->SetGeneration(kJob, Generation(2));
  a.keeper->SetGeneration(kJob, Generation(2));
  const auto provided = a.Provide({b.Source(At(10), SnapshotTier::kStored)}, Generation(2));
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from, "s1 stored");
  EXPECT_TRUE(BytesOf(*provided) == Bytes(10));
}

TEST_F(SnapshotKeeperTest, ProvidesAStagedSnapshotOfADeadProcess) {
  (void)Stage(10);
  a.keeper->ProcessGone(kJob, kProcess);
  const auto provided = a.Provide({a.Source(At(10), SnapshotTier::kStaged)});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from, "s0 staged");
  EXPECT_TRUE(BytesOf(*provided) == Bytes(10));
}

TEST_F(SnapshotKeeperTest, ABadCopyFallsToTheNextTierAndIsSaid) {
  const SnapshotInfo info = Stage(10);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
  rank.region(0)[1u << 20] ^= std::byte{1};  // a bit flips in staging memory, after it was verified
  const auto provided =
      a.Provide({a.Source(At(10), SnapshotTier::kStaged), a.Source(At(10), SnapshotTier::kStored)});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from.substr(0, 27), "s0 stored; not s0 staged: D");
  EXPECT_TRUE(BytesOf(*provided) == Bytes(10));
  EXPECT_TRUE(a.Lost(At(10), SnapshotTier::kStaged, Reason::kStorageCorrupt, false));
}

TEST_F(SnapshotKeeperTest, ABitFlipInTheStoreFallsBackToAPeerAndIsSaid) {
  const SnapshotInfo info = Stage(10);
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kPeer));
  ASSERT_TRUE(b.Holds(At(10), SnapshotTier::kPeer));
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
  a.keeper->FreeStaging(kProcess);
  a.store.Set(FaultStore::Fault::kBitFlip);
  b.keeper->SetGeneration(kJob, Generation(1));
  const auto provided = a.Provide({a.Source(At(10), SnapshotTier::kStored), b.Source(At(10), SnapshotTier::kPeer)});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from.substr(0, 7), "s1 peer");
  EXPECT_TRUE(a.Lost(At(10), SnapshotTier::kStored, Reason::kStorageCorrupt, false));
}

TEST_F(SnapshotKeeperTest, UsesAnUnlistedCopyOfItsOwnWhenAllSourcesFail) {
  const SnapshotInfo info = Stage(10);
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kPeer));
  ASSERT_TRUE(b.Holds(At(10), SnapshotTier::kPeer));
  const SnapshotSource gone = a.Source(At(10), SnapshotTier::kStaged);
  a.keeper.reset();
  const auto provided = b.Provide({gone});
  ASSERT_TRUE(provided.ok()) << provided.status().ToString();
  EXPECT_EQ(provided->message.from.substr(0, 7), "s1 peer");
}

TEST_F(SnapshotKeeperTest, SaysWhyNothingCouldBeProvided) {
  const auto provided = a.Provide({a.Source(At(99), SnapshotTier::kStaged), a.Source(At(99), SnapshotTier::kStored)});
  EXPECT_EQ(provided.status().code(), StatusCode::kNotFound);
  EXPECT_NE(provided.status().message().find("s0 staged"), std::string::npos);
  EXPECT_NE(provided.status().message().find("s0 stored"), std::string::npos);
}

TEST_F(SnapshotKeeperTest, AFullDiskIsToldAndTheStagedCopyStays) {
  const SnapshotInfo info = Stage(10);
  a.store.Set(FaultStore::Fault::kDiskFull, 1);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Lost(At(10), SnapshotTier::kStored, Reason::kStorageFull, true));
  EXPECT_EQ(a.keeper->Held().size(), 1u);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));  // space was made
  EXPECT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
}

TEST_F(SnapshotKeeperTest, AFailedSyncIsToldAndNothingIsHeld) {
  const SnapshotInfo info = Stage(10);
  a.store.Set(FaultStore::Fault::kSyncError, 1);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Lost(At(10), SnapshotTier::kStored, Reason::kStorageFailed, true));
  EXPECT_TRUE(a.memory.List()->empty());
}

TEST_F(SnapshotKeeperTest, ASlowDiskDelaysNeitherVerifyingNorProviding) {
  const SnapshotInfo info = Stage(10);
  a.store.Set(FaultStore::Fault::kSlow);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  (void)Stage(11, 1);
  EXPECT_TRUE(a.Provide({a.Source(At(11), SnapshotTier::kStaged)}).ok());
  a.store.Clear();
  EXPECT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
}

TEST_F(SnapshotKeeperTest, AStaleGenerationIsRefusedByPeersAndBelieved) {
  const SnapshotInfo info = Stage(10);
  a.keeper->SetGeneration(kJob, Generation(3));
  const auto stale = b.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(2));
  EXPECT_EQ(stale.status().code(), StatusCode::kAborted);
  const auto early = b.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(4));
  EXPECT_EQ(early.status().code(), StatusCode::kUnavailable);
  const auto right = b.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(3));
  EXPECT_TRUE(right.ok()) << right.status().ToString();
  EXPECT_GE(a.keeper->counters().stale_refused, 1u);
  (void)info;
}

TEST_F(SnapshotKeeperTest, AHigherGenerationIsServedOnceTheServerHearsOfIt) {
  (void)Stage(10);
  a.keeper->SetGeneration(kJob, Generation(3));
  Outcome outcome;
  b.keeper->Provide(kJob, Generation(4), {a.Source(At(10), SnapshotTier::kStaged)},
                    [&](Result<ProvidedSnapshot> provided) {
                      const std::lock_guard lock(b.mutex);
                      outcome.emplace(std::move(provided));
                      b.changed.notify_all();
                    });
  while (a.keeper->counters().requests_refused == 0) std::this_thread::yield();
  a.keeper->SetGeneration(kJob, Generation(4));
  ASSERT_TRUE(b.Waits([&] { return outcome.has_value(); }));
  EXPECT_TRUE((*outcome).ok()) << outcome->status().ToString();
}

TEST_F(SnapshotKeeperTest, CopiesThatCanNotChangeAreServedToAGenerationNotHeardOf) {
  const SnapshotInfo info = Stage(10);
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kPeer));
  ASSERT_TRUE(b.Holds(At(10), SnapshotTier::kPeer));  // b has no part in the job: nobody tells it of generations
  Agent reader("s5");
  EXPECT_TRUE(reader.Provide({b.Source(At(10), SnapshotTier::kPeer)}, Generation(8)).ok());
  EXPECT_EQ(reader.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(8)).status().code(),
            StatusCode::kUnavailable);
  a.keeper->ProcessGone(kJob, kProcess);
  EXPECT_TRUE(reader.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(8)).ok());
  EXPECT_TRUE(reader.Provide({b.Source(At(10), SnapshotTier::kPeer)}, Generation(7)).ok());  // 8 was not adopted
}

TEST_F(SnapshotKeeperTest, ARankOfAStaleGenerationIsRefusedHere) {
  (void)Stage(10);
  a.keeper->SetGeneration(kJob, Generation(3));
  EXPECT_EQ(a.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(2)).status().code(),
            StatusCode::kAborted);
}

TEST_F(SnapshotKeeperTest, BackgroundCopiesAreFencedByTheirDigestNotByGeneration) {
  SnapshotInfo info = Stage(10);
  a.keeper->SetGeneration(kJob, Generation(9));  // b knows of none
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kPeer));
  EXPECT_TRUE(b.Holds(At(10), SnapshotTier::kPeer));
  info.digest[0] ^= 1;
  b.keeper->Copy(b.CopyFrom(a, info, SnapshotTier::kStored));
  EXPECT_TRUE(b.Lost(At(10), SnapshotTier::kStored, Reason::kDigestMismatch, true));
}

TEST_F(SnapshotKeeperTest, ACopyFromAServerThatIsGoneIsToldLost) {
  const SnapshotInfo info = Stage(10);
  const CopySnapshot command = b.CopyFrom(a, info, SnapshotTier::kPeer);
  a.keeper.reset();
  b.keeper->Copy(command);
  EXPECT_TRUE(b.Lost(At(10), SnapshotTier::kPeer, Reason::kStorageFailed, true));
  EXPECT_EQ(b.keeper->counters().peer_bytes, 0u);
}

TEST_F(SnapshotKeeperTest, ASlotThatIsUsedAgainIsToldLostAndNotServed) {
  (void)Stage(10, 0);
  (void)Stage(11, 1);
  (void)Stage(12, 0);
  EXPECT_TRUE(a.Lost(At(10), SnapshotTier::kStaged, Reason::kCheckpointDropped, false));
  EXPECT_EQ(a.Provide({a.Source(At(10), SnapshotTier::kStaged)}).status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(a.Provide({a.Source(At(12), SnapshotTier::kStaged)}).ok());
}

TEST_F(SnapshotKeeperTest, ASlotThatChangesBeforeItsRankSaysSoIsNotServed) {
  (void)Stage(10, 0);
  rank.Begin(0);  // the rank began to overwrite it
  EXPECT_EQ(a.Provide({a.Source(At(10), SnapshotTier::kStaged)}).status().code(), StatusCode::kNotFound);
}

TEST_F(SnapshotKeeperTest, KeepsWhatADeadRankStagedUntilTheWatermarkPassedIt) {
  (void)Stage(10, 0);
  (void)Stage(11, 1);
  a.keeper->ProtectedRaised(kJob, Step(11));
  a.keeper->ProcessGone(kJob, kProcess);
  EXPECT_TRUE(a.Provide({a.Source(At(11), SnapshotTier::kStaged)}).ok());
  a.keeper->ProtectedRaised(kJob, Step(12));
  EXPECT_TRUE(a.Lost(At(11), SnapshotTier::kStaged, Reason::kCheckpointDropped, false));
  EXPECT_TRUE(a.keeper->Held().empty());
}

TEST_F(SnapshotKeeperTest, DropsAndReleasesFreeMemoryAndDisk) {
  const SnapshotInfo info = Stage(10);
  for (const SnapshotTier tier : {SnapshotTier::kPeer, SnapshotTier::kStored}) {
    b.keeper->Copy(b.CopyFrom(a, info, tier));
    ASSERT_TRUE(b.Holds(At(10), tier));
  }
  EXPECT_EQ(b.keeper->counters().peer_bytes, info.bytes);
  SnapshotInfo stored = info;
  stored.tier = SnapshotTier::kStored;
  stored.server = b.server;
  b.keeper->Observe(DropSnapshots{kJob, {stored}});
  b.keeper->Observe(ReleaseJob{kJob});
  b.Settle();
  EXPECT_TRUE(b.keeper->Held().empty());
  EXPECT_EQ(b.keeper->counters().peer_bytes, 0u);
  b.keeper.reset();  // the deletion is done or was never begun
  a.keeper->Observe(ReleaseJob{kJob});
  a.Settle();
  EXPECT_TRUE(a.keeper->Held().empty());
}

TEST_F(SnapshotKeeperTest, DeletesADroppedSnapshotFromTheStore) {
  const SnapshotInfo info = Stage(10);
  a.keeper->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  ASSERT_TRUE(a.Holds(At(10), SnapshotTier::kStored));
  SnapshotInfo stored = info;
  stored.tier = SnapshotTier::kStored;
  a.keeper->Drop({kJob, {stored}});
  // The next copy to the store comes behind the deletion.
  const SnapshotInfo next = Stage(11, 1);
  a.keeper->Copy(a.CopyFrom(a, next, SnapshotTier::kStored));
  ASSERT_TRUE(a.Holds(At(11), SnapshotTier::kStored));
  const auto all = a.memory.List();
  ASSERT_EQ(all->size(), 1u);
  EXPECT_EQ((*all)[0].second.state, At(11));
}

TEST_F(SnapshotKeeperTest, MemoryForPeersIsBounded) {
  SnapshotKeeper::Options options;
  options.limits.peer_bytes_max = 5u << 20;  // two of the samples
  Agent small("s2", options);
  for (int64_t step = 10; step <= 12; ++step) {
    small.keeper->Copy(small.CopyFrom(a, Stage(step, static_cast<uint32_t>(step % 4)), SnapshotTier::kPeer));
  }
  EXPECT_TRUE(small.Holds(At(11), SnapshotTier::kPeer));
  EXPECT_TRUE(small.Lost(At(12), SnapshotTier::kPeer, Reason::kStorageFull, true));
  EXPECT_LE(small.keeper->counters().peer_bytes, 5u << 20);
}

TEST_F(SnapshotKeeperTest, ObservesCommandsOfTheController) {
  (void)Stage(10);
  a.keeper->Observe(FenceProcesses{kJob, Generation(5), {}});
  EXPECT_EQ(a.Provide({a.Source(At(10), SnapshotTier::kStaged)}, Generation(4)).status().code(),
            StatusCode::kAborted);
  AssignProcesses assign;
  assign.assignment.job = kJob;
  assign.assignment.generation = Generation(6);
  assign.assignment.recovery_point = At(9);
  a.keeper->Observe(assign);  // step 10 of generation 1 is off the chain
  a.keeper->ProcessGone(kJob, kProcess);
  EXPECT_TRUE(a.Lost(At(10), SnapshotTier::kStaged, Reason::kCheckpointDropped, false));
}

TEST_F(SnapshotKeeperTest, WithoutAStoreStoredCopiesAreRefused) {
  const SnapshotInfo info = Stage(10);
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<SnapshotLost> lost;
  SnapshotKeeper::Options options;
  options.self = ServerId("s3");
  SnapshotKeeper::Callbacks callbacks;
  callbacks.held = [](const SnapshotHeld&, StagedSlot) {};
  callbacks.lost = [&](const SnapshotLost& fact, StagedSlot, bool) {
    const std::lock_guard lock(mutex);
    lost = fact;
    changed.notify_all();
  };
  auto keeper = SnapshotKeeper::Start(options, callbacks);
  ASSERT_TRUE(keeper.ok());
  (*keeper)->Copy(a.CopyFrom(a, info, SnapshotTier::kStored));
  std::unique_lock lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return lost.has_value(); }));
  EXPECT_EQ(lost->reason, Reason::kStorageFailed);
}

TEST_F(SnapshotKeeperTest, StopsWhileWorkIsInFlight) {
  const SnapshotInfo info = Stage(10);
  for (int i = 0; i < 20; ++i) {
    Agent brief("s4");
    brief.keeper->Copy(brief.CopyFrom(a, info, SnapshotTier::kPeer));
    brief.keeper->Copy(brief.CopyFrom(a, info, SnapshotTier::kStored));
    brief.keeper->Provide(kJob, Generation(1), {a.Source(At(10), SnapshotTier::kStaged)},
                          [](Result<ProvidedSnapshot>) {});
    brief.keeper.reset();
    EXPECT_LE(brief.held.size(), 2u);
  }
}

}  // namespace
}  // namespace everstep::checkpoint
