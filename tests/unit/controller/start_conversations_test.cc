// A job's start and its quiet life: placement, standbys, operators' calls, registration.
#include <gtest/gtest.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

ProcessId NewestSpawn(const FakeCluster& c) {
  ProcessId newest;
  for (const FakeCluster::Sent& s : c.sent()) {
    if (const auto* spawn = std::get_if<SpawnProcess>(&s.command)) newest = spawn->process;
  }
  return newest;
}

TEST(StartConversations, StartsAJobInOrderFromFenceToResume) {
  FakeCluster c;
  c.AddServers(2);
  c.ClearTrace();
  const JobUid job = c.Run(Spec("train", 2));
  const std::vector<std::string> expected = {
      "append JobSubmitted train",
      "append GenerationFenced 1 JobStarted",
      "append RecoveryPointDecided 1 (0,0)",
      "append PlanMade 1 2 ranks JobStarted",
      "s1 Spawn",
      "s2 Spawn",
      "append AssignmentMade 1",
      "s1 Assign 1",
      "s2 Assign 1",
      "append GenerationResumed 1",
      "s1 Resume 1",
      "s2 Resume 1",
      "append RecoveryEnded resumed",
  };
  EXPECT_EQ(c.Orders(), expected);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  const Assignment& a = *c.Entry(job).assignment;
  EXPECT_EQ(a.dp_size, 2);
  EXPECT_EQ(a.ranks[0].micro_batch_count + a.ranks[1].micro_batch_count, 8);
  EXPECT_EQ(a.ranks[0].action, RestoreAction::kInitialize);
  EXPECT_EQ(c.ledger().recoveries.size(), 1u);
  EXPECT_EQ(c.ledger().recoveries[0].reason, Reason::kJobStarted);
}

TEST(StartConversations, KeepsAWarmStandbyOnAServerWithoutARank) {
  FakeCluster c;
  c.AddServers(2, 2);
  c.AddServer("s3");
  const JobUid job = c.Run(Spec("train", 2));
  int standbys = 0;
  for (const RankPlace& p : c.View(job).ranks) {
    if (p.rank.value >= 0) continue;
    ++standbys;
    EXPECT_TRUE(p.ready_standby);
    EXPECT_NE(p.server.value, c.Places(job)[0]);
    EXPECT_NE(p.server.value, c.Places(job)[1]);
  }
  EXPECT_EQ(standbys, 1);
}

TEST(StartConversations, WaitsForServersThatRegisterWithinTheSettleTime) {
  FakeCluster c;
  c.AddServer("s1");
  const JobUid job = c.Run(Spec("train", 2, 1));
  EXPECT_EQ(c.State(job), JobState::kPending);
  c.Advance(Milliseconds(100));
  c.AddServer("s2");
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 2u);
}

TEST(StartConversations, StartsWithItsMinimumWhenTheSettleTimeIsOver) {
  FakeCluster c;
  c.AddServer("s1");
  const JobUid job = c.Run(Spec("train", 2, 1));
  c.Advance(Milliseconds(600));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 1u);
}

TEST(StartConversations, RefusesAJobThatCanNeverFit) {
  FakeCluster c;
  c.AddServers(2);
  const ReplyToOperator reply = c.Submit(Spec("train", 4, 3));
  EXPECT_EQ(reply.status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(c.ledger().jobs.empty());
}

TEST(StartConversations, TheSameRequestIdSubmitsOnce) {
  FakeCluster c;
  c.AddServers(2);
  const ReplyToOperator first = c.Submit(Spec("train", 2), "r1");
  const ReplyToOperator second = c.Submit(Spec("train", 2), "r1");
  EXPECT_TRUE(second.status.ok());
  EXPECT_EQ(first.job, second.job);
  EXPECT_EQ(c.ledger().jobs.size(), 1u);
  EXPECT_EQ(c.Submit(Spec("train", 2), "r2").status.code(), StatusCode::kAlreadyExists);
}

TEST(StartConversations, TheRequestIdCountsAfterAControllerRestart) {
  FakeCluster c;
  c.AddServers(2);
  const ReplyToOperator first = c.Submit(Spec("train", 2), "r1");
  c.RestartController();
  EXPECT_EQ(c.Submit(Spec("train", 2), "r1").job, first.job);
}

TEST(StartConversations, ADryRunChangesNothing) {
  FakeCluster c;
  c.AddServers(1);
  const LedgerState before = c.ledger();
  EXPECT_TRUE(c.Call(SubmitJob{Spec("train", 1)}, "", true).status.ok());
  EXPECT_TRUE(c.Call(SetDrain{ServerId("s1"), true}, "", true).status.ok());
  EXPECT_TRUE(c.ledger() == before);
}

TEST(StartConversations, AnIllegalSpecIsRefusedWithEveryProblem) {
  FakeCluster c;
  JobSpec spec = Spec("Bad_Name", 1);
  spec.program = "relative";
  const ReplyToOperator reply = c.Submit(spec);
  EXPECT_EQ(reply.status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(reply.status.message().find("name:"), std::string::npos);
  EXPECT_NE(reply.status.message().find("program:"), std::string::npos);
}

TEST(StartConversations, EndsWhenEveryRankFinished) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  c.Exit(c.RankOf(job, 1).id, 0, 0, true);
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
  EXPECT_EQ(c.Entry(job).ended->exit_code, 0);
}

TEST(StartConversations, AMissingProgramAtTheStartEndsTheJobWithItsReason) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  agent.starts = false;
  const JobUid job = c.Run(Spec("train", 1));
  c.Say(agent, ProcessStartFailed{job, NewestSpawn(c), Reason::kProgramMissing, "/opt/train: no such file"});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_EQ(c.Entry(job).ended->reason, Reason::kProgramMissing);
}

TEST(StartConversations, AProcessThatNeverStartsIsNotTriedForEver) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  agent.starts = false;
  const JobUid job = c.Run(Spec("train", 1));
  for (int i = 0; i < 50 && c.State(job) != JobState::kFailed; ++i) {
    c.Say(agent, ProcessStartFailed{job, NewestSpawn(c), Reason::kStorageFailed, "no memory"});
    c.Advance(Milliseconds(50));
  }
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_LE(c.Count("s1 Spawn"), 10);
}

TEST(StartConversations, AServerThatCannotStartProcessesIsLeftForAnother) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  c.AddServer("s2");
  agent.starts = false;
  const JobUid job = c.Run(Spec("train", 1));
  c.Say(agent, ProcessStartFailed{job, NewestSpawn(c), Reason::kStorageFailed, "disk full"});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s2");
}

TEST(StartConversations, AProcessThatDoesNotReachJoinIsReplacedElsewhere) {
  FakeCluster c;
  c.AddServer("s1").joins = false;
  const JobUid job = c.Run(Spec("train", 1));
  EXPECT_EQ(c.State(job), JobState::kStarting);
  c.AddServer("s2");
  c.Advance(Seconds(61));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s2");
  EXPECT_EQ(c.Count("s1 Kill"), 1);
}

// ---- registration

TEST(Registration, ANewAgentGetsItsIncarnationOnceForOneNonce) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  EXPECT_EQ(agent.incarnation, Incarnation(1));
  c.Disconnect("s1");
  agent.incarnation = Incarnation(0);  // its Welcome was lost
  c.Connect("s1");
  EXPECT_EQ(agent.incarnation, Incarnation(1));
  EXPECT_EQ(c.Count("append ServerRegistered"), 1);
}

TEST(Registration, RefusesAnotherProtocolVersionForGood) {
  FakeCluster c;
  c.AddServer("s1");
  c.Disconnect("s1");
  c.Connect("s1", kProtocolVersion + 1);
  EXPECT_EQ(c.Count("s1 Refuse for good"), 1);
}

TEST(Registration, ANameThatIsTakenByALivingAgentIsRefused) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  const SessionId first = *agent.session;
  const uint64_t nonce = agent.nonce;
  auto claim = [&](uint64_t other_nonce) {
    agent.nonce = other_nonce;
    agent.incarnation = Incarnation(0);
    c.Connect("s1");
    agent.session = first;
    agent.nonce = nonce;
    agent.incarnation = Incarnation(1);
    agent.refused = false;
    agent.beats = true;
  };
  claim(77);
  EXPECT_EQ(c.Count("s1 Refuse for good"), 0);  // the one that has the name may be gone without a word: it is asked
  c.Advance(Seconds(1));
  claim(78);
  EXPECT_EQ(c.Count("s1 Refuse for good"), 1);
  c.Advance(Seconds(5));
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare);
}

TEST(Registration, AHostThatIsBackBeforeItsOldStreamEndsIsTakenAfterTheLease) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  agent.nonce = 77;
  agent.incarnation = Incarnation(0);
  c.Connect("s1");
  EXPECT_EQ(c.Count("s1 Refuse for good"), 0);
  agent.session.reset();
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Server("s1").state, ServerState::kDead);
  c.Connect("s1");
  EXPECT_EQ(c.Server("s1").state, ServerState::kSpare);
  EXPECT_EQ(c.Server("s1").incarnation, Incarnation(2));
}

TEST(Registration, AZombieIsRefusedAlthoughAnotherAgentHasItsNameNow) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  const uint64_t old_nonce = agent.nonce;
  c.RestartAgent("s1");
  EXPECT_EQ(agent.incarnation, Incarnation(2));
  c.Disconnect("s1");
  const uint64_t new_nonce = agent.nonce;
  agent.nonce = old_nonce;  // the old process wakes and connects while the new one's stream is broken
  agent.incarnation = Incarnation(1);
  c.Connect("s1");
  EXPECT_TRUE(agent.refused);
  EXPECT_EQ(c.ledger().servers.at(ServerId("s1")).newest, Incarnation(2));
  agent.nonce = new_nonce;
  agent.incarnation = Incarnation(2);
  c.Connect("s1");
  EXPECT_EQ(agent.incarnation, Incarnation(2));
  EXPECT_FALSE(agent.refused);
}

TEST(Registration, NothingIsSaidBeforeWelcomeAlthoughSnapshotsAreListed) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 4);
  c.Disconnect("s1");
  FakeAgent& agent = c.Agent("s1");
  agent.snapshots.emplace_back(job, SnapshotInfo{{Step(4), Generation(1)}, ShardIndex(0), SnapshotTier::kStaged,
                                                 ServerId("s1"), 10, {4, 0}});
  agent.snapshots.emplace_back(job, SnapshotInfo{{Step(9), Generation(7)}, ShardIndex(0), SnapshotTier::kStaged,
                                                 ServerId("s1"), 10, {9, 0}});
  c.ClearTrace();
  c.Connect("s1");  // the harness checks that Welcome comes first
  EXPECT_EQ(c.Count("s1 Welcome"), 1);
  EXPECT_EQ(c.Count("s1 Drop"), 1) << "a state off the chain is of no use";
  EXPECT_EQ(c.Count("Copy (4,1)"), 1);
}

TEST(Registration, AcceptsEachFactOnceAndAcknowledgesItAgain) {
  FakeCluster c;
  FakeAgent& agent = c.AddServer("s1");
  const JobUid job = c.Run(Spec("train", 1));
  c.Say(agent, MetricObserved{job, c.RankOf(job, 0).id, {Step(3), "loss", 0.5}});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.View(job).metrics, (std::vector<std::pair<std::string, double>>{{"loss", 0.5}}));
  EXPECT_EQ(c.View(job).step, Step(0)) << "a program may report before its vote: that step is not committed";
  c.ClearTrace();
  c.Feed(FactReceived{*agent.session, FactSequence(agent.facts),
                      MetricObserved{job, c.RankOf(job, 0).id, {Step(9), "loss", 0.1}}});
  EXPECT_EQ(c.View(job).metrics, (std::vector<std::pair<std::string, double>>{{"loss", 0.5}}));
  EXPECT_EQ(c.Count("s1 Acknowledge"), 1);
}

TEST(Registration, AFactOfAnotherServersProcessChangesNothing) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  const uint64_t fenced = c.Fenced(job);
  c.Say(c.Agent("s3"), ProcessExited{job, c.RankOf(job, 0).id, 1, 0, false, {}, {}, {}});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.Fenced(job), fenced);
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Registration, TellsAgainWhatAReconnectedAgentMayHaveMissed) {
  FakeCluster c;
  c.AddServers(2);
  c.Agent("s2").connects = false;
  const JobUid job = c.Run(Spec("train", 2));
  EXPECT_EQ(c.State(job), JobState::kStarting);
  // The Assign is lost with the stream.
  FakeAgent& s2 = c.Agent("s2");
  FakeProcess& p = *c.RankOf(job, 1).process;
  p.assigned = Generation(0);
  p.memory_valid = false;
  c.Disconnect("s2");
  s2.connects = true;
  c.ClearTrace();
  c.Connect("s2");
  EXPECT_EQ(c.Count("s2 Assign 1"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 1u);
}

TEST(Registration, ALossAfterALostAssignStillCounts) {
  FakeCluster c;
  c.AddServers(3);
  c.Agent("s2").connects = false;
  const JobUid job = c.Run(Spec("train", 2));
  FakeAgent& s2 = c.Agent("s2");
  FakeProcess& p = *c.RankOf(job, 1).process;
  p.assigned = Generation(0);
  p.memory_valid = false;
  c.Disconnect("s2");
  s2.connects = true;
  c.Connect("s2");
  ASSERT_EQ(c.State(job), JobState::kRunning);
  c.KillRank(job, 1);
  EXPECT_EQ(c.Fenced(job), 2u) << "the job noticed";
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Registration, SendsALostSpawnAgain) {
  FakeCluster c;
  c.AddServer("s1").starts = false;
  const JobUid job = c.Run(Spec("train", 1));
  EXPECT_EQ(c.State(job), JobState::kStarting);
  c.Disconnect("s1");
  c.Agent("s1").starts = true;
  c.Connect("s1");
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Registration, AProcessThatItsAgentNoLongerListsIsLost) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 3);
  c.Disconnect("s2");
  c.Vanish("s2");
  c.Connect("s2");
  EXPECT_EQ(c.Fenced(job), 1u) << "its exit fact may follow";
  c.Advance(Milliseconds(250));
  EXPECT_GE(c.Fenced(job), 2u);
}

}  // namespace
}  // namespace everstep::testing
