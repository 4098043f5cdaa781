#include "checkpoint/core/custody.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep::checkpoint {
namespace {

const JobUid kJob("job-1");
const ServerId kSelf("s0");
const ServerId kPeer("s1");

ShardState At(int64_t step, uint64_t generation = 1, int32_t shard = 0) {
  return {{Step(step), Generation(generation)}, ShardIndex(shard)};
}
Digest128 DigestFor(ShardState what) { return {static_cast<uint64_t>(what.state.step.value) + 1, 7}; }
StagedSlot Slot(uint64_t process, uint32_t slot) { return {ProcessId(process), slot}; }

CopySnapshot CopyOf(ShardState what, SnapshotTier to, const ServerId& from = kPeer, uint64_t bytes = 100) {
  CopySnapshot copy;
  copy.job = kJob;
  copy.source = {from, SnapshotTier::kStaged, "127.0.0.1:1", what.state, what.shard};
  copy.digest = DigestFor(what);
  copy.bytes = bytes;
  copy.to = to;
  return copy;
}

SnapshotInfo Info(ShardState what, SnapshotTier tier, uint64_t bytes = 100) {
  return {what.state, what.shard, tier, kSelf, bytes, DigestFor(what)};
}

template <typename Effect>
std::vector<Effect> Of(const CustodyEffects& effects) {
  std::vector<Effect> found;
  for (const CustodyEffect& effect : effects) {
    if (const auto* body = std::get_if<Effect>(&effect)) found.push_back(*body);
  }
  return found;
}

class CustodyTest : public testing::Test {
 protected:
  void Stage(uint64_t process, uint32_t slot, ShardState what) {
    (void)custody.Staged(kJob, Slot(process, slot), what, 100);
    (void)custody.StagedVerified(kJob, Slot(process, slot), what, DigestFor(what));
  }
  SnapshotCustody custody{kSelf, {.peer_bytes_max = 250, .copies_in_flight_max = 4}};
};

TEST_F(CustodyTest, PromisesNothingBeforeItIsVerified) {
  const auto staged = custody.Staged(kJob, Slot(1, 0), At(10), 100);
  EXPECT_EQ(Of<VerifyStaged>(staged).size(), 1u);
  EXPECT_TRUE(Of<TellHeld>(staged).empty());
  EXPECT_TRUE(custody.Held().empty());
  const auto verified = custody.StagedVerified(kJob, Slot(1, 0), At(10), DigestFor(At(10)));
  ASSERT_EQ(Of<TellHeld>(verified).size(), 1u);
  EXPECT_EQ(Of<TellHeld>(verified)[0].fact.snapshot, Info(At(10), SnapshotTier::kStaged));
  EXPECT_EQ(Of<TellHeld>(verified)[0].slot, Slot(1, 0));
  EXPECT_EQ(custody.Held().size(), 1u);
}

TEST_F(CustodyTest, TellsThatAReusedSlotLostItsSnapshot) {
  Stage(1, 0, At(10));
  const auto effects = custody.Staged(kJob, Slot(1, 0), At(12), 100);
  ASSERT_EQ(Of<TellLost>(effects).size(), 1u);
  EXPECT_EQ(Of<TellLost>(effects)[0].fact.snapshot.state, At(10).state);
  EXPECT_FALSE(Of<TellLost>(effects)[0].answer);
  EXPECT_TRUE(custody.Held().empty());
  // A verdict about what was there before is stale.
  EXPECT_TRUE(custody.StagedVerified(kJob, Slot(1, 0), At(10), {}).empty());
}

TEST_F(CustodyTest, SaysAgainWhatIsSaidTwice) {
  Stage(1, 0, At(10));
  const auto effects = custody.Staged(kJob, Slot(1, 0), At(10), 100);
  EXPECT_EQ(Of<TellHeld>(effects).size(), 1u);
  EXPECT_TRUE(Of<VerifyStaged>(effects).empty());
}

TEST_F(CustodyTest, ARefusedSlotIsToldAsAnAnswer) {
  (void)custody.Staged(kJob, Slot(1, 0), At(10), 100);
  const auto effects = custody.StagedRefused(kJob, Slot(1, 0), At(10), Reason::kStorageCorrupt, "bad");
  ASSERT_EQ(Of<TellLost>(effects).size(), 1u);
  EXPECT_TRUE(Of<TellLost>(effects)[0].answer);
  EXPECT_EQ(Of<TellLost>(effects)[0].fact.reason, Reason::kStorageCorrupt);
}

TEST_F(CustodyTest, KeepsADeadRanksStateAtOrAboveTheWatermark) {
  Stage(1, 0, At(10));
  Stage(1, 1, At(11));
  (void)custody.ProtectedRaised(kJob, Step(10));
  EXPECT_TRUE(Of<FreeSegment>(custody.ProcessGone(kJob, ProcessId(1))).empty());
  EXPECT_TRUE(Of<FreeSegment>(custody.ProtectedRaised(kJob, Step(11))).empty());
  EXPECT_EQ(Of<FreeSegment>(custody.ProtectedRaised(kJob, Step(12))).size(), 1u);
  EXPECT_TRUE(custody.Held().empty());
}

TEST_F(CustodyTest, RefusesToDropAStagedCopyAtTheWatermark) {
  Stage(1, 0, At(10));
  (void)custody.ProtectedRaised(kJob, Step(10));
  const auto effects = custody.Drop({kJob, {Info(At(10), SnapshotTier::kStaged)}});
  EXPECT_TRUE(effects.empty());
  EXPECT_EQ(custody.drops_refused(), 1u);
  EXPECT_EQ(custody.Held().size(), 1u);
}

TEST_F(CustodyTest, DropsAStagedCopyThatTheChainExcludes) {
  Stage(1, 0, At(10));
  Stage(1, 1, At(11));
  (void)custody.ProcessGone(kJob, ProcessId(1));
  (void)custody.ProtectedRaised(kJob, Step(9));
  (void)custody.Assigned(kJob, Generation(2), Step(10));  // 11 of generation 1 is off the chain, 10 is on it
  EXPECT_EQ(custody.Held().size(), 2u);
  (void)custody.Drop({kJob, {Info(At(10), SnapshotTier::kStaged), Info(At(11), SnapshotTier::kStaged)}});
  ASSERT_EQ(custody.Held().size(), 1u);
  EXPECT_EQ(custody.Held()[0].second.state, At(10).state);
}

TEST_F(CustodyTest, ALaterLowerStartExcludesStatesOfTheGenerationsBetween) {
  Stage(1, 0, At(8, 1));
  Stage(2, 0, At(12, 2));
  (void)custody.Assigned(kJob, Generation(2), Step(10));
  (void)custody.Assigned(kJob, Generation(3), Step(5));
  // Both lie above step 5, which generation 3 started from.
  EXPECT_EQ(Of<FreeSegment>(custody.ProcessGone(kJob, ProcessId(1))).size(), 1u);
  EXPECT_EQ(Of<FreeSegment>(custody.ProcessGone(kJob, ProcessId(2))).size(), 1u);
}

TEST_F(CustodyTest, WaitsForTheVerdictBeforeItFreesASegment) {
  (void)custody.Staged(kJob, Slot(1, 0), At(10), 100);
  (void)custody.ProtectedRaised(kJob, Step(20));
  EXPECT_TRUE(Of<FreeSegment>(custody.ProcessGone(kJob, ProcessId(1))).empty());
  const auto effects = custody.StagedVerified(kJob, Slot(1, 0), At(10), DigestFor(At(10)));
  EXPECT_EQ(Of<FreeSegment>(effects).size(), 1u);
}

TEST_F(CustodyTest, MakesACopyOnceAndSaysItAgain) {
  const CopySnapshot command = CopyOf(At(10), SnapshotTier::kPeer);
  ASSERT_EQ(Of<MakeCopy>(custody.Copy(command)).size(), 1u);
  EXPECT_TRUE(custody.Copy(command).empty());  // it is being made
  EXPECT_EQ(Of<TellHeld>(custody.CopyMade(kJob, Info(At(10), SnapshotTier::kPeer))).size(), 1u);
  EXPECT_EQ(Of<TellHeld>(custody.Copy(command)).size(), 1u);
  EXPECT_EQ(custody.peer_bytes(), 100u);
}

TEST_F(CustodyTest, RefusesASecondContentUnderOneState) {
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kPeer));
  (void)custody.CopyMade(kJob, Info(At(10), SnapshotTier::kPeer));
  CopySnapshot other = CopyOf(At(10), SnapshotTier::kPeer);
  other.digest = {99, 99};
  const auto effects = custody.Copy(other);
  ASSERT_EQ(Of<TellLost>(effects).size(), 1u);
  EXPECT_EQ(Of<TellLost>(effects)[0].fact.reason, Reason::kDigestMismatch);
}

TEST_F(CustodyTest, PersistsItsOwnStagedCopyWithoutTheNetwork) {
  Stage(1, 0, At(10));
  const auto effects = Of<MakeCopy>(custody.Copy(CopyOf(At(10), SnapshotTier::kStored, kSelf)));
  ASSERT_EQ(effects.size(), 1u);
  EXPECT_TRUE(effects[0].local);
}

TEST_F(CustodyTest, SaysThatItsOwnSourceIsGone) {
  const auto effects = Of<TellLost>(custody.Copy(CopyOf(At(10), SnapshotTier::kStored, kSelf)));
  ASSERT_EQ(effects.size(), 1u);
  EXPECT_EQ(effects[0].fact.reason, Reason::kSourceLost);
}

TEST_F(CustodyTest, MemoryForPeersIsBoundedAndOnlyOldCopiesGiveWay) {
  for (const int64_t step : {10, 11}) {
    (void)custody.Copy(CopyOf(At(step), SnapshotTier::kPeer));
    (void)custody.CopyMade(kJob, Info(At(step), SnapshotTier::kPeer));
  }
  // Both are above the watermark (0): the third does not fit.
  auto refused = custody.Copy(CopyOf(At(12), SnapshotTier::kPeer));
  ASSERT_EQ(Of<TellLost>(refused).size(), 1u);
  EXPECT_EQ(Of<TellLost>(refused)[0].fact.reason, Reason::kStorageFull);
  EXPECT_EQ(custody.Held().size(), 2u);
  (void)custody.ProtectedRaised(kJob, Step(11));
  const auto effects = custody.Copy(CopyOf(At(12), SnapshotTier::kPeer));
  EXPECT_EQ(Of<MakeCopy>(effects).size(), 1u);
  ASSERT_EQ(Of<FreePeerCopy>(effects).size(), 1u);
  EXPECT_EQ(Of<FreePeerCopy>(effects)[0].what, At(10));
  EXPECT_LE(custody.peer_bytes(), 250u);
}

TEST_F(CustodyTest, ACopyThatCanNeverFitIsRefused) {
  EXPECT_EQ(Of<TellLost>(custody.Copy(CopyOf(At(10), SnapshotTier::kPeer, kPeer, 1000))).size(), 1u);
  EXPECT_EQ(custody.peer_bytes(), 0u);
}

TEST_F(CustodyTest, CopiesInFlightAreBounded) {
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(Of<MakeCopy>(custody.Copy(CopyOf(At(step), SnapshotTier::kStored))).size(), 1u);
  }
  EXPECT_EQ(Of<TellLost>(custody.Copy(CopyOf(At(5), SnapshotTier::kStored))).size(), 1u);
  (void)custody.CopyFailed(kJob, At(1), SnapshotTier::kStored, Reason::kStorageFull, "full");
  EXPECT_EQ(Of<MakeCopy>(custody.Copy(CopyOf(At(5), SnapshotTier::kStored))).size(), 1u);
}

TEST_F(CustodyTest, AFailedCopyGivesItsReservationBack) {
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kPeer));
  const auto effects = custody.CopyFailed(kJob, At(10), SnapshotTier::kPeer, Reason::kSourceLost, "gone");
  ASSERT_EQ(Of<TellLost>(effects).size(), 1u);
  EXPECT_TRUE(Of<TellLost>(effects)[0].answer);
  EXPECT_EQ(custody.peer_bytes(), 0u);
}

TEST_F(CustodyTest, DropsACopyThatIsStillBeingMade) {
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kPeer));
  (void)custody.Drop({kJob, {Info(At(10), SnapshotTier::kPeer)}});
  const auto effects = custody.CopyMade(kJob, Info(At(10), SnapshotTier::kPeer));
  EXPECT_EQ(Of<FreePeerCopy>(effects).size(), 1u);
  EXPECT_TRUE(Of<TellHeld>(effects).empty());
  EXPECT_EQ(custody.peer_bytes(), 0u);
}

TEST_F(CustodyTest, DropsOfOtherServersCopiesConcernNobodyHere) {
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kPeer));
  (void)custody.CopyMade(kJob, Info(At(10), SnapshotTier::kPeer));
  SnapshotInfo other = Info(At(10), SnapshotTier::kPeer);
  other.server = kPeer;
  EXPECT_TRUE(custody.Drop({kJob, {other}}).empty());
  EXPECT_EQ(custody.Held().size(), 1u);
}

TEST_F(CustodyTest, ABadStoredCopyIsToldAndDeleted) {
  custody.StoredFound(kJob, Info(At(10), SnapshotTier::kStored));
  const auto effects =
      custody.CopyFoundBad(kJob, Info(At(10), SnapshotTier::kStored), Reason::kStorageCorrupt, "bit flip");
  ASSERT_EQ(Of<TellLost>(effects).size(), 1u);
  EXPECT_FALSE(Of<TellLost>(effects)[0].answer);
  EXPECT_EQ(Of<DeleteStored>(effects).size(), 1u);
  EXPECT_TRUE(custody.Held().empty());
}

TEST_F(CustodyTest, ReleaseFreesVolatileCopiesAndKeepsStoredOnes) {
  Stage(1, 0, At(10));
  custody.StoredFound(kJob, Info(At(8), SnapshotTier::kStored));
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kPeer));
  (void)custody.CopyMade(kJob, Info(At(10), SnapshotTier::kPeer));
  const auto effects = custody.Release(kJob, true);
  EXPECT_EQ(Of<FreeSegment>(effects).size(), 1u);
  EXPECT_EQ(Of<FreePeerCopy>(effects).size(), 1u);
  EXPECT_TRUE(Of<DeleteStored>(effects).empty());
  ASSERT_EQ(custody.Held().size(), 1u);
  EXPECT_EQ(custody.Held()[0].second.tier, SnapshotTier::kStored);
  EXPECT_EQ(Of<DeleteStored>(custody.Release(kJob, false)).size(), 1u);
  EXPECT_TRUE(custody.Held().empty());
}

TEST_F(CustodyTest, ACopyThatFinishesAfterItsJobEndedIsThrownAway) {
  (void)custody.Copy(CopyOf(At(10), SnapshotTier::kStored));
  (void)custody.Release(kJob, true);
  const auto effects = custody.CopyMade(kJob, Info(At(10), SnapshotTier::kStored));
  EXPECT_EQ(Of<DeleteStored>(effects).size(), 1u);
  EXPECT_TRUE(Of<TellHeld>(effects).empty());
}

// Random facts and commands: what must never be freed never is, memory stays within its limit, and what is told adds
// up to what is held.
TEST_F(CustodyTest, HoldsItsPromisesInRandomHistories) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Prng random(seed);
    SnapshotCustody keeper(kSelf, {.peer_bytes_max = 250, .copies_in_flight_max = 4});
    int64_t watermark = 0;
    uint64_t generation = 1;
    int64_t step = 1;
    std::set<std::tuple<ShardState, SnapshotTier>> told;
    std::vector<CopySnapshot> flying;
    std::vector<std::pair<StagedSlot, ShardState>> verifying;
    std::map<uint64_t, bool> alive = {{1, true}, {2, true}};
    uint64_t next_process = 3;
    const auto apply = [&](const CustodyEffects& effects) {
      for (const CustodyEffect& effect : effects) {  // in their order: a copy may be told held and then lost
        if (const auto* lost = std::get_if<TellLost>(&effect); lost != nullptr && !lost->answer) {
          const SnapshotInfo& info = lost->fact.snapshot;
          told.erase({{info.state, info.shard}, info.tier});
          if (info.tier == SnapshotTier::kPeer && info.state.generation.value == generation) {
            EXPECT_LT(info.state.step.value, watermark) << "a protecting copy gave way";
          }
        } else if (const auto* held = std::get_if<TellHeld>(&effect)) {
          const SnapshotInfo& info = held->fact.snapshot;
          told.insert({{info.state, info.shard}, info.tier});
        } else if (const auto* copy = std::get_if<MakeCopy>(&effect)) {
          flying.push_back(copy->command);
        } else if (const auto* verify = std::get_if<VerifyStaged>(&effect)) {
          verifying.emplace_back(verify->slot, verify->what);
        }
      }
      EXPECT_LE(keeper.peer_bytes(), 250u);
    };
    for (int i = 0; i < 150; ++i) {
      switch (random.UpTo(6)) {
        case 0: {
          ++step;
          for (auto& [process, lives] : alive) {
            if (lives) apply(keeper.Staged(kJob, Slot(process, static_cast<uint32_t>(step % 4)),
                                           At(step, generation, static_cast<int32_t>(process)), 100));
          }
          break;
        }
        case 1:
          if (verifying.empty()) break;
          apply(keeper.StagedVerified(kJob, verifying.front().first, verifying.front().second,
                                      DigestFor(verifying.front().second)));
          verifying.erase(verifying.begin());
          break;
        case 2:
          apply(keeper.Copy(CopyOf(At(std::max<int64_t>(1, step - random.Between(0, 3)), generation, 9),
                                   random.Chance(1, 2) ? SnapshotTier::kPeer : SnapshotTier::kStored)));
          break;
        case 3:
          if (flying.empty()) break;
          if (random.Chance(3, 4)) {
            apply(keeper.CopyMade(kJob, Info({flying.front().source.state, flying.front().source.shard},
                                             flying.front().to)));
          } else {
            apply(keeper.CopyFailed(kJob, {flying.front().source.state, flying.front().source.shard},
                                    flying.front().to, Reason::kStorageFailed, ""));
          }
          flying.erase(flying.begin());
          break;
        case 4: {
          watermark = std::max(watermark, step - random.Between(0, 4));
          apply(keeper.ProtectedRaised(kJob, Step(watermark)));
          break;
        }
        case 5: {  // a process dies; what it staged at or above the watermark stays
          if (alive.empty() || !random.Chance(1, 4)) break;
          const uint64_t process = alive.begin()->first;
          std::set<ShardState> needed;
          for (const auto& [job, info] : keeper.Held()) {
            if (info.tier == SnapshotTier::kStaged && info.shard.value == static_cast<int32_t>(process) &&
                info.state.step.value >= watermark && info.state.generation.value == generation) {
              needed.insert({info.state, info.shard});
            }
          }
          alive.erase(process);
          apply(keeper.ProcessGone(kJob, ProcessId(process)));
          for (const ShardState& what : needed) {
            EXPECT_NE(keeper.Find(kJob, what, SnapshotTier::kStaged), nullptr);
          }
          alive[next_process++] = true;
          break;
        }
        default: {
          ++generation;
          const int64_t start = std::max(watermark, step - random.Between(0, 2));
          step = start;
          watermark = std::min(watermark, start);
          apply(keeper.Assigned(kJob, Generation(generation), Step(start)));
        }
      }
      std::set<std::tuple<ShardState, SnapshotTier>> held;
      for (const auto& [job, info] : keeper.Held()) held.insert({{info.state, info.shard}, info.tier});
      EXPECT_EQ(held, told);
    }
    apply(keeper.Release(kJob, false));
    EXPECT_EQ(keeper.peer_bytes(), 0u);
    EXPECT_TRUE(keeper.Held().empty());
  }
}

}  // namespace
}  // namespace everstep::checkpoint
