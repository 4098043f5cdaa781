// A controller that restarts over its ledger: it adopts what runs, and raises what was unfinished.
#include <gtest/gtest.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

TEST(Adoption, ARestartedControllerAdoptsTheRunningGenerationUntouched) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.RestartController();
  c.ClearTrace();
  c.ConnectAll();
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 1u);
  EXPECT_EQ(c.Count("notice Generation adopted"), 1);
  EXPECT_EQ(c.Count("Kill"), 0);
  EXPECT_EQ(c.Count("Fence"), 0);
  EXPECT_EQ(c.ledger().term, Term(2));
  // The standby of the old controller is kept, and still serves.
  c.StepTo(job, 6);
  c.KillRank(job, 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[1], "s3");
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
}

TEST(Adoption, WaitsForTheLastAgentWithinTheGracePeriod) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.RestartController();
  c.Connect("s1");
  c.Advance(Seconds(4));
  EXPECT_EQ(c.Fenced(job), 1u);
  c.Connect("s2");
  EXPECT_EQ(c.Count("notice Generation adopted"), 1);
  c.Advance(Seconds(10));
  EXPECT_EQ(c.Fenced(job), 1u);
}

TEST(Adoption, AMemberThatNeverReportsIsReplacedInAHigherGeneration) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Agent("s2").beats = c.Agent("s2").hears = false;
  c.RestartController();
  c.ConnectAll();
  c.Advance(Seconds(12));
  EXPECT_EQ(c.Count("append ServerDied s2"), 1);
  EXPECT_GE(c.Fenced(job), 2u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
  EXPECT_EQ(c.Places(job)[1], "s3");
}

TEST(Adoption, AMemberThatDiedMeanwhileStartsAHigherGeneration) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.RestartController();
  const auto dead = c.RankOf(job, 1);
  c.Vanish(dead.server);
  c.ConnectAll();
  c.Advance(Seconds(1));
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(5));
}

TEST(Adoption, AnExitFactThatWasNotAcknowledgedComesAgain) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.RankOf(job, 0).process->gradients = Generation(1);
  FakeProcess& dead = *c.RankOf(job, 1).process;
  dead.applied = {Step(6), Generation(1)};
  dead.vote_passed = Step(6);
  const ProcessId id = c.RankOf(job, 1).id;
  c.RestartController();
  c.Exit(id, 0, 9);  // into the outbox: there is no stream
  c.ConnectAll();
  c.Advance(Seconds(1));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)})) << "its page is the proof";
}

TEST(Adoption, AnOpaqueJobIsAdoptedAlthoughItsProcessesKnowNoAssignment) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("script", 2);
  spec.opaque = true;
  const JobUid job = c.Run(spec);
  ASSERT_EQ(c.State(job), JobState::kRunning);
  c.RestartController();
  c.ClearTrace();
  c.ConnectAll();
  c.Advance(Seconds(10));
  EXPECT_EQ(c.Fenced(job), 1u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Count("Kill"), 0);
}

TEST(Adoption, AGenerationAboveTheLedgersIsGoneAbove) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  for (const auto& m : c.Members(job)) {
    m.process->promised = Generation(7);
    m.process->assigned = Generation(7);
  }
  c.RestartController();
  c.ConnectAll();
  c.Advance(Seconds(1));
  EXPECT_GE(c.Count("notice Ledger is behind an agent"), 1);
  EXPECT_EQ(c.Fenced(job), 8u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Adoption, AnIncarnationAboveAnOldLedgersIsGoneAbove) {
  FakeCluster c;
  c.AddServers(1);
  ASSERT_EQ(c.Agent("s1").incarnation, Incarnation(1));
  c.Disconnect("s1");
  // The ledger is a restored copy: the agent was given 7 and another nonce by the one that was lost.
  c.Agent("s1").incarnation = Incarnation(7);
  c.Agent("s1").nonce = 9999;
  c.Connect("s1");
  EXPECT_EQ(c.ledger().servers.at(ServerId("s1")).newest, Incarnation(8));
  EXPECT_EQ(c.Server("s1").incarnation, Incarnation(8));
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare);
}

TEST(Adoption, AServerThatOnlyTheLedgerKnowsHasNoPortToProbeAndDiesBySilence) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.FreezeServer("s2");
  c.RestartController();
  c.ConnectAll();
  c.ClearTrace();
  c.Advance(Seconds(12));
  EXPECT_EQ(c.Count("s2 port probed"), 0) << "its address is not in the ledger";
  EXPECT_EQ(c.Count("append ServerDied s2 1"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[1], "s3");
}

TEST(Adoption, AnUnknownMemberProcessIsKilled) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 1));
  FakeProcess stray = *c.RankOf(job, 0).process;
  stray.spawn.process = ProcessId(999);
  c.Disconnect("s2");
  c.Agent("s2").processes[ProcessId(999)] = stray;
  c.Connect("s2");
  EXPECT_FALSE(c.Agent("s2").processes.contains(ProcessId(999)));
}

TEST(Adoption, AnEndedJobsProcessesAreReleasedByTheNextController) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.Agent("s2").hears = false;
  c.Cancel("train");
  c.RestartController();
  c.Agent("s2").hears = true;
  c.Agent("s2").held.clear();
  c.ConnectAll();
  EXPECT_TRUE(c.Agent("s2").processes.empty());
  EXPECT_EQ(c.State(job), JobState::kCancelled);
}

// A takeover in the middle of each phase.
struct Phase {
  const char* name;
  bool collects, joins, connects, readies;
};

class Takeover : public ::testing::TestWithParam<Phase> {};

TEST_P(Takeover, RaisesTheGenerationAndEndsTheRecovery) {
  const Phase& phase = GetParam();
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = phase.joins ? 1 : 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  auto all = [&](bool collects, bool joins, bool connects, bool readies) {
    for (const auto& s : {"s1", "s2", "s3", "s4"}) {
      FakeAgent& a = c.Agent(s);
      a.collects = collects;
      a.joins = joins;
      a.connects = connects;
      a.readies = readies;
    }
  };
  all(phase.collects, phase.joins, phase.connects, phase.readies);
  c.KillRank(job, 1);
  ASSERT_EQ(c.Fenced(job), 2u);
  ASSERT_EQ(c.Entry(job).resumed, Generation(1));
  c.RestartController();
  all(true, true, true, true);
  c.ConnectAll();
  c.Advance(Seconds(65));
  EXPECT_GE(c.Fenced(job), 3u) << "a number belongs to the term that allotted it";
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
  EXPECT_EQ(c.Entry(job).resumed, c.Entry(job).fenced);
  EXPECT_EQ(c.Places(job).size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(EachPhase, Takeover,
                         ::testing::Values(Phase{"Collecting", false, true, true, true},
                                           Phase{"Gathering", true, false, true, true},
                                           Phase{"Connecting", true, true, false, false},
                                           Phase{"Restoring", true, true, true, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TakeoverWhileWaiting, TheJobWaitsOnAndResumes) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 2));
  c.StepTo(job, 5);
  c.Agent("s2").probe = ProbeOutcome::kRefused;
  c.Agent("s2").beats = false;
  c.Disconnect("s2");
  ASSERT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.Agent("s2").hears = false;
  c.RestartController();
  c.ConnectAll();
  c.Advance(Seconds(10));
  EXPECT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.AddServer("s3");
  c.Advance(Seconds(1));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
}

TEST(TakeoverWhilePreparing, ThePlannedSwitchIsRedoneAsARecovery) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Drain("s1");
  ASSERT_EQ(c.Fenced(job), 2u);
  c.RestartController();
  c.ConnectAll();
  c.Advance(Seconds(2));
  EXPECT_GE(c.Fenced(job), 3u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s3");
}

TEST(TakeoverTwice, EveryTermHasItsOwnNumbers) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).readies = false;
  c.KillRank(job, 1);
  for (int i = 0; i < 3; ++i) {
    c.RestartController();
    c.ConnectAll();
    c.Advance(Seconds(1));
  }
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).readies = true;
  c.RestartController();
  c.ConnectAll();
  c.Advance(Seconds(20));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(5));
  EXPECT_GE(c.Fenced(job), 6u);
}

}  // namespace
}  // namespace everstep::testing
