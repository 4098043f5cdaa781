// Failures of the program itself, cancellation, several jobs, opaque jobs, snapshots.
#include <gtest/gtest.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

void Refuse(FakeCluster& c, const std::string& server) {
  c.Agent(server).probe = ProbeOutcome::kRefused;
  c.Agent(server).beats = false;
  c.Disconnect(server);
}

// ---- the program's own failures

TEST(UserErrors, TheSameFailureTwiceAtOneStepEndsTheJobWithItsCode) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 1).id, 3);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  c.Exit(c.RankOf(job, 1).id, 3);
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_EQ(c.Entry(job).ended->reason, Reason::kUserError);
  EXPECT_EQ(c.Entry(job).ended->exit_code, 3);
}

TEST(UserErrors, TheSameFailureAtAnotherStepIsFailedOver) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 1).id, 3);
  c.StepTo(job, 9);
  c.Exit(c.RankOf(job, 1).id, 3);
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(UserErrors, ACrashOnTwoServersEndsTheJob) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 1).id, 0, 11);
  ASSERT_EQ(c.State(job), JobState::kRunning);
  c.Exit(c.RankOf(job, 1).id, 0, 11);
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_EQ(c.Entry(job).ended->reason, Reason::kSameFailureTwice);
  EXPECT_EQ(c.Entry(job).ended->exit_code, static_cast<int32_t>(JobExit::kUserSignal));
}

TEST(UserErrors, MoreFailuresThanAllowedEndTheJob) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("train", 2);
  spec.restarts_max = 2;
  const JobUid job = c.Run(spec);
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(c.State(job), JobState::kRunning);
    c.StepTo(job, i);
    c.Exit(c.RankOf(job, 1).id, i);
  }
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_EQ(c.Entry(job).ended->reason, Reason::kRestartsExhausted);
  EXPECT_EQ(c.Entry(job).ended->exit_code, 3);
}

TEST(UserErrors, ExitZeroWithoutFinishingIsNoSuccess) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("train", 2);
  spec.restarts_max = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  c.Exit(c.RankOf(job, 1).id, 0);
  EXPECT_EQ(c.State(job), JobState::kFailed);
  EXPECT_NE(c.Entry(job).ended->exit_code, 0);
}

TEST(UserErrors, BeingKilledFromOutsideIsNotTheProgramsFault) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("train", 2);
  spec.restarts_max = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 5);
  for (int i = 0; i < 4; ++i) {
    c.KillRank(job, 1);
    ASSERT_EQ(c.State(job), JobState::kRunning);
  }
  EXPECT_EQ(c.Entry(job).failures, 0);
}

// ---- cancel, in each stage

struct Stage {
  const char* name;
  bool joins, collects, readies;
};

class Cancelling : public ::testing::TestWithParam<Stage> {};

TEST_P(Cancelling, ReleasesEveryDevice) {
  const Stage& stage = GetParam();
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 5);
  for (const auto& s : {"s1", "s2", "s3"}) {
    c.Agent(s).joins = stage.joins;
    c.Agent(s).collects = stage.collects;
    c.Agent(s).readies = stage.readies;
  }
  if (!stage.joins || !stage.collects || !stage.readies) {
    if (!stage.joins) Refuse(c, "s3");
    c.KillRank(job, 1);
    ASSERT_EQ(c.State(job), JobState::kRecovering);
  }
  const ReplyToOperator reply = c.Cancel("train");
  EXPECT_EQ(reply.message, "job/train cancelled");
  EXPECT_EQ(c.State(job), JobState::kCancelled);
  EXPECT_EQ(c.Entry(job).ended->exit_code, static_cast<int32_t>(JobExit::kCancelled));
  for (const auto& s : {"s1", "s2"}) {
    EXPECT_TRUE(c.Agent(s).processes.empty());
    EXPECT_EQ(c.Server(s).devices_free, 1);
  }
  c.Advance(Seconds(100));
  EXPECT_EQ(c.State(job), JobState::kCancelled);
  EXPECT_TRUE(c.Cancel("train").status.ok()) << "it is so already";
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).joins = c.Agent(s).collects = c.Agent(s).readies = true;
  EXPECT_EQ(c.State(c.Run(Spec("train", 2))), JobState::kRunning) << "the name is free again";
}

INSTANTIATE_TEST_SUITE_P(EachStage, Cancelling,
                         ::testing::Values(Stage{"Running", true, true, true}, Stage{"Gathering", false, true, true},
                                           Stage{"Collecting", true, false, true}, Stage{"Restoring", true, true, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CancellingMore, WhileWaitingForCapacity) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid job = c.Run(Spec("train", 2, 2));
  Refuse(c, "s2");
  ASSERT_EQ(c.State(job), JobState::kWaitingForCapacity);
  c.Cancel("train");
  EXPECT_EQ(c.State(job), JobState::kCancelled);
  EXPECT_TRUE(c.Agent("s1").processes.empty());
}

TEST(CancellingMore, WhileASwitchIsPending) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 2);
  c.Drain("s1");
  c.Cancel(job.value);
  EXPECT_EQ(c.State(job), JobState::kCancelled);
}

TEST(CancellingMore, UnknownAndEndedJobsAreNamed) {
  FakeCluster c;
  c.AddServers(1);
  EXPECT_EQ(c.Cancel("nothing").status.code(), StatusCode::kNotFound);
  const JobUid job = c.Run(Spec("train", 1));
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  EXPECT_EQ(c.Cancel("train").status.code(), StatusCode::kFailedPrecondition);
}

TEST(CancellingMore, EndedJobsLeaveTheLedgerOldestFirst) {
  FakeCluster c;
  c.AddServers(1);
  for (int i = 0; i < 105; ++i) {
    c.Run(Spec("train", 1));
    c.Cancel("train");
  }
  EXPECT_LE(c.ledger().jobs.size(), 102u);
  EXPECT_GE(c.Count("append JobForgotten"), 3);
}

// ---- several jobs

TEST(SeveralJobs, AWaitingJobStartsWhenAnotherEnds) {
  FakeCluster c;
  c.AddServers(2);
  const JobUid first = c.Run(Spec("first", 2, 2));
  const JobUid second = c.Run(Spec("second", 1));
  c.Advance(Seconds(1));
  EXPECT_EQ(c.State(second), JobState::kPending);
  c.Cancel("first");
  EXPECT_EQ(c.State(second), JobState::kRunning);
  EXPECT_EQ(c.State(first), JobState::kCancelled);
}

TEST(SeveralJobs, TheHigherPriorityTakesTheIdleStandbyOfTheLower) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec low = Spec("low", 1);
  const JobUid a = c.Run(low);
  c.StepTo(a, 1);
  JobSpec high = Spec("high", 1);
  high.priority = 5;
  high.standbys_wanted = 0;
  const JobUid b = c.Run(high);
  c.StepTo(b, 1);
  // The third server holds low's standby; high loses its server.
  std::string spare;
  for (const auto& s : {"s1", "s2", "s3"}) {
    if (s != c.Places(a)[0] && s != c.Places(b)[0]) spare = s;
  }
  Refuse(c, c.Places(b)[0]);
  c.Advance(Seconds(2));
  EXPECT_EQ(c.State(b), JobState::kRunning);
  EXPECT_EQ(c.Places(b)[0], spare);
  EXPECT_EQ(c.Fenced(a), 1u) << "the lower job goes on without its standby";
}

TEST(SeveralJobs, TwoJobsThatLoseARankAtOnceDoNotTakeOneSpareTwice) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("older", 1);
  spec.standbys_wanted = 0;
  const JobUid a = c.Run(spec);
  spec.name = "younger";
  const JobUid b = c.Run(spec);
  c.StepTo(a, 1);
  c.StepTo(b, 1);
  ASSERT_NE(c.Places(a)[0], c.Places(b)[0]);
  const std::string lost_b = c.Places(b)[0], lost_a = c.Places(a)[0];
  Refuse(c, lost_a);
  Refuse(c, lost_b);
  c.Advance(Seconds(2));
  EXPECT_EQ(c.State(a), JobState::kRunning);
  EXPECT_EQ(c.State(b), JobState::kWaitingForCapacity);
  c.AddServer("s4");
  c.Advance(Seconds(1));
  EXPECT_EQ(c.State(b), JobState::kRunning);
}

// Both lose a server in one window while the spare is there; the one with the lower claim could plan first.
struct OneWindow {
  FakeCluster c;
  JobUid first, second;  // in the order of their submission
  OneWindow(JobSpec a, JobSpec b) {
    c.AddServers(4);
    first = c.Run(std::move(a));
    second = c.Run(std::move(b));
    c.AddServer("spare");
    c.StepTo(first, 1);
    c.StepTo(second, 1);
  }
  // `slow`'s survivor answers Collect last.
  void LoseOneEach(const JobUid& slow) {
    const std::string last = c.Places(slow)[0], fast = c.Places(slow == first ? second : first)[0];
    const std::string lost_first = c.Places(first)[1], lost_second = c.Places(second)[1];
    for (const std::string& survivor : {last, fast}) c.Agent(survivor).hears = false;
    Refuse(c, lost_first);
    Refuse(c, lost_second);
    c.Wake(fast);
    c.Advance(Milliseconds(100));
    c.Wake(last);
    c.Advance(Milliseconds(100));
  }
  std::string Decision(const JobUid& job) {
    for (const RecoveryRecord& r : c.core().MakeView({c.now(), {}}).recoveries) {
      if (r.job == job && r.from.value > 0) return r.decision_message;
    }
    return "";
  }
};

JobSpec Competing(const std::string& name, int priority, int standbys, int min) {
  JobSpec spec = Spec(name, 2, min);
  spec.priority = priority;
  spec.standbys_wanted = standbys;
  return spec;
}

TEST(OneWindow, TheHigherPriorityGetsTheFreeSpareAlthoughTheOtherAnswersFirst) {
  OneWindow w(Competing("low", 0, 0, 1), Competing("high", 5, 0, 1));
  w.LoseOneEach(w.second);
  EXPECT_EQ(w.c.Places(w.second), (std::map<int, std::string>{{0, "s3"}, {1, "spare"}}));
  EXPECT_EQ(w.c.Places(w.first).size(), 1u) << "exactly one gets it";
  EXPECT_NE(w.Decision(w.first).find("the claim of job high is higher (priority, then age)"), std::string::npos)
      << w.Decision(w.first);
}

TEST(OneWindow, TheHigherPriorityGetsTheSpareAlthoughItIdlesAsTheOthersStandby) {
  OneWindow w(Competing("low", 0, 1, 1), Competing("high", 5, 0, 1));
  ASSERT_EQ(w.c.Server("spare").ranks.size(), 1u);
  w.LoseOneEach(w.second);
  EXPECT_EQ(w.c.Places(w.second)[1], "spare");
  EXPECT_EQ(w.c.Places(w.first).size(), 1u);
  EXPECT_NE(w.Decision(w.first).find("the claim of job high is higher"), std::string::npos) << w.Decision(w.first);
}

TEST(OneWindow, AtEqualPriorityTheOlderGetsItAndBothRecordsSayWhy) {
  OneWindow w(Competing("older", 0, 0, 2), Competing("younger", 0, 1, 2));
  w.LoseOneEach(w.first);
  EXPECT_EQ(w.c.State(w.first), JobState::kRunning);
  EXPECT_EQ(w.c.Places(w.first)[1], "spare");
  EXPECT_EQ(w.c.State(w.second), JobState::kWaitingForCapacity);
  EXPECT_NE(w.Decision(w.first).find("job younger lacks ranks, too, and its claim is lower"), std::string::npos)
      << w.Decision(w.first);
  EXPECT_NE(w.c.View(w.second).message.find("the claim of job older is higher"), std::string::npos)
      << w.c.View(w.second).message;
}

TEST(OneWindow, APlanThatIsNotAssignedYetYieldsItsSpareToAHigherClaim) {
  OneWindow w(Competing("low", 0, 0, 1), Competing("high", 5, 0, 1));
  w.c.Agent("spare").joins = false;  // low's process is being started there
  Refuse(w.c, w.c.Places(w.first)[1]);
  ASSERT_EQ(w.c.View(w.first).phase, RecoveryPhase::kPlan);
  w.c.Agent("spare").joins = true;
  Refuse(w.c, w.c.Places(w.second)[1]);
  w.c.Advance(Milliseconds(100));
  EXPECT_EQ(w.c.Places(w.second)[1], "spare");
  EXPECT_EQ(w.c.Places(w.first).size(), 1u);
  EXPECT_EQ(w.c.State(w.first), JobState::kRunning) << "it shrinks in the same generation";
  EXPECT_EQ(w.c.Fenced(w.first), 2u);
  EXPECT_NE(w.Decision(w.first).find("the claim of job high is higher"), std::string::npos) << w.Decision(w.first);
  EXPECT_NE(w.Decision(w.second).find("job low"), std::string::npos) << w.Decision(w.second);
}

TEST(OneWindow, AnAssignedSpareIsNotTakenBack) {
  OneWindow w(Competing("low", 0, 0, 1), Competing("high", 5, 0, 1));
  w.c.Agent("spare").connects = false;
  Refuse(w.c, w.c.Places(w.first)[1]);
  ASSERT_EQ(w.c.View(w.first).phase, RecoveryPhase::kConnect);
  Refuse(w.c, w.c.Places(w.second)[1]);
  w.c.Advance(Milliseconds(100));
  EXPECT_EQ(w.c.Places(w.first)[1], "spare");
  EXPECT_EQ(w.c.Places(w.second).size(), 1u);
}

TEST(OneWindow, AHigherJobWithItsOwnStandbyLeavesTheOthersAlone) {
  OneWindow w(Competing("low", 0, 1, 1), Competing("high", 5, 1, 1));
  w.c.AddServer("spare2");
  w.c.StepTo(w.first, 2);
  w.c.StepTo(w.second, 2);
  ASSERT_EQ(w.c.Server("spare").ranks.size() + w.c.Server("spare2").ranks.size(), 2u);
  w.LoseOneEach(w.second);
  EXPECT_EQ(w.c.Places(w.first).size(), 2u);
  EXPECT_EQ(w.c.Places(w.second).size(), 2u);
}

TEST(SeveralJobs, AReservedSpareIsLeftToItsJob) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec keeper = Spec("keeper", 1);
  keeper.spares_reserved = 1;
  keeper.standbys_wanted = 0;
  const JobUid a = c.Run(keeper);
  JobSpec other = Spec("other", 2, 1);
  other.standbys_wanted = 0;
  const JobUid b = c.Run(other);
  c.Advance(Seconds(1));
  EXPECT_EQ(c.Places(b).size(), 1u);
  c.StepTo(a, 1);
  Refuse(c, c.Places(a)[0]);
  c.Advance(Seconds(1));
  EXPECT_EQ(c.State(a), JobState::kRunning);
}

// ---- opaque jobs

TEST(OpaqueJobs, KnowTheirPlaceBeforeTheyStart) {
  FakeCluster c;
  c.AddServers(2, 2);
  JobSpec spec = Spec("script", 2);
  spec.opaque = true;
  spec.ranks_per_server = 2;
  const JobUid job = c.Run(spec);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  std::set<int> ranks;
  int port = 0;
  for (const auto& s : c.sent()) {
    const auto* spawn = std::get_if<SpawnProcess>(&s.command);
    if (spawn == nullptr) continue;
    ranks.insert(spawn->rank.value);
    EXPECT_EQ(spawn->world_size, 4);
    EXPECT_EQ(spawn->local_world_size, 2);
    EXPECT_EQ(spawn->master_address, c.Agent(c.Places(job)[0]).inventory.host);
    if (port == 0) port = spawn->master_port;
    EXPECT_EQ(spawn->master_port, port);
  }
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3}));
}

TEST(OpaqueJobs, ALossKillsAllAndStartsAllAgainOnlyAfterTheyAreReaped) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("script", 2);
  spec.opaque = true;
  const JobUid job = c.Run(spec);
  c.Agent("s1").reaps = false;
  c.ClearTrace();
  c.KillRank(job, 1);
  EXPECT_EQ(c.Count("s1 Kill"), 1);
  EXPECT_EQ(c.Count("Spawn"), 0);
  c.Agent("s1").reaps = true;
  c.Exit(c.Agent("s1").processes.begin()->first, 0, 9);
  EXPECT_EQ(c.Count("Spawn"), 2);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 2u);
}

TEST(OpaqueJobs, ARankThatFinishesWhileTheOthersAreKilledDoesNotHangTheRecovery) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("script", 3);
  spec.opaque = true;
  const JobUid job = c.Run(spec);
  c.Agent("s1").reaps = c.Agent("s2").reaps = false;
  const auto rank0 = c.RankOf(job, 0), rank1 = c.RankOf(job, 1);
  c.KillRank(job, 2);
  c.Exit(rank0.id, 0, 9);
  c.Exit(rank1.id, 0, 0, true);  // it was done before the kill came
  c.Advance(Seconds(5));
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Fenced(job), 2u);
}

TEST(OpaqueJobs, ALossBeforeAllHaveStartedStartsEveryoneForANewPlan) {
  FakeCluster c;
  c.AddServers(3);
  c.Agent("s2").starts = false;
  JobSpec spec = Spec("script", 2);
  spec.opaque = true;
  const JobUid job = c.Run(spec);
  ASSERT_EQ(c.State(job), JobState::kStarting);
  Refuse(c, "s2");
  EXPECT_EQ(c.State(job), JobState::kRunning);
  const auto places = c.Places(job);
  for (const auto& m : c.Members(job)) {
    EXPECT_EQ(m.process->spawn.generation, c.Entry(job).fenced) << "nobody runs with the environment of the old plan";
    EXPECT_EQ(m.server, places.at(m.process->spawn.rank.value));
  }
  EXPECT_EQ(c.Members(job).size(), 2u);
}

TEST(OpaqueJobs, FinishWhenEveryProcessEndedWell) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("script", 2);
  spec.opaque = true;
  const JobUid job = c.Run(spec);
  c.Exit(c.RankOf(job, 0).id, 0, 0, true);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  c.Exit(c.RankOf(job, 1).id, 0, 0, true);
  EXPECT_EQ(c.State(job), JobState::kSucceeded);
}

// ---- snapshots

TEST(Snapshots, AreCopiedToAnotherDomainAndRaiseTheWatermark) {
  FakeCluster c;
  c.AddServer("s1", 1, "rack1");
  c.AddServer("s2", 1, "rack1");
  c.AddServer("s3", 1, "rack2");
  JobSpec spec = Spec("train", 1);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  ASSERT_EQ(c.Places(job)[0], "s1");
  c.StepTo(job, 4);
  c.ClearTrace();
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("s3 Copy (4,1) shard 0 from s1"), 1);
  EXPECT_EQ(c.Count("s1 Protected 4"), 1);
  EXPECT_EQ(c.View(job).protected_step, Step(4));
}

TEST(Snapshots, ACopyInsideTheDomainDoesNotProtectWhenTheJobHasAnotherDomain) {
  FakeCluster c;
  c.AddServer("s1", 1, "rack1");
  c.AddServer("s2", 1, "rack2");
  c.AddServer("s3", 1, "rack1");
  JobSpec spec = Spec("train", 2);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Drain("s2");  // takes no copies now
  c.ClearTrace();
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("s3 Copy (4,1) shard 0 from s1"), 1) << "better than none";
  EXPECT_EQ(c.View(job).protected_step, Step(0));
  c.Drain("s2", false);
  c.Hold("s1", job, {Step(5), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("s2 Copy (4,1) shard 0 from s1"), 1);
  EXPECT_EQ(c.Count("s2 Copy (5,1) shard 0 from s1"), 1);
  EXPECT_EQ(c.View(job).protected_step, Step(5));
  EXPECT_FALSE(c.View(job).one_domain);
}

TEST(Snapshots, InTheOnlyDomainACopyOnAnotherServerCountsAndIsSaid) {
  FakeCluster c;
  for (const char* name : {"s1", "s2", "s3"}) c.AddServer(name, 1, "rack1");
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 4);
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.View(job).protected_step, Step(4));
  EXPECT_TRUE(c.View(job).one_domain);
}

TEST(Snapshots, ACopyAskedOfAPeerThatDiesIsAskedOfAnother) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 1);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Agent("s2").copies = false;  // it has not got round to it
  c.ClearTrace();
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  ASSERT_EQ(c.Count("s2 Copy (4,1)"), 1);
  ASSERT_EQ(c.View(job).protected_step, Step(0));
  Refuse(c, "s2");
  EXPECT_EQ(c.Count("s3 Copy (4,1)"), 1);
  EXPECT_EQ(c.View(job).protected_step, Step(4));
}

TEST(Snapshots, ACopyThatAPeerCannotMakeIsAskedOfEachOtherOnce) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 1);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  for (const char* name : {"s2", "s3", "s4"}) c.Agent(name).copies_fail = true;
  c.ClearTrace();
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  for (const char* name : {"s2", "s3", "s4"}) EXPECT_EQ(c.Count(std::string(name) + " Copy (4,1)"), 1);
  EXPECT_EQ(c.View(job).protected_step, Step(0));
  c.AddServer("s5");
  EXPECT_EQ(c.View(job).protected_step, Step(4)) << "whoever comes later is asked, too";
}

TEST(Snapshots, ACopyRequestThatWasLostWithAStreamIsRepeated) {
  FakeCluster c;
  c.AddServers(2);
  JobSpec spec = Spec("train", 1);
  spec.standbys_wanted = 0;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Agent("s2").hears = false;
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  ASSERT_EQ(c.View(job).protected_step, Step(0));
  c.Disconnect("s2");
  c.Agent("s2").hears = true;
  c.Connect("s2");
  EXPECT_EQ(c.View(job).protected_step, Step(4));
}

TEST(Snapshots, OfAPipelineProtectOnlyWhenEveryShardHasACopy) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("train", 2);
  spec.pipeline_stages = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.View(job).protected_step, Step(0));
  c.Hold("s2", job, {Step(4), Generation(1)}, 1, SnapshotTier::kStaged);
  EXPECT_EQ(c.View(job).protected_step, Step(4));
}

TEST(Snapshots, AManifestCommitsWhenEveryShardOfOneStateIsStored) {
  FakeCluster c;
  c.AddServers(3);
  JobSpec spec = Spec("train", 2);
  spec.pipeline_stages = 2;
  spec.persist_interval_steps = 4;
  spec.checkpoints_kept = 1;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Hold("s1", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("append ManifestCommitted"), 0);
  c.Hold("s2", job, {Step(4), Generation(1)}, 1, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("append ManifestCommitted (4,1)"), 1);
  c.StepTo(job, 8);
  c.Hold("s1", job, {Step(8), Generation(1)}, 0, SnapshotTier::kStaged);
  c.Hold("s2", job, {Step(8), Generation(1)}, 1, SnapshotTier::kStaged);
  EXPECT_EQ(c.Count("append ManifestCommitted (8,1)"), 1);
  EXPECT_EQ(c.Count("append ManifestDropped (4,1)"), 1);
  EXPECT_EQ(c.Entry(job).manifests.size(), 1u);
}

TEST(Snapshots, AShardThatIsOffTheChainMakesNoManifest) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.pipeline_stages = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 4);
  c.Agent("s3").copies = c.Agent("s4").copies = c.Agent("s1").copies = c.Agent("s2").copies = false;
  c.Hold("s3", job, {Step(2), Generation(1)}, 0, SnapshotTier::kPeer);
  c.Hold("s3", job, {Step(2), Generation(1)}, 1, SnapshotTier::kPeer);
  c.Hold("s3", job, {Step(4), Generation(1)}, 0, SnapshotTier::kStored);
  // Stage 1 loses its only holder of step 4: the job goes back to 2.
  c.KillRank(job, 1);
  ASSERT_EQ(c.Entry(job).recovery_point, (StateId{Step(2), Generation(1)}));
  c.Hold("s4", job, {Step(4), Generation(1)}, 1, SnapshotTier::kStored);
  EXPECT_EQ(c.Count("append ManifestCommitted"), 0);
  EXPECT_TRUE(c.Agent("s4").snapshots.empty()) << "it is dropped";
}

TEST(Snapshots, OfADeadServerAreNoSource) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 1));
  c.StepTo(job, 6);
  for (const auto& s : {"s1", "s2", "s3"}) c.Agent(s).copies = false;
  c.Hold("s2", job, {Step(3), Generation(1)}, 0, SnapshotTier::kPeer);
  c.Hold("s3", job, {Step(5), Generation(1)}, 0, SnapshotTier::kPeer);
  Refuse(c, "s3");
  c.KillRank(job, 0);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(3), Generation(1)}));
}

TEST(Snapshots, TwoStagesMixMemoryAndSnapshotsOfOneState) {
  FakeCluster c;
  c.AddServers(4);
  JobSpec spec = Spec("train", 2);
  spec.pipeline_stages = 2;
  const JobUid job = c.Run(spec);
  c.StepTo(job, 6);
  c.Hold("s4", job, {Step(6), Generation(1)}, 1, SnapshotTier::kPeer);
  c.KillRank(job, 1);
  EXPECT_EQ(c.Entry(job).recovery_point, (StateId{Step(6), Generation(1)}));
  EXPECT_EQ(c.Entry(job).assignment->ranks[0].action, RestoreAction::kKeep);
  EXPECT_EQ(c.Entry(job).assignment->ranks[1].action, RestoreAction::kFetchFromSnapshot);
}

}  // namespace
}  // namespace everstep::testing
