// Planned changes: drains, and a job's end while one is pending.
#include <algorithm>

#include <fmt/format.h>
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

TEST(Drains, ALateRetryOfAnOlderRequestDoesNotFlipItBack) {
  FakeCluster c;
  c.AddServers(1);
  const SetDrain drain{ServerId("s1"), true}, undrain{ServerId("s1"), false};
  c.Call(drain, "r1");
  c.Call(undrain, "r2");
  EXPECT_TRUE(c.Call(drain, "r1").status.ok()) << "the retry succeeds: it was done";
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare) << "and undoes nothing that came after it";
  // A request that found its wish fulfilled is remembered, too, and a new controller knows both.
  c.Call(undrain, "r3");
  c.Call(drain, "r4");
  c.RestartController();
  c.ConnectAll();
  c.Call(undrain, "r3");
  EXPECT_EQ(c.Server("s1").state, ServerState::kDraining);
  c.Call(undrain, "r5");
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare);
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

// ---- beyond the wanted size

struct Growing {
  FakeCluster c;
  JobUid job;
  explicit Growing(int servers) {
    c.AddServers(servers);
    JobSpec spec = Spec("train", 2);
    spec.servers_max = 4;
    job = c.Run(spec);
    c.StepTo(job, 5);
  }
  void Grow() {
    c.Advance(Seconds(3));
    c.LeaveAtBoundary(job, 6);
    ASSERT_EQ(c.State(job), JobState::kRunning);
    ASSERT_EQ(c.Places(job).size(), 4u);
    c.StepTo(job, 7);
  }
  int Standbys() const {
    const std::vector<RankPlace> ranks = c.View(job).ranks;
    return static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [](const RankPlace& r) { return r.rank.value < 0; }));
  }
};

TEST(Growth, BeyondTheWantedSizeUsesWhatIsLeftAndLosesNoStep) {
  Growing g(6);
  EXPECT_EQ(g.c.Places(g.job).size(), 2u);
  g.c.Advance(Seconds(3));
  ASSERT_EQ(g.c.Count("append GenerationFenced 2 JobRegrown planned"), 1);
  EXPECT_EQ(g.c.Count(" Fence "), 0) << "nobody is interrupted";
  g.c.LeaveAtBoundary(g.job, 6);
  EXPECT_EQ(g.c.Places(g.job).size(), 4u);
  EXPECT_EQ(g.c.Entry(g.job).recovery_point, (StateId{Step(6), Generation(1)}));
  EXPECT_EQ(g.c.ledger().recoveries.back().steps_lost, 0);
  g.c.StepTo(g.job, 7);
  g.c.Advance(Seconds(10));
  EXPECT_EQ(g.Standbys(), 1) << "its standby stays, and the sixth server is nobody's";
  EXPECT_EQ(g.c.Server("s6").ranks.size() + g.c.Server("s5").ranks.size(), 1u);
  EXPECT_EQ(g.c.Fenced(g.job), 2u);
}

TEST(Growth, StopsAtWhatIsFreeAndGoesOnWhenAServerJoins) {
  Growing g(4);
  g.c.Advance(Seconds(3));
  g.c.LeaveAtBoundary(g.job, 6);
  EXPECT_EQ(g.c.Places(g.job).size(), 3u) << "the fourth server keeps the standby";
  g.c.StepTo(g.job, 7);
  g.c.AddServer("s5");
  g.c.Advance(Seconds(3));
  g.c.LeaveAtBoundary(g.job, 8);
  EXPECT_EQ(g.c.Places(g.job).size(), 4u);
  EXPECT_EQ(g.Standbys(), 1);
}

TEST(Growth, LeavesAReservedSpareAlone) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.servers_max = 4;
  spec.spares_reserved = 1;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Advance(Seconds(10));
  EXPECT_EQ(c.Fenced(job), 1u);
}

TEST(Growth, WaitsUntilEveryOtherJobHasWhatItWants) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec other = Spec("other", 2, 1);
  other.standbys_wanted = 0;
  const JobUid b = c.Run(other);
  c.StepTo(b, 1);
  JobSpec spec = Spec("train", 1);
  spec.servers_max = 3;
  spec.standbys_wanted = 0;
  spec.priority = 5;
  const JobUid a = c.Run(spec);
  c.StepTo(a, 1);
  Refuse(c, c.Places(b)[1]);
  c.StepTo(b, 2);
  ASSERT_EQ(c.Places(b).size(), 1u);
  c.AddServer("s4");
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Fenced(a), 1u) << "the free server is for the job that lacks one, whatever its priority";
  c.LeaveAtBoundary(b, 3);
  EXPECT_EQ(c.Places(b).size(), 2u);
  c.StepTo(b, 4);
  c.AddServer("s5");
  c.Advance(Seconds(3));
  c.LeaveAtBoundary(a, 2);
  EXPECT_EQ(c.Places(a).size(), 2u);
}

TEST(Growth, ALossTakesNoSpareForRanksBeyondTheWantedOnes) {
  Growing g(5);
  g.Grow();
  const std::string lost = g.c.Places(g.job)[1];
  Refuse(g.c, lost);
  EXPECT_EQ(g.c.State(g.job), JobState::kRunning);
  EXPECT_EQ(g.c.Places(g.job).size(), 3u);
  EXPECT_EQ(g.Standbys(), 1);
  EXPECT_EQ(g.c.ledger().recoveries.back().steps_lost, 0);
  g.c.StepTo(g.job, 8);
  g.c.Advance(Seconds(10));
  EXPECT_EQ(g.c.Places(g.job).size(), 3u) << "nothing is left to grow into";
}

TEST(Growth, GivesTheExtraBackAtABoundaryWhenAnotherJobNeedsIt) {
  Growing g(5);
  g.Grow();
  const uint64_t before = g.c.Fenced(g.job);
  g.c.ClearTrace();
  const JobUid other = g.c.Run(Spec("other", 2, 2));
  EXPECT_EQ(g.c.State(other), JobState::kPending);
  ASSERT_EQ(g.c.Count(fmt::format("append GenerationFenced {} JobShrunk planned", before + 1)), 1);
  EXPECT_EQ(g.c.Count(" Fence "), 0);
  g.c.LeaveAtBoundary(g.job, 8);
  EXPECT_EQ(g.c.Places(g.job).size(), 2u);
  EXPECT_EQ(g.c.Entry(g.job).recovery_point.step, Step(8));
  const auto& recoveries = g.c.ledger().recoveries;
  const auto shrunk = std::find_if(recoveries.begin(), recoveries.end(), [](const RecoveryRecord& r) { return r.reason == Reason::kJobShrunk; });
  ASSERT_NE(shrunk, recoveries.end());
  EXPECT_EQ(shrunk->steps_lost, 0);
  EXPECT_EQ(shrunk->decision, Reason::kJobShrunk);
  EXPECT_NE(shrunk->decision_message.find("job other lacks 2 devices"), std::string::npos) << shrunk->decision_message;
  g.c.Advance(Seconds(1));
  EXPECT_EQ(g.c.State(other), JobState::kRunning);
  EXPECT_EQ(g.c.Places(other).size(), 2u);
  EXPECT_EQ(g.Standbys(), 1) << "its own standby is no surplus";
  g.c.StepTo(g.job, 9);
  g.c.StepTo(other, 1);
  g.c.Advance(Seconds(20));
  EXPECT_EQ(g.c.Places(g.job).size(), 2u) << "nothing flaps";
  EXPECT_EQ(g.c.Fenced(g.job), before + 1);
}

TEST(Growth, AWidthBeyondTheWantedOneIsAdopted) {
  Growing g(5);
  g.Grow();
  const uint64_t fenced = g.c.Fenced(g.job);
  g.c.RestartController();
  g.c.ConnectAll();
  g.c.Advance(Seconds(10));
  EXPECT_EQ(g.c.Fenced(g.job), fenced);
  EXPECT_EQ(g.c.Places(g.job).size(), 4u);
}

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
