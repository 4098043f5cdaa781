// The ledger's state machine: what each record does, and what it ignores.
#include "controller/core/ledger/record.h"

#include <gtest/gtest.h>

namespace everstep {
namespace {

class LedgerTest : public ::testing::Test {
 protected:
  void Add(Record record) { Apply(state_, state_.applied.Next(), record); }
  JobEntry& Job() { return state_.jobs.at(uid_); }
  void Submit() { Add(JobSubmitted{uid_, {}, RequestId("r1"), {}}); }
  void Fence(uint64_t g) { Add(GenerationFenced{uid_, Generation(g), RecoveryId(g), Reason::kJobStarted, false}); }

  LedgerState state_;
  JobUid uid_{"u1"};
};

TEST_F(LedgerTest, ANewIncarnationIsTheDeathOfTheOldOnes) {
  Add(ServerRegistered{ServerId("a"), Incarnation(1), 11, "rack1"});
  EXPECT_EQ(state_.servers.at(ServerId("a")).dead_upto, Incarnation(0));
  Add(ServerRegistered{ServerId("a"), Incarnation(2), 22, "rack1"});
  EXPECT_EQ(state_.servers.at(ServerId("a")).dead_upto, Incarnation(1));
  EXPECT_EQ(state_.servers.at(ServerId("a")).start_nonce, 22u);
  Add(ServerRegistered{ServerId("a"), Incarnation(2), 33, "rack1"});
  EXPECT_EQ(state_.servers.at(ServerId("a")).start_nonce, 22u) << "a duplicate changes nothing";
  Add(ServerDied{ServerId("a"), Incarnation(2), Reason::kServerSilent});
  Add(ServerDied{ServerId("a"), Incarnation(1), Reason::kServerSilent});
  EXPECT_EQ(state_.servers.at(ServerId("a")).dead_upto, Incarnation(2)) << "death never goes back";
}

TEST_F(LedgerTest, AHigherFenceVoidsThePlanAndOlderRecordsAreIgnored) {
  Submit();
  Fence(1);
  Add(RecoveryPointDecided{uid_, Generation(1), {}});
  Add(PlanMade{uid_, Generation(1), {{Rank(0), ServerId("a"), DeviceIndex(0), ProcessId(1)}}, Reason::kNone, ""});
  EXPECT_TRUE(Job().plan.has_value());
  Fence(2);
  EXPECT_FALSE(Job().plan.has_value()) << "what it reserved is free again";
  Fence(1);
  EXPECT_EQ(Job().fenced, Generation(2));
  Add(PlanMade{uid_, Generation(1), {}, Reason::kNone, ""});
  EXPECT_FALSE(Job().plan.has_value());
  Add(GenerationResumed{uid_, Generation(1)});
  EXPECT_EQ(Job().resumed, Generation(0));
  Assignment late;
  late.job = uid_;
  late.generation = Generation(1);
  Add(AssignmentMade{late});
  EXPECT_FALSE(Job().assignment.has_value());
}

TEST_F(LedgerTest, ARecoveryPointIsDecidedOncePerGeneration) {
  Submit();
  Fence(1);
  Add(RecoveryPointDecided{uid_, Generation(1), {}});
  Fence(2);
  Add(RecoveryPointDecided{uid_, Generation(2), {Step(5), Generation(1)}});
  Add(RecoveryPointDecided{uid_, Generation(2), {Step(9), Generation(1)}});
  EXPECT_EQ(Job().recovery_point, (StateId{Step(5), Generation(1)}));
  EXPECT_TRUE(Job().lineage.OnChain({Step(5), Generation(1)}));
  EXPECT_FALSE(Job().lineage.OnChain({Step(6), Generation(1)}));
  EXPECT_EQ(state_.next_recovery, 3u);
}

TEST_F(LedgerTest, TerminalStatesAreDurable) {
  Submit();
  Add(JobEnded{uid_, JobState::kSucceeded, Reason::kJobFinished, 0, "", {}, {}});
  Add(JobEnded{uid_, JobState::kFailed, Reason::kUserError, 3, "", {}, {}});
  EXPECT_EQ(Job().ended->outcome, JobState::kSucceeded);
}

TEST_F(LedgerTest, AForgottenJobTakesItsRequestAlong) {
  Submit();
  EXPECT_EQ(state_.requests.at(RequestId("r1")), uid_);
  Add(JobForgotten{uid_});
  EXPECT_TRUE(state_.requests.empty());
  EXPECT_TRUE(state_.jobs.empty());
}

TEST_F(LedgerTest, RecordsOfUnknownJobsAndServersChangeOnlyTheSequence) {
  const LedgerState before = state_;
  Fence(1);
  Add(RecoveryPointDecided{uid_, Generation(1), {}});
  Add(PlanMade{uid_, Generation(1), {}, Reason::kNone, ""});
  Add(AssignmentMade{Assignment{uid_}});
  Add(GenerationResumed{uid_, Generation(1)});
  Add(FailureCounted{uid_, {}, {}, {}, 1, 0});
  Add(ManifestCommitted{uid_, {}});
  Add(ManifestDropped{uid_, {}});
  Add(JobEnded{uid_});
  Add(JobForgotten{uid_});
  Add(ServerDied{ServerId("nobody"), Incarnation(3), Reason::kNone});
  LedgerState after = state_;
  EXPECT_EQ(after.applied.value, 11u);
  after.applied = before.applied;
  EXPECT_TRUE(after == before);
}

TEST_F(LedgerTest, ListsAreBounded) {
  Submit();
  for (int i = 0; i < 300; ++i) {
    Add(FailureCounted{uid_, Step(i), Rank(0), ServerId("a"), 1, 0});
    RecoveryRecord recovery;
    recovery.id = RecoveryId(static_cast<uint64_t>(i));
    Add(RecoveryEnded{recovery});
  }
  EXPECT_EQ(Job().failures, 300);
  EXPECT_EQ(Job().recent_failures.size(), 16u);
  EXPECT_EQ(Job().recent_failures.back().step, Step(299));
  EXPECT_EQ(state_.recoveries.size(), 200u);
  EXPECT_EQ(state_.recoveries.back().id, RecoveryId(299));
}

TEST_F(LedgerTest, AManifestIsDroppedByItsState) {
  Submit();
  Manifest a, b;
  a.state = {Step(4), Generation(1)};
  b.state = {Step(8), Generation(1)};
  Add(ManifestCommitted{uid_, a});
  Add(ManifestCommitted{uid_, b});
  Add(ManifestDropped{uid_, a.state});
  ASSERT_EQ(Job().manifests.size(), 1u);
  EXPECT_EQ(Job().manifests[0].state, b.state);
}

TEST_F(LedgerTest, TheOlderJobHasTheLowerOrder) {
  Submit();
  Add(JobSubmitted{JobUid("u2"), {}, {}, {}});
  EXPECT_LT(Job().order, state_.jobs.at(JobUid("u2")).order);
  EXPECT_EQ(state_.requests.size(), 1u) << "an empty request id is none";
}

using LedgerDeathTest = LedgerTest;
TEST_F(LedgerDeathTest, AHoleInTheSequenceIsABrokenInvariant) {
  EXPECT_DEATH(Apply(state_, LedgerSequence(2), TermStarted{Term(1)}), "CHECK failed");
}

}  // namespace
}  // namespace everstep
