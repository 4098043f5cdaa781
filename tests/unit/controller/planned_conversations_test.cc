// Planned changes: drains, and a job's end while one is pending.
#include <gtest/gtest.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

void Refuse(FakeCluster& c, const std::string& server) {
  c.Agent(server).probe = ProbeOutcome::kRefused;
  c.Agent(server).beats = false;
  c.Disconnect(server);
}

TEST(Drains, ADrainedServersRankMovesAtAStepBoundaryAndNoStepIsLost) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.ClearTrace();
  const ReplyToOperator reply = c.Drain("s1");
  EXPECT_EQ(reply.message, "server/s1 drained");
  EXPECT_EQ(c.Count("append ServerDrainSet s1"), 1);
  EXPECT_EQ(c.Count("append GenerationFenced 2 ServerDrained planned"), 1);
  EXPECT_EQ(c.Count("Prepare 2"), 2);
  EXPECT_EQ(c.Count(" Fence "), 0);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  c.LeaveAtBoundary(job, 6);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s3");
  EXPECT_EQ(c.Places(job)[1], "s2");
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 0);
  EXPECT_TRUE(c.Agent("s1").processes.empty()) << "nothing is left on the drained server";
  EXPECT_EQ(c.Server("s1").state, ServerState::kDraining);
}

TEST(Drains, ADrainIsIdempotentAndCanBeTakenBack) {
  FakeCluster c;
  c.AddServers(1);
  EXPECT_TRUE(c.Drain("s1").status.ok());
  EXPECT_TRUE(c.Drain("s1").status.ok());
  EXPECT_EQ(c.Count("append ServerDrainSet"), 1);
  EXPECT_TRUE(c.Drain("s1", false).status.ok());
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare);
  EXPECT_EQ(c.Drain("s9").status.code(), StatusCode::kNotFound);
}

TEST(Drains, WithoutASpareTheJobShrinksIfItsMinimumAllows) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 3, 2));
  c.StepTo(job, 5);
  c.Drain("s2");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.LeaveAtBoundary(job, 6);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 2u);
  for (const auto& [rank, server] : c.Places(job)) EXPECT_NE(server, "s2");
}

TEST(Drains, WithoutASpareAtTheMinimumTheDrainWaitsAndTheJobGoesOn) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 2));
  c.StepTo(job, 5);
  c.Drain("s2");
  c.Advance(Seconds(5));
  EXPECT_EQ(c.Fenced(job), 1u);
  EXPECT_EQ(c.Count("notice Drain waits for a spare"), 1);
  c.AddServer("s3");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.LeaveAtBoundary(job, 6);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[1], "s3");
}

TEST(Drains, TheStandbyDyingBeforeTheBoundaryDoesNotParkTheJob) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2, 2));
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  Refuse(c, "s3");
  c.LeaveAtBoundary(job, 6);
  EXPECT_EQ(c.State(job), JobState::kRunning) << "the draining server serves on until there is a place";
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(6));
  c.AddServer("s4");
  c.Advance(Seconds(5));
  c.LeaveAtBoundary(job, 7);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s4");
}

TEST(Drains, AFailureCancelsASwitchThatHasNotHappened) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 3);
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.KillRank(job, 1);
  EXPECT_EQ(c.Count("append RecoveryPointDecided 2"), 0);
  EXPECT_EQ(c.Count("append GenerationFenced 3 ProcessKilled"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(5));
}

TEST(Drains, AStepLongerThanTheBudgetIsLeftAndRedone) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.Advance(Seconds(31));
  EXPECT_EQ(c.Count("notice Planned switch overdue"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s3");
  EXPECT_EQ(c.Fenced(job), 2u);
}

TEST(Drains, ADrainingRankThatAloneHoldsItsStageStaysInTheMesh) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("train", 2, 2);
  spec.pipeline_stages = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.LeaveAtBoundary(job, 6);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(6)) << "no step is lost for a drain";
}

TEST(Drains, VotesKeepASilentServerAliveWhileASwitchIsPending) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 1);
  c.Drain("s2");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.FreezeServer("s1");
  for (int64_t step = 2; step <= 12; ++step) {
    c.StepTo(job, step);
    c.Advance(Milliseconds(300));
  }
  EXPECT_EQ(c.Count("append ServerDied"), 0);
}

// ---- a job's end and a pending generation

TEST(Finishing, AJobThatFinishesWhileASwitchIsPendingHasSucceeded) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  c.Exit(c.RankOf(job, 1).id, 0, 0, true);
  c.Advance(Seconds(60));
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
  EXPECT_EQ(c.Fenced(job), 2u);
}

TEST(Finishing, AJobThatFinishesWhileItCollectsHasSucceeded) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Agent("s1").collects = c.Agent("s2").collects = false;
  const auto rank0 = c.RankOf(job, 0);
  c.Say(c.Agent(rank0.server), ProcessFailed{job, rank0.id, {Generation(1), Rank(1), StatusCode::kUnavailable, "reset"}});
  c.Advance(Milliseconds(400));
  ASSERT_EQ(c.Fenced(job), 2u);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  c.Exit(c.RankOf(job, 1).id, 0, 0, true);
  c.Advance(Seconds(10));
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
}

TEST(Finishing, ARankLostAfterAnotherFinishedEndsTheJobWell) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  c.KillRank(job, 1);
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
  EXPECT_EQ(c.Fenced(job), 1u);
}

TEST(Finishing, ItIsKnownAfterAControllerRestart) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  c.RestartController();
  c.ConnectAll();
  if (c.State(job) != JobState::kSucceeded) c.Exit(c.RankOf(job, 1).id, 0, 0, true);
  c.Advance(Seconds(10));
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
  EXPECT_EQ(c.Fenced(job), 1u) << "the job is not run again";
}

}  // namespace
}  // namespace everstep::testing
