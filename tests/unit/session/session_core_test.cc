// The rules of docs/protocol.md sections 2, 3 and 6 on a rank, one test each: event tables against SessionCore.
#include "worker/core/session/session_core.h"

#include <gtest/gtest.h>

#include "proto/base/prng.h"
#include "tests/unit/session/rig.h"

namespace everstep::session {
namespace {

using everstep::Step;

// ---- entering

TEST(SessionCoreTest, SaysJoinOnceAndStepsAfterRestoreDigestAndResume) {
  Rig rig;
  EXPECT_NE(rig.Joined().Sent<RankJoin>(), nullptr);
  rig.Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize));
  ASSERT_TRUE(rig.Has<ConnectMesh>());
  rig.Do(MeshConnected{Generation(1)});
  EXPECT_EQ(rig.Sent<RankConnected>()->generation, Generation(1));
  EXPECT_TRUE(rig.Has<InitializeState>());
  EXPECT_FALSE(rig.core.progress().memory_valid);
  rig.Do(RestoreDone{Generation(1), 0});
  EXPECT_TRUE(rig.Has<ExchangeDigests>());
  rig.Do(DigestsAgreed{Generation(1), {5, 6}});
  ASSERT_NE(rig.Sent<RankReady>(), nullptr);
  EXPECT_EQ(rig.Sent<RankReady>()->shard_digest, (Digest128{5, 6}));
  EXPECT_EQ(rig.Sent<RankReady>()->restored_from, "initialized");
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kReady);
  EXPECT_FALSE(rig.Has<CallAnswered>());
  rig.Do(ResumeRank{Generation(1), Step(0)});
  EXPECT_TRUE(rig.Outcome(CallOutcome::kDone));
  EXPECT_EQ(rig.core.stage(), Stage::kStepping);
  EXPECT_EQ(rig.core.progress().generation, Generation(1));
  EXPECT_TRUE(rig.core.progress().memory_valid);
}

TEST(SessionCoreTest, AnAssignmentWaitsUntilTheProgramIsInJoin) {
  Rig rig;
  rig.Stepping().Reduced(1).Collected(2);
  rig.Assigned(MakeAssignment(2, State(0, 0), RestoreAction::kKeep));
  EXPECT_TRUE(rig.effects.empty());
  EXPECT_TRUE(rig.Joined().Has<ConnectMesh>());
  EXPECT_EQ(rig.Sent<RankJoin>(), nullptr);
}

TEST(SessionCoreTest, ASourceServesItsReceiversBeforeDigestsAreCompared) {
  Rig rig;
  rig.Stepping().StepDone(1).Collected(2).Joined();
  Assignment a = MakeAssignment(2, State(1, 1), RestoreAction::kKeep, 4);
  for (int i : {1, 3}) {
    a.ranks[static_cast<size_t>(i)].action = RestoreAction::kFetchFromRank;
    a.ranks[static_cast<size_t>(i)].source_rank = Rank(0);
  }
  rig.Assigned(a).Do(MeshConnected{Generation(2)});
  ASSERT_TRUE(rig.Has<ServeState>());
  EXPECT_EQ(rig.Find<ServeState>()->chain, (std::vector<Rank>{Rank(1), Rank(3)}));
  EXPECT_FALSE(rig.Has<ExchangeDigests>());
  EXPECT_TRUE(rig.Do(ServeDone{Generation(2)}).Has<ExchangeDigests>());
}

TEST(SessionCoreTest, ASourceRollsForwardBeforeItServes) {
  Rig rig;
  rig.Stepping().Voting(1).Do(FenceRank{Generation(2)}).Do(AbortConfirmed{Generation(1)});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report.gradients, Generation(1));
  rig.Do(VoteFailed{Step(1), Rank(1), Aborted("x")}).Joined();
  Assignment a = MakeAssignment(2, State(1, 1), RestoreAction::kRollForward);
  a.ranks[1].action = RestoreAction::kFetchFromRank;
  a.ranks[1].source_rank = Rank(0);
  rig.Assigned(a).Do(MeshConnected{Generation(2)});
  ASSERT_TRUE(rig.Has<RollForward>());
  EXPECT_EQ(rig.Find<RollForward>()->step, Step(1));
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kApplying);
  rig.Do(RolledForward{Generation(2)});
  EXPECT_TRUE(rig.Has<ServeState>());
  EXPECT_EQ(rig.core.progress().applied, State(1, 1));  // the generation of the gradients, not of the roll
}

TEST(SessionCoreTest, AReceiverKnowsItsWholeChain) {
  Rig rig;
  rig.Joined();
  Assignment a = MakeAssignment(5, State(9, 4), RestoreAction::kFetchFromRank, 3);
  a.ranks[2].action = RestoreAction::kFetchFromRank;
  a.ranks[2].source_rank = Rank(1);
  rig.Assigned(a).Do(MeshConnected{Generation(5)});
  ASSERT_TRUE(rig.Has<ReceiveState>());
  EXPECT_EQ(rig.Find<ReceiveState>()->source, Rank(1));
  EXPECT_EQ(rig.Find<ReceiveState>()->chain, (std::vector<Rank>{Rank(0), Rank(2)}));
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kRestoring);
  rig.Do(RestoreDone{Generation(5), 1000}).Do(DigestsAgreed{Generation(5), {}});
  EXPECT_EQ(rig.Sent<RankReady>()->restored_from, "rank 1");
  EXPECT_EQ(rig.Sent<RankReady>()->bytes_restored, 1000u);
  EXPECT_EQ(rig.core.progress().applied, State(9, 4));
}

TEST(SessionCoreTest, ASnapshotComesThroughTheAgentAndTheNextOneWhenItIsBad) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(3, State(7, 2), RestoreAction::kFetchFromSnapshot)).Do(MeshConnected{Generation(3)});
  ASSERT_NE(rig.Sent<SnapshotWanted>(), nullptr);
  EXPECT_EQ(rig.Sent<SnapshotWanted>()->source.server, ServerId("s1"));
  EXPECT_FALSE(rig.core.progress().memory_valid);
  rig.Do(SnapshotProvided{Generation(3), State(7, 2), 10, {}, {}, "s1 staged"});
  ASSERT_TRUE(rig.Has<CopySnapshot>());
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kRestoring);
  rig.Do(WorkFailed{Generation(3), Rank(-1), DataLoss("digest")});
  ASSERT_NE(rig.Sent<SnapshotWanted>(), nullptr);
  EXPECT_EQ(rig.Sent<SnapshotWanted>()->source.server, ServerId("s2"));
  rig.Do(SnapshotProvided{Generation(3), State(7, 2), 10, {}, {}, "s2 peer"});
  rig.Do(RestoreDone{Generation(3), 10}).Do(DigestsAgreed{Generation(3), {}});
  EXPECT_EQ(rig.Sent<RankReady>()->restored_from, "s2 peer");
}

TEST(SessionCoreTest, WithoutAnyGoodSnapshotTheAssignmentFails) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(3, State(7, 2), RestoreAction::kFetchFromSnapshot)).Do(MeshConnected{Generation(3)});
  rig.Do(SnapshotUnavailable{Generation(3), StatusCode::kNotFound, "gone"});
  EXPECT_NE(rig.Sent<SnapshotWanted>(), nullptr);
  rig.Do(SnapshotProvided{Generation(3), State(6, 2), 10, {}, {}, "s2 peer"});  // another state
  ASSERT_NE(rig.Sent<RankFailed>(), nullptr);
  EXPECT_EQ(rig.Sent<RankFailed>()->code, StatusCode::kDataLoss);
  EXPECT_TRUE(rig.Has<AbortMesh>());
  EXPECT_FALSE(rig.Has<CopySnapshot>());
}

TEST(SessionCoreTest, DifferentDigestsAreDataLoss) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize)).Do(MeshConnected{Generation(1)});
  rig.Do(RestoreDone{Generation(1), 0}).Do(DigestsDiffer{Generation(1), "ranks 0 and 1"});
  ASSERT_NE(rig.Sent<RankFailed>(), nullptr);
  EXPECT_EQ(rig.Sent<RankFailed>()->code, StatusCode::kDataLoss);
  EXPECT_NE(rig.Sent<RankFailed>()->message.find("DigestMismatch"), std::string::npos);
  EXPECT_FALSE(rig.Has<AbortMesh>());  // others may still compare
  EXPECT_TRUE(rig.Joined().effects.empty());
  EXPECT_TRUE(rig.Do(FenceRank{Generation(2)}).Has<AbortMesh>());
  EXPECT_NE(rig.Do(AbortConfirmed{Generation(1)}).Sent<CollectAnswer>(), nullptr);
}

TEST(SessionCoreTest, RefusesAssignmentsThatMemoryDoesNotFit) {
  const auto code = [](Rig& rig, const Assignment& a) {
    rig.Assigned(a);
    return rig.Sent<RankFailed>() == nullptr ? StatusCode::kOk : rig.Sent<RankFailed>()->code;
  };
  {
    Rig rig;
    rig.Joined();
    EXPECT_EQ(code(rig, MakeAssignment(1, State(3, 1), RestoreAction::kKeep)), StatusCode::kFailedPrecondition);
    EXPECT_EQ(code(rig, MakeAssignment(1, State(3, 1), RestoreAction::kRollForward)), StatusCode::kFailedPrecondition);
    EXPECT_EQ(code(rig, MakeAssignment(1, State(3, 1), RestoreAction::kInitialize)), StatusCode::kFailedPrecondition);
    Assignment self = MakeAssignment(1, State(3, 1), RestoreAction::kFetchFromRank);
    self.ranks[0].source_rank = Rank(0);
    EXPECT_EQ(code(rig, self), StatusCode::kFailedPrecondition);
    Assignment other = MakeAssignment(1, {}, RestoreAction::kInitialize);
    other.ranks[0].process = ProcessId(5);
    EXPECT_EQ(code(rig, other), StatusCode::kFailedPrecondition);
    Assignment shuffled = MakeAssignment(1, {}, RestoreAction::kInitialize);
    std::swap(shuffled.ranks[0].rank, shuffled.ranks[1].rank);
    EXPECT_EQ(code(rig, shuffled), StatusCode::kFailedPrecondition);
    EXPECT_EQ(code(rig, MakeAssignment(1, {}, RestoreAction::kInitialize)), StatusCode::kOk);
  }
  Rig rig;  // stepping, and never fenced
  rig.Stepping();
  EXPECT_EQ(code(rig, MakeAssignment(2, State(0, 0), RestoreAction::kKeep)), StatusCode::kFailedPrecondition);
  EXPECT_EQ(rig.core.stage(), Stage::kStepping);
}

TEST(SessionCoreTest, AnAssignmentToldTwiceIsSaidAgainNotDoneAgain) {
  Rig rig;
  rig.Stepping();
  rig.Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize));
  EXPECT_NE(rig.Sent<RankConnected>(), nullptr);
  EXPECT_NE(rig.Sent<RankReady>(), nullptr);
  EXPECT_FALSE(rig.Has<ConnectMesh>());
  rig.Do(ResumeRank{Generation(1), Step(0)});
  EXPECT_FALSE(rig.Has<CallAnswered>());
  EXPECT_EQ(rig.core.stage(), Stage::kStepping);
}

// ---- the step

TEST(SessionCoreTest, WalksThePhasesOfAStep) {
  Rig rig;
  rig.Stepping();
  EXPECT_TRUE(rig.Do(StepBegun{Step(1)}).Outcome(CallOutcome::kDone));
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kComputing);
  rig.Do(GradientsCompleted{Step(1)});
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kReduced);
  rig.Do(VoteStarted{Step(1)});
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kVoting);
  EXPECT_TRUE(rig.Do(rig.Passed(1)).Outcome(CallOutcome::kApply));
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kApplying);
  EXPECT_EQ(rig.core.progress().vote_passed, Step(1));
  EXPECT_FALSE(rig.core.progress().memory_valid);
  EXPECT_EQ(rig.core.progress().applied, State(0, 0));
  EXPECT_TRUE(rig.Do(Applied{Step(1)}).Outcome(CallOutcome::kDone));
  EXPECT_EQ(rig.core.progress().applied, State(1, 1));
  EXPECT_TRUE(rig.core.progress().memory_valid);
}

TEST(SessionCoreTest, RefusesStepsOutOfOrderAndVotesWithoutGradients) {
  Rig rig;
  rig.Stepping();
  EXPECT_TRUE(rig.Do(StepBegun{Step(2)}).Answered(StatusCode::kInvalidArgument));
  rig.Do(StepBegun{Step(1)});
  EXPECT_TRUE(rig.Do(VoteStarted{Step(1)}).Answered(StatusCode::kFailedPrecondition));
  EXPECT_TRUE(rig.Do(GradientsCompleted{Step(2)}).Answered(StatusCode::kInvalidArgument));
}

TEST(SessionCoreTest, ThePageIsWrittenBeforeAnythingElseIsDone) {
  Rig rig;
  rig.Stepping().Voting(1).Do(rig.Passed(1));
  ASSERT_FALSE(rig.effects.empty());
  const auto* page = std::get_if<UpdatePage>(&rig.effects.front());
  ASSERT_NE(page, nullptr);
  EXPECT_EQ(page->progress.phase, RankPhase::kApplying);
}

TEST(SessionCoreTest, AVoteOfAnotherStepOrGenerationIsNoVote) {
  for (const auto& [step, generation] : {std::pair<int64_t, uint64_t>{2, 1}, {1, 2}}) {
    Rig rig;
    rig.Stepping().Voting(1).Do(rig.Passed(step, generation));
    EXPECT_TRUE(rig.Answered(StatusCode::kAborted));
    EXPECT_NE(rig.Sent<RankFailed>(), nullptr);
    EXPECT_EQ(rig.core.progress().vote_passed, Step(0));
  }
}

TEST(SessionCoreTest, OutOfRangeIsRedoneAndNothingIsHeldMeanwhile) {
  Rig rig;
  rig.Stepping().Voting(1);
  VotePassed vote = rig.Passed(1);
  vote.out_of_range = true;
  EXPECT_TRUE(rig.Do(vote).Outcome(CallOutcome::kRedo));
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kComputing);
  EXPECT_EQ(rig.core.progress().vote_passed, Step(0));
  rig.Collected(2);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report.gradients, Generation(0));
}

TEST(SessionCoreTest, NotFiniteIsToldToTheProgramAndNotApplied) {
  Rig rig;
  rig.Stepping().Voting(1);
  VotePassed vote = rig.Passed(1);
  vote.not_finite = true;
  EXPECT_TRUE(rig.Do(vote).Outcome(CallOutcome::kNotFinite));
  EXPECT_EQ(rig.core.progress().applied, State(0, 0));
  EXPECT_TRUE(rig.core.progress().memory_valid);
}

TEST(SessionCoreTest, TheWatermarkRisesWithVotesAndMessagesAndIsSetByResume) {
  Rig rig;
  rig.Stepping().Voting(1);
  VotePassed vote = rig.Passed(1);
  vote.protected_step_min = Step(1);
  rig.Do(vote);
  ASSERT_TRUE(rig.Has<KeepSnapshots>());
  EXPECT_EQ(rig.Find<KeepSnapshots>()->protected_step, Step(1));
  rig.Do(Applied{Step(1)});
  EXPECT_TRUE(rig.Do(SnapshotProtected{Step(3)}).Has<KeepSnapshots>());
  EXPECT_FALSE(rig.Do(SnapshotProtected{Step(2)}).Has<KeepSnapshots>());
  EXPECT_EQ(rig.Voting(2).Find<CallAnswered>()->protected_step, Step(3));
  rig.Do(VoteFailed{Step(2), Rank(-1), Aborted("")}).Collected(2).Joined();
  rig.Assigned(MakeAssignment(2, State(1, 1), RestoreAction::kKeep)).Do(MeshConnected{Generation(2)});
  rig.Do(DigestsAgreed{Generation(2), {}}).Do(ResumeRank{Generation(2), Step(1)});
  ASSERT_TRUE(rig.Has<KeepSnapshots>());
  EXPECT_EQ(rig.Find<KeepSnapshots>()->protected_step, Step(1));
  EXPECT_TRUE(rig.Find<KeepSnapshots>()->discard);
  EXPECT_EQ(rig.Find<KeepSnapshots>()->discard_above, State(1, 1));
}

// ---- fences

struct FenceCase {
  const char* name;
  void (*arrive)(Rig&);
  bool memory_valid;
  StateId applied;
  uint64_t gradients;
};

class FenceTest : public testing::TestWithParam<FenceCase> {};

TEST_P(FenceTest, AbortsAtOnceAndAnswersWhatIsHeldOnceTheAbortIsConfirmed) {
  Rig rig;
  GetParam().arrive(rig);
  rig.Do(FenceRank{Generation(9)});
  ASSERT_TRUE(rig.Has<AbortMesh>());
  EXPECT_EQ(rig.Sent<CollectAnswer>(), nullptr);
  rig.Do(AbortConfirmed{rig.core.progress().generation});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  const CollectAnswer& answer = *rig.Sent<CollectAnswer>();
  EXPECT_EQ(answer.generation, Generation(9));
  EXPECT_FALSE(answer.planned);
  EXPECT_EQ(answer.report.memory_valid, GetParam().memory_valid);
  EXPECT_EQ(answer.report.applied, GetParam().applied);
  EXPECT_EQ(answer.report.gradients, Generation(GetParam().gradients));
}

INSTANTIATE_TEST_SUITE_P(
    Phases, FenceTest,
    testing::Values(
        FenceCase{"BetweenSteps", [](Rig& r) { r.Stepping().StepDone(1); }, true, {everstep::Step(1), Generation(1)}, 0},
        FenceCase{"Computing", [](Rig& r) { r.Stepping().StepDone(1).Do(StepBegun{everstep::Step(2)}); }, true,
                  {everstep::Step(1), Generation(1)}, 0},
        FenceCase{"Reduced", [](Rig& r) { r.Stepping().StepDone(1).Reduced(2); }, true, {everstep::Step(1), Generation(1)}, 1},
        FenceCase{"Voting", [](Rig& r) { r.Stepping().StepDone(1).Voting(2); }, true, {everstep::Step(1), Generation(1)}, 1},
        FenceCase{"AfterAFailedVote",
                  [](Rig& r) { r.Stepping().StepDone(1).Voting(2).Do(VoteFailed{everstep::Step(2), Rank(1), Aborted("")}); },
                  true, {everstep::Step(1), Generation(1)}, 1},
        FenceCase{"AfterAFailedCollective",
                  [](Rig& r) {
                    r.Stepping().StepDone(1).Do(StepBegun{everstep::Step(2)});
                    r.Do(CollectiveFailed{Generation(1), Rank(1), Unavailable("")});
                  },
                  true, {everstep::Step(1), Generation(1)}, 0}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(SessionCoreTest, AFenceWhileApplyingIsAnsweredRightAfter) {
  Rig rig;
  rig.Stepping().Voting(1).Do(rig.Passed(1)).Do(FenceRank{Generation(2)});
  EXPECT_TRUE(rig.Has<AbortMesh>());
  rig.Do(AbortConfirmed{Generation(1)});
  EXPECT_EQ(rig.Sent<CollectAnswer>(), nullptr);
  rig.Do(Applied{Step(1)});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(1, 1), Generation(0)}));
  EXPECT_TRUE(rig.Outcome(CallOutcome::kSwitch));  // applied, but the generation is over
}

TEST(SessionCoreTest, AFenceBeforeTheVoteIsSeenToPassWins) {
  Rig rig;
  rig.Stepping().Voting(1).Do(FenceRank{Generation(2)});
  EXPECT_TRUE(rig.Do(rig.Passed(1)).Answered(StatusCode::kAborted));
  EXPECT_EQ(rig.core.progress().vote_passed, Step(0));
  rig.Do(AbortConfirmed{Generation(1)});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(0, 0), Generation(1)}));
}

TEST(SessionCoreTest, AfterAFenceNothingOfTheOldGenerationCounts) {
  Rig rig;
  rig.Stepping().Do(StepBegun{Step(1)}).Do(FenceRank{Generation(3)});
  EXPECT_TRUE(rig.Do(GradientsCompleted{Step(1)}).Answered(StatusCode::kAborted));
  EXPECT_TRUE(rig.Do(VoteStarted{Step(1)}).Answered(StatusCode::kAborted));
  EXPECT_TRUE(rig.Do(StepBegun{Step(1)}).Answered(StatusCode::kAborted));
  EXPECT_TRUE(rig.Do(FinishCalled{}).Answered(StatusCode::kAborted));
  rig.Do(AbortConfirmed{Generation(1)});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report.gradients, Generation(0));  // completed after the fence: not held
}

TEST(SessionCoreTest, RefusesEverythingBelowItsPromise) {
  Rig rig;
  rig.Stepping().Collected(5).Joined();
  EXPECT_TRUE(rig.Assigned(MakeAssignment(4, State(0, 0), RestoreAction::kKeep)).effects.empty());
  EXPECT_TRUE(rig.Do(FenceRank{Generation(4)}).effects.empty());
  EXPECT_TRUE(rig.Do(PrepareSwitch{Generation(5)}).effects.empty());
  EXPECT_EQ(rig.core.pending_generation(), Generation(0));
  EXPECT_TRUE(rig.Do(ResumeRank{Generation(1), Step(0)}).effects.empty());
  EXPECT_EQ(rig.core.stale_refused_count(), 4u);
  EXPECT_TRUE(rig.Assigned(MakeAssignment(5, State(0, 0), RestoreAction::kKeep)).Has<ConnectMesh>());
}

TEST(SessionCoreTest, AHigherFenceIsAnsweredAgain) {
  Rig rig;
  rig.Stepping().Reduced(1).Collected(2);
  rig.Do(FenceRank{Generation(3)});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->generation, Generation(3));
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report.gradients, Generation(1));
  EXPECT_FALSE(rig.Has<AbortMesh>());
  // The same one again: the answer may have been lost with the agent's stream.
  EXPECT_EQ(rig.Do(FenceRank{Generation(3)}).Sent<CollectAnswer>()->generation, Generation(3));
}

TEST(SessionCoreTest, OneAnswerForTwoFencesThatCameBeforeTheAbortWasConfirmed) {
  Rig rig;
  rig.Stepping().Do(FenceRank{Generation(2)}).Do(FenceRank{Generation(3)});
  EXPECT_FALSE(rig.Has<AbortMesh>());
  rig.Do(AbortConfirmed{Generation(1)});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->generation, Generation(3));
}

TEST(SessionCoreTest, AFenceOfTheAssignedGenerationIsALateCopy) {
  Rig rig;
  rig.Stepping().Collected(2).Joined();
  rig.Assigned(MakeAssignment(2, State(0, 0), RestoreAction::kKeep)).Do(FenceRank{Generation(2)});
  EXPECT_TRUE(rig.effects.empty());
}

TEST(SessionCoreTest, AStandbyAnswersThatItHoldsNothing) {
  Rig rig;
  rig.Joined().Do(FenceRank{Generation(4)});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, RankReport{});
}

TEST(SessionCoreTest, InterruptedWhileRestoringItReportsNothing) {
  for (const RestoreAction action : {RestoreAction::kFetchFromRank, RestoreAction::kInitialize}) {
    Rig rig;
    rig.Joined().Assigned(MakeAssignment(2, {}, action)).Do(MeshConnected{Generation(2)});
    rig.Do(FenceRank{Generation(3)}).Do(AbortConfirmed{Generation(2)});
    EXPECT_EQ(rig.Sent<CollectAnswer>(), nullptr);  // the copy still runs
    rig.Do(WorkFailed{Generation(2), Rank(-1), Aborted("")});
    ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
    EXPECT_FALSE(rig.Sent<CollectAnswer>()->report.memory_valid);
    EXPECT_EQ(rig.Sent<RankFailed>(), nullptr);
  }
}

TEST(SessionCoreTest, ARestoreThatEndsAfterTheFenceReportsTheStateItHolds) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(2, State(4, 1), RestoreAction::kFetchFromRank)).Do(MeshConnected{Generation(2)});
  rig.Do(FenceRank{Generation(3)}).Do(AbortConfirmed{Generation(2)}).Do(RestoreDone{Generation(2), 9});
  // The reader checked the whole shard's digest, and this may be the last copy.
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(4, 1), Generation(0)}));
}

TEST(SessionCoreTest, InterruptedWhileRollingForwardItReportsTheAppliedStep) {
  Rig rig;
  rig.Stepping().Voting(1).Collected(2).Joined();
  rig.Assigned(MakeAssignment(2, State(1, 1), RestoreAction::kRollForward)).Do(MeshConnected{Generation(2)});
  rig.Do(FenceRank{Generation(3)}).Do(AbortConfirmed{Generation(2)});
  EXPECT_EQ(rig.Sent<CollectAnswer>(), nullptr);
  rig.Do(RolledForward{Generation(2)});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(1, 1), Generation(0)}));
}

TEST(SessionCoreTest, InterruptedBeforeRollingForwardTheGradientsAreStillHeld) {
  Rig rig;
  rig.Stepping().Voting(1).Collected(2).Joined();
  rig.Assigned(MakeAssignment(2, State(1, 1), RestoreAction::kRollForward)).Do(FenceRank{Generation(3)});
  rig.Do(AbortConfirmed{Generation(2)}).Do(WorkFailed{Generation(2), Rank(-1), Aborted("")});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(0, 0), Generation(1)}));
}

TEST(SessionCoreTest, GradientsThatTheRecoveryPointPassedOverAreNeverHeldAgain) {
  Rig rig;
  rig.Stepping().Voting(1).Collected(2).Joined();
  rig.Assigned(MakeAssignment(2, State(0, 0), RestoreAction::kKeep)).Do(FenceRank{Generation(3)});
  rig.Do(AbortConfirmed{Generation(2)}).Do(WorkFailed{Generation(2), Rank(-1), Aborted("")});
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(0, 0), Generation(0)}));
}

TEST(SessionCoreTest, AnswersWhileTheProgramComputesAndWaitsForItBeforeTouchingMemory) {
  Rig rig;
  rig.Stepping().Do(StepBegun{Step(1)}).Collected(2);
  EXPECT_NE(rig.Sent<CollectAnswer>(), nullptr);
  rig.Assigned(MakeAssignment(2, State(5, 1), RestoreAction::kFetchFromRank));
  EXPECT_FALSE(rig.Has<ConnectMesh>());
  EXPECT_TRUE(rig.core.progress().memory_valid);
  EXPECT_TRUE(rig.Joined().Has<ConnectMesh>());
}

// ---- failures

TEST(SessionCoreTest, AFailedCollectiveIsReportedOnceWithItsSuspect) {
  Rig rig;
  rig.Stepping().Do(CollectiveFailed{Generation(1), Rank(1), Unavailable("reset")});
  ASSERT_NE(rig.Sent<RankFailed>(), nullptr);
  EXPECT_EQ(rig.Sent<RankFailed>()->suspect, Rank(1));
  EXPECT_EQ(rig.Sent<RankFailed>()->code, StatusCode::kUnavailable);
  EXPECT_FALSE(rig.Has<AbortMesh>());  // the fence will come
  EXPECT_EQ(rig.Do(CollectiveFailed{Generation(1), Rank(0), Aborted("")}).Sent<RankFailed>(), nullptr);
  EXPECT_TRUE(rig.Do(StepBegun{Step(1)}).Answered(StatusCode::kAborted));
}

TEST(SessionCoreTest, AStaleCollectiveFailureIsIgnored) {
  Rig rig;
  rig.Stepping(3).Do(CollectiveFailed{Generation(2), Rank(1), Unavailable("")});
  EXPECT_TRUE(rig.effects.empty());
}

TEST(SessionCoreTest, WithoutAnAgentAFailureAbortsTheMesh) {
  Rig rig({.process = kProcess, .abort_on_failure = true});
  rig.Stepping().Do(CollectiveFailed{Generation(1), Rank(1), Unavailable("")});
  EXPECT_TRUE(rig.Has<AbortMesh>());
}

TEST(SessionCoreTest, AProgramThatJoinsByItselfLeavesItsGeneration) {
  Rig rig;
  rig.Stepping().Joined();
  EXPECT_NE(rig.Sent<RankFailed>(), nullptr);
  EXPECT_TRUE(rig.Has<AbortMesh>());
  EXPECT_FALSE(rig.Do(AbortConfirmed{Generation(1)}).Has<ConnectMesh>());
  EXPECT_NE(rig.Do(FenceRank{Generation(2)}).Sent<CollectAnswer>(), nullptr);
}

TEST(SessionCoreTest, AMeshThatCannotBeMadeIsReportedAndWaitsForAFence) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize));
  rig.Do(WorkFailed{Generation(1), Rank(1), DeadlineExceeded("rank 1 missing")});
  EXPECT_EQ(rig.Sent<RankFailed>()->suspect, Rank(1));
  rig.Do(AbortConfirmed{Generation(1)}).Do(FenceRank{Generation(2)});
  EXPECT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_TRUE(rig.Assigned(MakeAssignment(2, {}, RestoreAction::kInitialize)).Has<ConnectMesh>());
}

TEST(SessionCoreTest, WhatACallbackOfTheProgramSaysEndsJoin) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize)).Do(MeshConnected{Generation(1)});
  rig.Do(WorkFailed{Generation(1), Rank(-1), InvalidArgument("no such layer"), true});
  EXPECT_TRUE(rig.Answered(StatusCode::kInvalidArgument));
  EXPECT_EQ(rig.Sent<RankFailed>()->code, StatusCode::kInvalidArgument);
}

TEST(SessionCoreTest, AStuckAbortEndsTheProcess) {
  Rig rig({.process = kProcess, .abort_confirm_max = Seconds(2)});
  rig.Stepping().Do(FenceRank{Generation(2)});
  EXPECT_EQ(rig.core.NextDeadline(), rig.now + Seconds(2));
  EXPECT_FALSE(rig.Do(DeadlinePassed{}).Has<ExitProcess>());
  rig.now += Seconds(2);
  EXPECT_TRUE(rig.Do(DeadlinePassed{}).Has<ExitProcess>());
}

TEST(SessionCoreTest, TheDeadlineEndsWithTheConfirmation) {
  Rig rig;
  rig.Stepping().Collected(2);
  EXPECT_EQ(rig.core.NextDeadline(), kNever);
}

TEST(SessionCoreTest, ARankDoesNotOutliveItsAgent) {
  Rig rig;
  EXPECT_TRUE(rig.Stepping().Do(AgentLost{"reset"}).Has<ExitProcess>());
  Rig finished;
  finished.Stepping().Do(FinishCalled{});
  EXPECT_FALSE(finished.Do(AgentLost{"reset"}).Has<ExitProcess>());
}

TEST(SessionCoreTest, StopEndsJoinWithItsMessage) {
  Rig rig;
  rig.Joined().Do(StopRank{"cancelled"});
  ASSERT_TRUE(rig.Answered(StatusCode::kFailedPrecondition));
  EXPECT_EQ(rig.Find<CallAnswered>()->status.message(), "cancelled");
  EXPECT_TRUE(rig.Joined().Answered(StatusCode::kFailedPrecondition));
}

TEST(SessionCoreTest, StopWhileSteppingRefusesTheNextCall) {
  Rig rig;
  rig.Stepping().Do(StopRank{"cancelled"});
  EXPECT_TRUE(rig.Has<AbortMesh>());
  EXPECT_TRUE(rig.Do(StepBegun{Step(1)}).Answered(StatusCode::kFailedPrecondition));
}

TEST(SessionCoreTest, StopDuringWorkAnswersJoinWhenTheWorkHasEnded) {
  Rig rig;
  rig.Joined().Assigned(MakeAssignment(1, {}, RestoreAction::kInitialize)).Do(StopRank{"cancelled"});
  EXPECT_FALSE(rig.Has<CallAnswered>());
  EXPECT_TRUE(rig.Do(WorkFailed{Generation(1), Rank(-1), Aborted("")}).Answered(StatusCode::kFailedPrecondition));
}

TEST(SessionCoreTest, FinishIsSaidOnceAndEndsTheSession) {
  Rig rig;
  rig.Stepping().Do(FinishCalled{});
  EXPECT_NE(rig.Sent<RankFinished>(), nullptr);
  EXPECT_EQ(rig.core.progress().phase, RankPhase::kFinished);
  EXPECT_TRUE(rig.Do(StepBegun{Step(1)}).Answered(StatusCode::kFailedPrecondition));
}

// ---- planned switches

TEST(SessionCoreTest, ThePendingGenerationRidesInTheVote) {
  Rig rig;
  rig.Stepping().Do(PrepareSwitch{Generation(4)});
  EXPECT_EQ(rig.Voting(1).Find<CallAnswered>()->pending_generation, Generation(4));
}

TEST(SessionCoreTest, APassedVoteWithAPendingGenerationAppliesAndLeavesAtTheBoundary) {
  Rig rig;
  rig.Stepping().Voting(1);  // this rank was told nothing; another rank's word counts
  VotePassed vote = rig.Passed(1);
  vote.pending_generation_max = Generation(4);
  EXPECT_TRUE(rig.Do(vote).Outcome(CallOutcome::kApply));
  rig.Do(Applied{Step(1)});
  EXPECT_TRUE(rig.Outcome(CallOutcome::kSwitch));
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_TRUE(rig.Sent<CollectAnswer>()->planned);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->generation, Generation(4));
  EXPECT_EQ(rig.Sent<CollectAnswer>()->report, (RankReport{true, State(1, 1), Generation(0)}));
  EXPECT_FALSE(rig.Has<AbortMesh>());  // a peer may still wait for the result of the vote
  EXPECT_TRUE(rig.Do(StepBegun{Step(2)}).Answered(StatusCode::kAborted));
  // The assignment ends the old mesh, then makes the new one.
  rig.Joined().Assigned(MakeAssignment(4, State(1, 1), RestoreAction::kKeep));
  EXPECT_TRUE(rig.Has<AbortMesh>());
  EXPECT_FALSE(rig.Has<ConnectMesh>());
  EXPECT_TRUE(rig.Do(AbortConfirmed{Generation(1)}).Has<ConnectMesh>());
}

TEST(SessionCoreTest, AFailureCancelsASwitchThatHasNotHappened) {
  Rig rig;
  rig.Stepping().Do(PrepareSwitch{Generation(4)}).Voting(1);
  rig.Do(FenceRank{Generation(5)}).Do(AbortConfirmed{Generation(1)});
  EXPECT_FALSE(rig.Sent<CollectAnswer>()->planned);
  EXPECT_EQ(rig.core.pending_generation(), Generation(0));
}

TEST(SessionCoreTest, AFenceOverridesASwitchThatTheVoteCarried) {
  Rig rig;
  rig.Stepping().Voting(1);
  VotePassed vote = rig.Passed(1);
  vote.pending_generation_max = Generation(4);
  rig.Do(vote).Do(FenceRank{Generation(5)}).Do(AbortConfirmed{Generation(1)}).Do(Applied{Step(1)});
  ASSERT_NE(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Sent<CollectAnswer>()->generation, Generation(5));
  EXPECT_FALSE(rig.Sent<CollectAnswer>()->planned);
}

TEST(SessionCoreTest, AHigherFenceAfterAPlannedLeaveAbortsTheOldMeshFirst) {
  Rig rig;
  rig.Stepping().Voting(1);
  VotePassed vote = rig.Passed(1);
  vote.pending_generation_max = Generation(4);
  rig.Do(vote).Do(Applied{Step(1)}).Do(FenceRank{Generation(6)});
  EXPECT_TRUE(rig.Has<AbortMesh>());
  EXPECT_EQ(rig.Sent<CollectAnswer>(), nullptr);
  EXPECT_EQ(rig.Do(AbortConfirmed{Generation(1)}).Sent<CollectAnswer>()->generation, Generation(6));
}

// ---- random walks

// Whatever order events come in: promises never fall, answers come only when nothing is in flight, valid memory is
// whole, and a rank that was told to leave never applies a vote that it saw later.
TEST(SessionCoreTest, RandomWalksKeepThePromises) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng random(seed);
    Rig rig;
    Generation highest(0);
    uint64_t newest = 0;
    bool in_join = false, work = false, aborting = false, applying = false, fenced = false;
    Generation mesh(0);
    for (int i = 0; i < 400; ++i) {
      const int64_t next = rig.core.progress().applied.step.value + 1;
      std::optional<Event> event;
      switch (random.UpTo(13)) {
        case 0: event = FenceRank{Generation(newest += random.UpTo(1))}; break;
        case 1: event = FenceRank{Generation(random.UpTo(newest + 1))}; break;
        case 2: event = PrepareSwitch{Generation(newest += random.UpTo(1))}; break;
        case 3: {
          const StateId at = rig.core.progress().applied;
          event = AssignRank{MakeAssignment(newest += random.UpTo(1), at,
                                            at.step == Step(0) ? RestoreAction::kInitialize : RestoreAction::kKeep),
                             Rank(0)};
          break;
        }
        case 4:
          if (!in_join && !applying) event = JoinCalled{};
          break;
        case 5:
          if (aborting) event = AbortConfirmed{mesh};
          break;
        case 6:
        case 7:
          if (work) {
            const Generation g = rig.core.has_assignment() ? rig.core.assignment().generation : mesh;
            if (random.Chance(1, 5)) event = WorkFailed{g, Rank(1), Unavailable("")};
            else if (rig.core.stage() == Stage::kConnecting) event = MeshConnected{g};
            else if (rig.core.stage() == Stage::kRestoring) event = RestoreDone{g, 0};
            else if (rig.core.stage() == Stage::kComparing) event = DigestsAgreed{g, {}};
            else event = WorkFailed{g, Rank(-1), Aborted("")};
          }
          break;
        case 8: event = ResumeRank{Generation(newest), Step(0)}; break;
        case 9:
          if (!in_join && !applying) event = StepBegun{Step(next)};
          break;
        case 10:
          if (!in_join && !applying) event = GradientsCompleted{Step(next)};
          break;
        case 11:
          if (!in_join && !applying) event = VoteStarted{Step(next)};
          break;
        case 12:
          if (rig.core.progress().phase == RankPhase::kVoting) {
            VotePassed vote = rig.Passed(next, rig.core.progress().generation.value);
            if (random.Chance(1, 4)) vote.pending_generation_max = Generation(++newest);
            event = vote;
          }
          break;
        default:
          if (applying) event = Applied{Step(next)};
          break;
      }
      if (!event) continue;
      if (const auto* fence = std::get_if<FenceRank>(&*event)) fenced |= fence->generation > rig.core.promised();
      const bool was_voting = std::holds_alternative<VotePassed>(*event);
      rig.Do(*event);
      if (std::holds_alternative<JoinCalled>(*event)) in_join = true;
      if (std::holds_alternative<AbortConfirmed>(*event)) aborting = false;
      if (std::holds_alternative<WorkFailed>(*event) || std::holds_alternative<MeshConnected>(*event) ||
          std::holds_alternative<RestoreDone>(*event) || std::holds_alternative<DigestsAgreed>(*event)) {
        work = false;
      }
      if (std::holds_alternative<Applied>(*event)) applying = false;
      for (const Effect& effect : rig.effects) {
        if (const auto* connect = std::get_if<ConnectMesh>(&effect)) {
          ASSERT_FALSE(work || aborting);
          ASSERT_TRUE(in_join);
          mesh = connect->assignment.generation;
          work = true;
          fenced = false;
        }
        if (std::holds_alternative<InitializeState>(effect) || std::holds_alternative<ExchangeDigests>(effect)) {
          ASSERT_FALSE(work);
          work = true;
        }
        if (std::holds_alternative<AbortMesh>(effect)) aborting = true;
        if (const auto* answer = std::get_if<CallAnswered>(&effect)) {
          if (std::holds_alternative<ResumeRank>(*event)) in_join = false;
          if (was_voting && answer->status.ok() && answer->outcome == CallOutcome::kApply) {
            ASSERT_FALSE(fenced);
            applying = true;
          }
        }
        if (const auto* send = std::get_if<SendToAgent>(&effect)) {
          if (const auto* collect = std::get_if<CollectAnswer>(&send->message)) {
            ASSERT_GE(collect->generation, highest);
            highest = collect->generation;
            ASSERT_FALSE(work || applying);
            ASSERT_TRUE(collect->planned || !aborting);
            ASSERT_EQ(collect->report.memory_valid, rig.core.progress().memory_valid);
          }
        }
      }
      ASSERT_GE(rig.core.promised(), highest);
      if (applying) {
        ASSERT_FALSE(rig.core.progress().memory_valid);
      }
    }
  }
}

}  // namespace
}  // namespace everstep::session
