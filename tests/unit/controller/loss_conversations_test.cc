// Losses while a job runs and in each stage of its recovery.
#include <gtest/gtest.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

// The newest command of one kind to a server.
template <typename T>
const FakeCluster::Sent* Newest(const FakeCluster& c, const std::string& server) {
  const FakeCluster::Sent* newest = nullptr;
  for (const FakeCluster::Sent& s : c.sent()) {
    if (s.server.value == server && std::holds_alternative<T>(s.command)) newest = &s;
  }
  return newest;
}

const RankAssignment& Placed(const FakeCluster& c, const JobUid& job, int rank) {
  return c.Entry(job).assignment->ranks.at(static_cast<size_t>(rank));
}

TEST(Losses, AKilledRankIsReplacedByTheWarmStandbyInThisOrder) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 7);
  c.Agent("s2").starts = false;  // no new standby, so that the order is the recovery's alone
  c.ClearTrace();
  c.KillRank(job, 1);
  const std::vector<std::string> expected = {
      "append GenerationFenced 2 ProcessKilled",
      "s1 Fence 2",
      "append RecoveryPointDecided 2 (7,1)",
      "append PlanMade 2 2 ranks StandbyPromoted",
      "append AssignmentMade 2",
      "s1 Assign 2",
      "s3 Assign 2",
      "append GenerationResumed 2",
      "s1 Resume 2",
      "s3 Resume 2",
      "append RecoveryEnded resumed",
  };
  EXPECT_EQ(c.Orders(), expected);
  c.ClearTrace();
  c.StepTo(job, 8);  // a starting standby would have slowed it
  EXPECT_EQ(c.Orders(), std::vector<std::string>{"s2 Spawn standby"});
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(Placed(c, job, 0).action, RestoreAction::kKeep);
  EXPECT_EQ(Placed(c, job, 0).server.value, "s1") << "the incumbent keeps its rank";
  EXPECT_EQ(Placed(c, job, 1).action, RestoreAction::kFetchFromRank);
  EXPECT_EQ(Placed(c, job, 1).source_rank, Rank(0));
  const RecoveryRecord& r = c.ledger().recoveries.back();
  EXPECT_EQ(r.reason, Reason::kProcessKilled);
  EXPECT_EQ(r.decision, Reason::kStandbyPromoted);
  EXPECT_EQ(r.steps_lost, 0);
  EXPECT_FALSE(r.alternatives.empty());
  EXPECT_FALSE(r.phases.empty());
}

TEST(Losses, WithoutAStandbyTheProcessIsStartedAgainOnItsDevice) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 3);
  c.KillRank(job, 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[1], "s2");
  EXPECT_EQ(c.ledger().recoveries.back().decision, Reason::kRestartedInPlace);
}

TEST(Losses, AServerWhoseHostRefusesIsReplacedAtOnce) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 3);
  c.Agent("s1").probe = ProbeOutcome::kRefused;
  c.Agent("s1").beats = false;
  c.Disconnect("s1");
  EXPECT_EQ(c.Server("s1").state, ServerState::kDead);
  EXPECT_EQ(c.Server("s1").reason, Reason::kServerRefused);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s3");
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(3), Generation(1)}));
}

TEST(Losses, ASilentServerIsProbedBeforeItIsDeclaredDead) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 3);
  c.Advance(Seconds(2));
  const Instant silent_from = c.now();
  c.FreezeServer("s1");
  c.ClearTrace();
  c.Advance(Milliseconds(1450));
  EXPECT_EQ(c.Server("s1").state, ServerState::kSuspect);
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  c.Advance(Milliseconds(550));
  EXPECT_EQ(c.Count("s1 Probe"), 1);
  EXPECT_EQ(c.Count("append ServerDied s1 1 ServerSilent"), 1);
  EXPECT_LE(c.now() - silent_from, Seconds(2)) << "declared within the target";
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[0], "s3");
  // It wakes: refused, and its ranks go.
  c.Wake("s1");
  EXPECT_TRUE(c.Agent("s1").refused);
  EXPECT_TRUE(c.Agent("s1").processes.empty());
}

TEST(Losses, DatagramsThatGetLostAloneKillNobody) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.Agent("s1").beats = false;
  c.Advance(Seconds(20));
  EXPECT_EQ(c.Fenced(job), 1u);
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  EXPECT_GT(c.Count("s1 Probe"), 3);
}

TEST(Losses, AVoteThatPassedKeepsASilentServersLease) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.FreezeServer("s1");
  for (int64_t step = 1; step <= 20; ++step) {
    c.StepTo(job, step);  // s2's datagrams say that the whole job voted
    c.Advance(Milliseconds(300));
  }
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  c.Advance(Seconds(2));
  EXPECT_EQ(c.Count("append ServerDied s1"), 1);
}

TEST(Losses, AStreamThatBreaksAloneKillsNobody) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 2);
  c.Disconnect("s1");
  c.Advance(Milliseconds(500));
  c.Connect("s1");
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Fenced(job), 1u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Server("s1").state, ServerState::kActive);
}

TEST(Losses, AnAgentThatRestartedHasLostItsRanks) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 4);
  c.RestartAgent("s2");
  EXPECT_EQ(c.Agent("s2").incarnation, Incarnation(2));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_GE(c.Fenced(job), 2u);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(4), Generation(1)}));
}

TEST(Losses, AServerDeclaredDeadRegistersAnewWithAFreshNonceOnly) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.FreezeServer("s1");
  c.Advance(Seconds(3));
  ASSERT_EQ(c.Count("append ServerDied s1"), 1);
  FakeAgent& s1 = c.Agent("s1");
  s1.hears = s1.beats = true;
  s1.held.clear();
  c.Connect("s1");
  EXPECT_TRUE(s1.refused);
  c.RestartAgent("s1");
  EXPECT_FALSE(s1.refused);
  EXPECT_EQ(s1.incarnation, Incarnation(2));
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Losses, LossesInOneBatchMakeOneGeneration) {
  FakeCluster c;
  c.AddServers(3, 2);
  JobSpec spec = Spec("train", 2);
  spec.ranks_per_server = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 6);
  ASSERT_EQ(c.Places(job)[0], c.Places(job)[1]);
  const std::string both = c.Places(job)[0];
  c.Agent(both).probe = ProbeOutcome::kRefused;
  c.Agent(both).beats = false;
  c.Disconnect(both);
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.ledger().recoveries.back().generations_used, 1);
}

// ---- the recovery point

// ---- the timeline

PhaseRecord Phase(const FakeCluster& c, RecoveryPhase phase) {
  for (const PhaseRecord& p : c.ledger().recoveries.back().phases) {
    if (p.phase == phase) return p;
  }
  ADD_FAILURE() << "no such phase";
  return {};
}

TEST(Timeline, DetectStartsWhenTheStreamBreaksAndEndsWithTheProof) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Agent("s1").beats = false;
  c.Disconnect("s1");  // its port still answers: the process is being torn down
  const Instant broke = c.now();
  c.Agent("s1").probe = ProbeOutcome::kRefused;
  c.Advance(Milliseconds(200));
  ASSERT_EQ(c.State(job), JobState::kRunning);
  const PhaseRecord detect = Phase(c, RecoveryPhase::kDetect);
  EXPECT_EQ(detect.start, Duration(0));
  EXPECT_EQ(detect.duration, Milliseconds(25)) << "asked again a tenth of a heartbeat later";
  EXPECT_GT(c.now(), broke);
  EXPECT_EQ(Phase(c, RecoveryPhase::kDecide).start, Milliseconds(25));
}

TEST(Timeline, DetectOfASilentServerStartsWithItsLastHeartbeat) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.FreezeServer("s1");
  c.Advance(Seconds(4));
  ASSERT_EQ(c.State(job), JobState::kRunning);
  EXPECT_GE(Phase(c, RecoveryPhase::kDetect).duration, Milliseconds(1500));
  EXPECT_LE(Phase(c, RecoveryPhase::kDetect).duration, Milliseconds(2200));
}

TEST(Timeline, DetectOfAnExitStartsWhenTheKernelToldTheAgent) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  const auto rank = c.RankOf(job, 1);
  ProcessExited exited{job, rank.id, 0, 9, false, {}, {}, Milliseconds(7)};
  FakeAgent& agent = c.Agent(rank.server);
  agent.processes.erase(rank.id);
  c.Say(agent, exited);
  c.Advance(Milliseconds(1));
  EXPECT_EQ(Phase(c, RecoveryPhase::kDetect).duration, Milliseconds(7));
}

TEST(Timeline, APeersComplaintIsTheFirstEvidenceOfALossThatIsProvedLater) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  const auto rank = c.RankOf(job, 0);
  c.Say(c.Agent(rank.server), ProcessFailed{job, rank.id, {Generation(1), Rank(1), StatusCode::kUnavailable, "peer reset"}});
  c.Advance(Milliseconds(40));
  c.KillRank(job, 1);
  EXPECT_EQ(Phase(c, RecoveryPhase::kDetect).duration, Milliseconds(40));
}

TEST(Timeline, DecideLastsUntilTheFenceIsOnDiskAndLaterEvidenceJoinsIt) {
  FakeCluster c;
  c.AddServers(5);
  const JobUid job = c.Run(Spec("train", 4));
  c.StepTo(job, 5);
  c.sync = Milliseconds(3);
  for (const char* name : {"s2", "s3", "s4"}) c.Agent(name).hears = false;
  c.KillRank(job, 0);
  EXPECT_EQ(c.View(job).phase, RecoveryPhase::kDecide);
  c.Advance(Milliseconds(2));
  c.KillRank(job, 1);
  EXPECT_EQ(c.View(job).phase, RecoveryPhase::kDecide);
  c.Advance(Milliseconds(5));
  EXPECT_EQ(c.View(job).phase, RecoveryPhase::kFence);
  for (const char* name : {"s2", "s3", "s4"}) c.Wake(name);
  c.Advance(Seconds(1));
  ASSERT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 2u) << "one generation for both";
  EXPECT_EQ(Phase(c, RecoveryPhase::kDecide).duration, Milliseconds(3));
  EXPECT_EQ(Phase(c, RecoveryPhase::kFence).start, Milliseconds(3));
  EXPECT_EQ(Phase(c, RecoveryPhase::kFence).duration, Milliseconds(4));
}

TEST(RecoveryPoints, AnUndecidedStepWithoutProofIsDiscarded) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.RankOf(job, 0).process->gradients = Generation(1);
  c.KillRank(job, 1);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
  EXPECT_EQ(Placed(c, job, 0).action, RestoreAction::kKeep);
}

TEST(RecoveryPoints, ThePageOfTheDeadProvesTheVoteAndSurvivorsRollForward) {
  FakeCluster c;
  c.AddServers(4);
  const JobUid job = c.Run(Spec("train", 3));
  c.StepTo(job, 5);
  c.RankOf(job, 0).process->gradients = Generation(1);
  c.RankOf(job, 1).process->gradients = Generation(1);
  FakeProcess& dead = *c.RankOf(job, 2).process;
  dead.vote_passed = Step(6);
  dead.applied = {Step(6), Generation(1)};
  c.KillRank(job, 2);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
  EXPECT_EQ(Placed(c, job, 0).action, RestoreAction::kRollForward);
  EXPECT_EQ(Placed(c, job, 1).action, RestoreAction::kRollForward);
  EXPECT_EQ(Placed(c, job, 2).action, RestoreAction::kFetchFromRank);
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 0);
}

TEST(RecoveryPoints, AVoteOfAnOlderGenerationIsNoProofInALaterOne) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 8);
  c.Hold("s3", job, {Step(4), Generation(1)}, 0, SnapshotTier::kPeer);
  // Everyone's memory goes with one blow; generation 2 starts at 4.
  for (const std::string& s : {std::string("s1"), std::string("s2")}) c.Agent(s).starts = true;
  c.RankOf(job, 0).process->memory_valid = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Entry(job).recovery_point.step, Step(4));
  c.StepTo(job, 5);
  c.StepTo(job, 6);
  c.RankOf(job, 0).process->gradients = Generation(2);
  // Rank 1's server dies with its page: the only word of it are its heartbeats.
  const std::string server = c.RankOf(job, 1).server;
  c.Agent(server).probe = ProbeOutcome::kRefused;
  c.Agent(server).beats = false;
  c.Disconnect(server);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(2)})) << "step 7 was never decided";
}

TEST(RecoveryPoints, HeartbeatsOfALaterGenerationCountAlthoughItsStepsAreLower) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 8);
  c.Hold("s3", job, {Step(4), Generation(1)}, 0, SnapshotTier::kPeer);
  c.RankOf(job, 0).process->memory_valid = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Entry(job).recovery_point.step, Step(4));
  EXPECT_EQ(c.View(job).step, Step(4));
  c.StepTo(job, 5);
  EXPECT_EQ(c.View(job).step, Step(5));
}

TEST(RecoveryPoints, WithoutAnyLiveCopyTheNewestProtectedStateBoundsTheLoss) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 1));
  c.StepTo(job, 9);
  c.Hold("s3", job, {Step(6), Generation(1)}, 0, SnapshotTier::kPeer);
  c.KillRank(job, 0);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
  EXPECT_EQ(Placed(c, job, 0).action, RestoreAction::kFetchFromSnapshot);
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 3);
  EXPECT_EQ(c.Count("notice Rolled back"), 1);
}

TEST(RecoveryPoints, ARollBackBelowTheWatermarkLowersIt) {
  FakeCluster c;
  c.AddServers(4);
  const JobUid job = c.Run(Spec("train", 1));
  c.StepTo(job, 9);
  c.Hold("s1", job, {Step(6), Generation(1)}, 0, SnapshotTier::kStored);
  c.Hold("s1", job, {Step(8), Generation(1)}, 0, SnapshotTier::kStaged);
  ASSERT_EQ(c.View(job).protected_step, Step(8));
  std::string peer;
  for (const auto& s : {"s2", "s3", "s4"}) {
    if (!c.Agent(s).snapshots.empty()) peer = s;
  }
  // The peer and the staged copy go; what is left is the older stored one.
  c.Say(c.Agent("s1"), SnapshotLost{job, {{Step(8), Generation(1)}, ShardIndex(0), SnapshotTier::kStaged}, Reason::kNone, ""});
  c.Agent(peer).probe = ProbeOutcome::kRefused;
  c.Disconnect(peer);
  c.KillRank(job, 0);
  ASSERT_EQ(c.Entry(job).recovery_point.step, Step(6));
  EXPECT_EQ(c.View(job).protected_step, Step(6));
  c.StepTo(job, 7);
  c.ClearTrace();
  const std::string server = c.RankOf(job, 0).server;
  c.Hold(server, job, {Step(7), Generation(2)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("Copy (7,2)"), 1);
}

TEST(RecoveryPoints, StepsLostAreThoseOfTheWholeRecovery) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 1));
  c.StepTo(job, 9);
  c.Hold("s3", job, {Step(6), Generation(1)}, 0, SnapshotTier::kPeer);
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).readies = false;
  c.KillRank(job, 0);
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).readies = true;
  c.KillRank(job, 0);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.ledger().recoveries.back().generations_used, 2);
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 3);
}

// ---- Collect

TEST(Collecting, ARankThatDoesNotAnswerIsExcludedAndKilledAfterThePointIsDurable) {
  FakeCluster c;
  c.AddServers(5);
  const JobUid job = c.Run(Spec("train", 3));
  c.StepTo(job, 5);
  const std::string mute = c.Places(job)[1];
  c.Agent(mute).collects = false;
  c.KillRank(job, 2);
  EXPECT_EQ(c.State(job), JobState::kRecovering);
  c.Advance(Milliseconds(1600));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_NE(c.Places(job)[1], mute);
  EXPECT_EQ(c.Count("notice Rank left out of the decision set"), 1);
  const auto* kill = Newest<KillProcess>(c, mute);
  ASSERT_NE(kill, nullptr);
  // Sequence of the recovery point of generation 2.
  uint64_t point = 0;
  for (size_t i = 0; i < c.log().size(); ++i) {
    const auto* r = std::get_if<RecoveryPointDecided>(&c.log()[i]);
    if (r != nullptr && r->generation == Generation(2)) point = i + 1;
  }
  EXPECT_GE(kill->after.value, point) << "a crash of the controller before that voids the exclusion";
  EXPECT_TRUE(c.Agent(mute).processes.empty() || !c.Agent(mute).processes.begin()->second.kill_ordered);
}

TEST(Collecting, ALateAnswerChangesNothing) {
  FakeCluster c;
  c.AddServers(5);
  const JobUid job = c.Run(Spec("train", 3));
  c.StepTo(job, 5);
  const auto mute = c.RankOf(job, 1);
  c.Agent(mute.server).collects = false;
  c.Agent(mute.server).reaps = false;
  c.KillRank(job, 2);
  c.Advance(Milliseconds(1600));
  ASSERT_EQ(c.State(job), JobState::kRunning);
  const LedgerState before = c.ledger();
  c.Say(c.Agent(mute.server), ProcessCollected{job, mute.id, {Generation(2), {true, {Step(5), Generation(1)}, Generation(1)}}});
  c.Say(c.Agent(mute.server), ProcessCollected{job, mute.id, {Generation(1), {true, {Step(5), Generation(1)}, Generation(1)}}});
  c.Feed(TimeAdvanced{});
  EXPECT_TRUE(c.ledger() == before);
}

TEST(Collecting, AnAnswerToAnOlderCollectIsNoAnswer) {
  FakeCluster c;
  c.AddServers(5);
  const JobUid job = c.Run(Spec("train", 3));
  c.StepTo(job, 5);
  const auto mute = c.RankOf(job, 1);
  c.Agent(mute.server).collects = false;
  c.KillRank(job, 2);
  ASSERT_EQ(c.Fenced(job), 2u);
  c.Say(c.Agent(mute.server), ProcessCollected{job, mute.id, {Generation(1), {true, {Step(5), Generation(1)}, {}}}});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.Count("append RecoveryPointDecided 2"), 0);
}

TEST(Collecting, ASecondLossWhileCollectingAmendsTheSameGeneration) {
  FakeCluster c;
  c.AddServers(6);
  const JobUid job = c.Run(Spec("train", 3));
  c.StepTo(job, 5);
  const auto mute = c.RankOf(job, 1);
  c.Agent(mute.server).collects = false;
  c.KillRank(job, 2);
  c.KillRank(job, 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(5));
}

TEST(Collecting, TheLastHolderLostWhileCollectingRollsBackInTheSameGeneration) {
  FakeCluster c;
  c.AddServers(4);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Agent(c.RankOf(job, 0).server).collects = false;
  c.KillRank(job, 1);
  c.KillRank(job, 0);
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(0));
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 5);
}

// ---- Gather

TEST(Gathering, ALostNewcomerIsReplacedInTheSameGeneration) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  for (const auto& s : {"s1", "s2", "s3", "s4"}) c.Agent(s).joins = false;
  c.Agent("s2").probe = ProbeOutcome::kRefused;
  c.Agent("s2").beats = false;
  c.Disconnect("s2");
  ASSERT_EQ(c.State(job), JobState::kRecovering);
  ASSERT_EQ(c.Count("append PlanMade 2"), 1);
  c.Agent("s4").joins = true;
  c.Agent("s3").probe = ProbeOutcome::kRefused;
  c.Agent("s3").beats = false;
  c.Disconnect("s3");
  EXPECT_EQ(c.Count("append PlanMade 2"), 2);
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job)[1], "s4");
}

TEST(Gathering, LosingTheOnlySourceRaisesTheGeneration) {
  FakeCluster c;
  c.AddServers(5);
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  for (const auto& s : {"s1", "s2", "s3", "s4", "s5"}) c.Agent(s).joins = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Count("append RecoveryPointDecided 2 (5,1)"), 1);
  for (const auto& s : {"s1", "s2", "s3", "s4", "s5"}) c.Agent(s).joins = true;
  c.Exit(c.RankOf(job, 0).id, 0, 9);
  c.Advance(Seconds(61));
  EXPECT_GE(c.Fenced(job), 3u);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(0));
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Gathering, AProofThatDiedWithItsHolderStillCountsForTheAmendedPlan) {
  FakeCluster c;
  c.AddServers(6);
  JobSpec spec = Spec("train", 3);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.RankOf(job, 0).process->gradients = Generation(1);
  // Rank 1 alone saw the vote of 6 pass, and is the proof.
  c.RankOf(job, 1).process->applied = {Step(6), Generation(1)};
  for (const auto& s : {"s1", "s2", "s3", "s4", "s5", "s6"}) c.Agent(s).joins = false;
  c.KillRank(job, 2);
  ASSERT_EQ(c.Count("append RecoveryPointDecided 2 (6,1)"), 1);
  for (const auto& s : {"s1", "s2", "s3", "s4", "s5", "s6"}) c.Agent(s).joins = true;
  const auto proof = c.RankOf(job, 1);
  c.Agent(proof.server).probe = ProbeOutcome::kRefused;
  c.Agent(proof.server).beats = false;
  c.Disconnect(proof.server);
  EXPECT_EQ(c.Fenced(job), 2u) << "rank 0 rolls forward: the point is durable and needs no other proof";
  c.Advance(Seconds(61));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
}

// ---- Assign, Connect, Restore

TEST(Restoring, ASpareThatDiesInRestoreStartsAHigherGeneration) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Agent("s3").readies = false;
  c.Agent("s4").readies = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Count("append AssignmentMade 2"), 1);
  c.Agent("s3").readies = c.Agent("s4").readies = true;
  c.KillRank(job, 1);
  EXPECT_EQ(c.Fenced(job), 3u);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
}

TEST(Restoring, ARankInterruptedWhileRestoringIsNoSource) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Agent("s3").readies = c.Agent("s4").readies = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Count("append AssignmentMade 2"), 1);
  c.RankOf(job, 1).process->memory_valid = false;  // half written
  c.KillRank(job, 0);                              // the source
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(0)) << "nobody holds step 5 any more";
  EXPECT_EQ(c.Fenced(job), 3u);
}

TEST(Restoring, ASurvivorWithTheStateIsSeatedBeforeOneWithoutIt) {
  // Two stages, two replicas; the newcomer of rank 0 is still restoring when rank 3's device is lost for good.
  FakeCluster c;
  c.AddServers(5);
  JobSpec spec = Spec("train", 4, 2);
  spec.pipeline_stages = 2;
  spec.standbys_wanted = 1;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  const auto refuse = [&](const std::string& server) {
    c.Agent(server).probe = ProbeOutcome::kRefused;
    c.Agent(server).beats = false;
    c.Disconnect(server);
  };
  c.Agent("s5").readies = false;
  refuse(c.Places(job)[0]);
  ASSERT_EQ(c.Places(job)[0], "s5");
  c.RankOf(job, 0).process->memory_valid = false;
  c.Agent("s5").readies = true;
  refuse(c.Places(job)[3]);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 2u);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
  EXPECT_EQ(c.Fenced(job), 3u);
}

TEST(Restoring, AnOverdueConnectRetriesThenRestartsTheProcessThenLeavesTheServer) {
  FakeCluster c;
  c.AddServers(4);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  const std::string late = c.Places(job)[0];
  c.Agent(late).connects = false;
  c.KillRank(job, 1);
  ASSERT_EQ(c.Fenced(job), 2u);
  c.Advance(Seconds(9));
  EXPECT_EQ(c.Fenced(job), 3u);
  EXPECT_EQ(c.Count(late + " Kill"), 0);
  c.Advance(Seconds(8));
  EXPECT_EQ(c.Count(late + " Kill"), 1);
  c.Advance(Seconds(8));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_NE(c.Places(job)[0], late);
}

TEST(Restoring, UnequalDigestsNeverResume) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Hold("s3", job, {Step(4), Generation(1)}, 0, SnapshotTier::kPeer);
  c.RankOf(job, 0).process->digest = Digest128{99, 99};
  c.ClearTrace();
  c.KillRank(job, 1);
  EXPECT_EQ(c.Count("append GenerationResumed 2"), 0);
  EXPECT_EQ(c.Count("append GenerationFenced 3 DigestMismatch"), 1);
  // Nobody's memory is trusted: everyone comes from the newest verified copy.
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(4));
  EXPECT_EQ(Placed(c, job, 0).action, RestoreAction::kFetchFromSnapshot);
  EXPECT_EQ(Placed(c, job, 1).action, RestoreAction::kFetchFromSnapshot);
}

TEST(Restoring, DigestsThatNeverAgreeEndTheJob) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("train", 2);
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.RankOf(job, 0).process->digest = Digest128{99, 99};
  c.RankOf(job, 0).process->digest_stays = true;
  c.KillRank(job, 1);
  c.Advance(Seconds(30));
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_EQ(c.Entry(job).ended->reason, Reason::kDigestMismatch);
  EXPECT_EQ(c.Entry(job).ended->exit_code, static_cast<int32_t>(JobExit::kDataLoss));
  EXPECT_LE(c.Fenced(job), 10u);
}

TEST(Restoring, ARanksComplaintProbesThePeerAndActsOnlyWhenNothingBetterComes) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  const auto rank0 = c.RankOf(job, 0);
  c.ClearTrace();
  c.Say(c.Agent(rank0.server), ProcessFailed{job, rank0.id, {Generation(1), Rank(1), StatusCode::kUnavailable, "reset"}});
  c.Feed(TimeAdvanced{});
  EXPECT_EQ(c.Count(c.Places(job)[1] + " port probed"), 1);
  EXPECT_EQ(c.Fenced(job), 1u);
  c.Advance(Milliseconds(350));
  EXPECT_EQ(c.Count("append GenerationFenced 2 PeerComplaint"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(Restoring, AComplaintOfAnOlderGenerationIsCounted) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.KillRank(job, 1);
  ASSERT_EQ(c.Fenced(job), 2u);
  const auto rank0 = c.RankOf(job, 0);
  c.Say(c.Agent(rank0.server), ProcessFailed{job, rank0.id, {Generation(1), Rank(1), StatusCode::kUnavailable, "reset"}});
  c.Advance(Seconds(1));
  EXPECT_EQ(c.Fenced(job), 2u);
}

// ---- capacity

TEST(Capacity, WithoutASpareTheJobShrinksAndGrowsBackAtAStepBoundary) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 3, 2));
  c.StepTo(job, 5);
  c.Agent("s3").probe = ProbeOutcome::kRefused;
  c.Agent("s3").beats = false;
  c.Disconnect("s3");
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 2u);
  EXPECT_EQ(c.ledger().recoveries.back().decision, Reason::kJobShrunk);
  const Assignment& a = *c.Entry(job).assignment;
  EXPECT_EQ(a.ranks[0].micro_batch_count + a.ranks[1].micro_batch_count, 8) << "the global batch is constant";
  c.StepTo(job, 8);
  // A server comes; its standby is warm, and after the regrow delay the switch rides in the vote.
  c.Agent("s3").probe = ProbeOutcome::kConnected;
  c.Agent("s3").beats = true;
  c.RestartAgent("s3");
  EXPECT_EQ(c.Places(job).size(), 2u);
  c.ClearTrace();
  c.Advance(Seconds(5));
  EXPECT_EQ(c.Count("append GenerationFenced 3 JobRegrown planned"), 1);
  EXPECT_EQ(c.Count("Prepare 3"), 2);
  EXPECT_EQ(c.Count(" Fence "), 0) << "no step is aborted";
  EXPECT_EQ(c.State(job), JobState::kRunning) << "it goes on stepping";
  c.LeaveAtBoundary(job, 9);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 3u);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(9), Generation(2)}));
  EXPECT_EQ(c.ledger().recoveries.back().steps_lost, 0);
}

TEST(Capacity, BelowTheMinimumTheJobWaitsAndResumes) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 2));
  c.StepTo(job, 5);
  c.Agent("s2").probe = ProbeOutcome::kRefused;
  c.Agent("s2").beats = false;
  c.Disconnect("s2");
  EXPECT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.Advance(Seconds(30));
  EXPECT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.AddServer("s3");
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 2u);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(5), Generation(1)}));
}

TEST(Capacity, LosingTheLastHolderWhileWaitingRaisesTheGeneration) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 2));
  c.StepTo(job, 5);
  c.Agent("s2").probe = ProbeOutcome::kRefused;
  c.Agent("s2").beats = false;
  c.Disconnect("s2");
  ASSERT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.KillRank(job, 0);
  EXPECT_EQ(c.Fenced(job), 3u);
  c.AddServer("s3");
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Entry(job).recovery_point.step, Step(0));
}

TEST(Capacity, AServerWhoseStandbyDidNotJoinIsTriedAgainWhenThereIsNoOther) {
  Policy policy;
  policy.process_start_timeout = Seconds(5);
  FakeCluster c(policy);
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 1));
  c.StepTo(job, 5);
  c.Agent("s2").probe = ProbeOutcome::kRefused;
  c.Agent("s2").beats = false;
  c.Disconnect("s2");
  ASSERT_EQ(c.Places(job).size(), 1u);
  c.StepTo(job, 6);
  c.Agent("s2").joins = false;
  c.Agent("s2").beats = true;
  c.RestartAgent("s2");
  c.Advance(Seconds(6));
  ASSERT_GE(c.Count("notice Standby did not reach Join"), 1);
  c.Agent("s2").joins = true;
  c.Advance(Seconds(10));
  c.LeaveAtBoundary(job, 7);
  EXPECT_EQ(c.Places(job).size(), 2u);
}

TEST(Capacity, AStandbyThatKeepsDyingIsStartedWithGrowingPauses) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 1));
  c.StepTo(job, 1);
  for (int i = 0; i < 40; ++i) {
    for (const auto& [id, p] : std::map<ProcessId, FakeProcess>(c.Agent("s2").processes)) {
      if (p.spawn.standby) c.Exit(id, 1);
    }
    c.Advance(Milliseconds(100));
  }
  EXPECT_LE(c.Count("s2 Spawn standby"), 12);
  EXPECT_EQ(c.Fenced(job), 1u);
}

}  // namespace
}  // namespace everstep::testing
