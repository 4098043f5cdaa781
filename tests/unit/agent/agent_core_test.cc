#include "worker/core/agent/agent_core.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <functional>
#include <set>

#include "worker/core/agent/environment.h"

namespace everstep {
namespace {

const JobUid kJob("job-1");

// Drives one core as its shell would; keeps the effects of the newest Step.
class AgentCoreTest : public ::testing::Test {
 protected:
  AgentCoreTest() : core_(std::make_unique<AgentCore>(Inventory(), Policy(), 42)) {}

  static ServerInventory Inventory() {
    ServerInventory inventory;
    inventory.server = ServerId("s01");
    inventory.host = "10.0.0.1";
    return inventory;
  }
  static AgentPolicy Policy() {
    AgentPolicy policy;
    policy.outbox_facts_max = 40;
    policy.outbox_progress_facts_max = 10;
    policy.processes_max = 8;
    policy.gone_processes_max = 16;
    policy.connections_max = 8;
    policy.lines_per_second_max = 5;
    return policy;
  }

  const AgentEffects& Feed(AgentEvent event) {
    effects_ = core_->Step(event, now_);
    for (const AgentEffect& effect : effects_) {
      if (const auto* sent = std::get_if<SendFact>(&effect)) last_fact_ = sent->sequence;
    }
    return effects_;
  }
  const AgentEffects& Command_(Command command) {
    return Feed(CommandArrived{{term_, CommandSequence(++sequence_)}, std::move(command)});
  }
  void Advance(Duration by) {
    now_ += by;
    Feed(AgentTimeAdvanced{});
  }
  void LinkUp() {
    sequence_ = 0;
    Feed(ControllerLinkUp{});
  }
  void Register(uint64_t incarnation = 1, std::vector<ProcessId> keep = {}) {
    LinkUp();
    Welcome welcome;
    welcome.incarnation = Incarnation(incarnation);
    welcome.keep = std::move(keep);
    Command_(welcome);
  }

  SpawnProcess Spawn(uint64_t process, int device = 0) {
    SpawnProcess spawn;
    spawn.job = kJob;
    spawn.process = ProcessId(process);
    spawn.device = DeviceIndex(device);
    spawn.spec.program = "/bin/true";
    spawn.spec.termination_grace = Seconds(3);
    return spawn;
  }
  // A running process without a connection.
  void Run(uint64_t process, int device = 0, bool opaque = false) {
    SpawnProcess spawn = Spawn(process, device);
    spawn.spec.opaque = opaque;
    spawn.generation = Generation(opaque ? 3 : 0);
    Command_(spawn);
    Feed(ProcessSpawned{ProcessId(process), PidOf(process)});
  }
  // A running process that said RankHello on connection 100 + process.
  void Connect(uint64_t process, int device = 0) {
    Run(process, device);
    Feed(RankSocketOpened{ConnectionOf(process), PidOf(process), PidOf(process)});
    Say(process, Hello(process));
  }
  void Join(uint64_t process, int device = 0) {
    Connect(process, device);
    Say(process, RankJoin{});
  }
  const AgentEffects& Say(uint64_t process, RankToAgent message) {
    return Feed(RankMessageArrived{ConnectionOf(process), std::move(message)});
  }
  const AgentEffects& Die(uint64_t process, int exit_code = 0, int signal = SIGKILL) {
    ProcessExitedObserved exited;
    exited.process = ProcessId(process);
    exited.exit_code = exit_code;
    exited.signal = signal;
    exited.noticed = now_;
    return Feed(exited);
  }
  static RankHello Hello(uint64_t process) {
    RankHello hello;
    hello.process = ProcessId(process);
    hello.pid = PidOf(process);
    hello.mesh_address = "10.0.0.1:5000";
    return hello;
  }
  static int64_t PidOf(uint64_t process) { return static_cast<int64_t>(7000 + process); }
  static Connection ConnectionOf(uint64_t process) { return Connection(100 + process); }
  static CollectAnswer Answer(uint64_t generation, bool planned = false) {
    CollectAnswer answer;
    answer.generation = Generation(generation);
    answer.report.memory_valid = true;
    answer.report.applied = {Step(5), Generation(1)};
    answer.planned = planned;
    return answer;
  }
  Assignment MakeAssignment(uint64_t generation, std::vector<uint64_t> processes) {
    Assignment assignment;
    assignment.job = kJob;
    assignment.generation = Generation(generation);
    for (size_t i = 0; i < processes.size(); ++i) {
      RankAssignment rank;
      rank.rank = Rank(static_cast<int32_t>(i));
      rank.process = ProcessId(processes[i]);
      assignment.ranks.push_back(rank);
    }
    return assignment;
  }
  FenceProcesses Fence(uint64_t generation, std::vector<uint64_t> processes) {
    FenceProcesses fence{kJob, Generation(generation), {}};
    for (uint64_t p : processes) fence.processes.push_back(ProcessId(p));
    return fence;
  }

  template <typename T>
  std::vector<T> All() const {
    std::vector<T> found;
    for (const AgentEffect& effect : effects_) {
      if (const auto* e = std::get_if<T>(&effect)) found.push_back(*e);
    }
    return found;
  }
  template <typename T>
  std::vector<T> Facts() const {
    std::vector<T> found;
    for (const SendFact& sent : All<SendFact>()) {
      if (const auto* fact = std::get_if<T>(&sent.fact)) found.push_back(*fact);
    }
    return found;
  }
  template <typename T>
  std::vector<T> ToRank(uint64_t process) const {
    std::vector<T> found;
    for (const SendToRank& sent : All<SendToRank>()) {
      const auto* message = std::get_if<T>(&sent.message);
      if (message != nullptr && sent.connection == ConnectionOf(process)) found.push_back(*message);
    }
    return found;
  }
  std::vector<std::pair<uint64_t, int>> Signals() const {
    std::vector<std::pair<uint64_t, int>> found;
    for (const SignalProcess& s : All<SignalProcess>()) found.emplace_back(s.process.value, s.signal);
    return found;
  }
  bool Alive(uint64_t process) const {
    for (const ProcessStatus& status : core_->ListProcesses()) {
      if (status.process == ProcessId(process)) return true;
    }
    return false;
  }
  ProcessStatus StatusOf(uint64_t process) const {
    for (const ProcessStatus& status : core_->ListProcesses()) {
      if (status.process == ProcessId(process)) return status;
    }
    return {};
  }

  using Sent = std::vector<std::pair<uint64_t, int>>;
  std::unique_ptr<AgentCore> core_;
  Instant now_{Seconds(1000)};
  Term term_{7};
  uint64_t sequence_ = 0;
  FactSequence last_fact_;
  AgentEffects effects_;
};

// ---- registration

TEST_F(AgentCoreTest, SaysHelloOnEachNewStream) {
  LinkUp();
  ASSERT_EQ(All<SayHello>().size(), 1u);
  const uint64_t nonce = All<SayHello>()[0].hello.start_nonce;
  EXPECT_EQ(All<SayHello>()[0].hello.incarnation, Incarnation(0));
  Register(4);
  Feed(ControllerLinkDown{"reset"});
  LinkUp();
  EXPECT_EQ(All<SayHello>()[0].hello.start_nonce, nonce);
  EXPECT_EQ(All<SayHello>()[0].hello.incarnation, Incarnation(4));
  EXPECT_EQ(All<SayHello>()[0].hello.highest_term, term_);
}

TEST_F(AgentCoreTest, WelcomeStartsHeartbeats) {
  Register();
  EXPECT_EQ(All<StartHeartbeats>().size(), 1u);
  EXPECT_TRUE(core_->registered());
}

TEST_F(AgentCoreTest, OpensTheStreamAgainWhenRegistrationIsNotAnswered) {
  LinkUp();
  EXPECT_EQ(core_->NextDeadline(), now_ + Policy().hello_timeout);
  Advance(Policy().hello_timeout);
  ASSERT_EQ(All<CloseControllerLink>().size(), 1u);
  EXPECT_TRUE(All<CloseControllerLink>()[0].reopen);
  EXPECT_EQ(core_->NextDeadline(), kNever);
}

TEST_F(AgentCoreTest, RefusesCommandsOfALowerTerm) {
  Register();
  term_ = Term(6);
  Command_(Spawn(1));
  EXPECT_TRUE(All<StartProcess>().empty());
  EXPECT_EQ(core_->counts().stale_term, 1u);
  term_ = Term(8);
  Command_(Spawn(1));
  EXPECT_EQ(All<StartProcess>().size(), 1u);
  EXPECT_EQ(core_->highest_term(), Term(8));
}

TEST_F(AgentCoreTest, RefusesCommandsReplayedWithinAStream) {
  Register();
  Command_(Spawn(1));
  Feed(CommandArrived{{term_, CommandSequence(sequence_)}, KillProcess{kJob, ProcessId(1), {}}});
  Feed(ProcessSpawned{ProcessId(1), PidOf(1)});
  EXPECT_TRUE(Signals().empty());
  EXPECT_EQ(core_->counts().replayed, 1u);
  EXPECT_EQ(core_->acted(), CommandSequence(sequence_));
}

TEST_F(AgentCoreTest, RefusesCommandsBeforeWelcome) {
  LinkUp();
  Command_(Spawn(1));
  EXPECT_TRUE(All<StartProcess>().empty());
  EXPECT_FALSE(Alive(1));
}

TEST_F(AgentCoreTest, KillsEverythingWhenItsIncarnationWasDeclaredDead) {
  Register(1);
  Join(1, 0);
  Join(2, 1);
  Feed(ControllerLinkDown{"gone"});
  Register(2, {ProcessId(1), ProcessId(2)});  // even those it may keep: they belong to the dead incarnation
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}, {2, SIGKILL}}));
  // Before a word is said under the new incarnation.
  const auto first = [this](auto test) {
    return std::find_if(effects_.begin(), effects_.end(), test) - effects_.begin();
  };
  EXPECT_LT(first([](const AgentEffect& e) { return std::holds_alternative<SignalProcess>(e); }),
            first([](const AgentEffect& e) { return std::holds_alternative<StartHeartbeats>(e); }));
  EXPECT_EQ(core_->incarnation(), Incarnation(2));
}

TEST_F(AgentCoreTest, KeepsOnlyWhatTheControllerKnows) {
  Register(1);
  Join(1, 0);
  Join(2, 1);
  Feed(ControllerLinkDown{"gone"});
  EXPECT_TRUE(Signals().empty());
  Register(1, {ProcessId(2)});
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
}

TEST_F(AgentCoreTest, ComesBackWithAFreshNonceAfterItsIncarnationIsRefused) {
  Register(1);
  const uint64_t nonce = [this] {
    LinkUp();
    return All<SayHello>()[0].hello.start_nonce;
  }();
  Welcome welcome;
  welcome.incarnation = Incarnation(1);
  Command_(welcome);
  Join(1);
  Command_(Refuse{"incarnation 1 is dead", false});
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
  ASSERT_EQ(All<CloseControllerLink>().size(), 1u);
  EXPECT_FALSE(All<CloseControllerLink>()[0].reopen);
  EXPECT_EQ(All<StopHeartbeats>().size(), 1u);
  Advance(Policy().refused_pause * 2);
  EXPECT_TRUE(All<OpenControllerLink>().empty()) << "its rank is not reaped yet";
  Die(1);
  Advance(Policy().refused_pause);
  ASSERT_EQ(All<OpenControllerLink>().size(), 1u);
  LinkUp();
  const AgentHello hello = All<SayHello>()[0].hello;
  EXPECT_NE(hello.start_nonce, nonce);
  EXPECT_EQ(hello.incarnation, Incarnation(0));
  EXPECT_TRUE(hello.processes.empty());
}

TEST_F(AgentCoreTest, ExitsWithCodeTwoWhenRefusedForGood) {
  Register();
  Join(1);
  Command_(Refuse{"the name s01 is taken", true});
  EXPECT_TRUE(All<ExitAgent>().empty());
  Die(1);
  ASSERT_EQ(All<ExitAgent>().size(), 1u);
  EXPECT_EQ(All<ExitAgent>()[0].code, 2);
  EXPECT_EQ(All<ExitAgent>()[0].message, "the name s01 is taken");
  EXPECT_TRUE(Feed(ControllerLinkUp{}).empty());
}

TEST_F(AgentCoreTest, AnswersProbes) {
  Register();
  Command_(Probe{77});
  ASSERT_EQ(Facts<ProbeReturned>().size(), 1u);
  EXPECT_EQ(Facts<ProbeReturned>()[0].nonce, 77u);
}

// ---- facts

TEST_F(AgentCoreTest, SendsFactsAgainUntilAcknowledged) {
  Register();
  Run(1);
  const FactSequence started = last_fact_;
  Feed(ControllerLinkDown{"gone"});
  Die(1, 3, 0);
  EXPECT_TRUE(All<SendFact>().empty());
  now_ += Seconds(2);
  Register(1);
  ASSERT_EQ(Facts<ProcessStarted>().size(), 1u);
  ASSERT_EQ(Facts<ProcessExited>().size(), 1u);
  EXPECT_EQ(Facts<ProcessExited>()[0].noticed_ago, Seconds(2));
  EXPECT_GT(last_fact_, started);
  Command_(AcknowledgeFacts{last_fact_});
  Register(1);
  EXPECT_TRUE(All<SendFact>().empty());
}

TEST_F(AgentCoreTest, KeepsNeededFactsWhenTheOutboxIsFull) {
  Register();
  Join(1);
  Command_(AcknowledgeFacts{last_fact_});
  Feed(ControllerLinkDown{"gone"});
  Say(1, Answer(5));
  for (int i = 0; i < 100; ++i) Say(1, MetricReported{Step(i), "loss", 1.0});
  for (int i = 0; i < 100; ++i) Feed(KeeperReported{SnapshotHeld{kJob, {}}});
  EXPECT_EQ(core_->outbox().size(), Policy().outbox_facts_max);
  EXPECT_GT(core_->outbox().dropped_count(), 100u);
  Register(1, {ProcessId(1)});
  EXPECT_EQ(Facts<ProcessCollected>().size(), 1u);
}

TEST_F(AgentCoreTest, DropsTheOldestMetricsFirst) {
  Register();
  Join(1);
  Feed(ControllerLinkDown{"gone"});
  for (int i = 0; i < 50; ++i) Say(1, MetricReported{Step(i), "loss", 1.0});
  Register(1, {ProcessId(1)});
  const auto metrics = Facts<MetricObserved>();
  ASSERT_EQ(metrics.size(), Policy().outbox_progress_facts_max);
  EXPECT_EQ(metrics.back().metric.step, Step(49));
  EXPECT_EQ(metrics.front().metric.step, Step(40));
}

// ---- processes

TEST_F(AgentCoreTest, SpawnsAProcessOnce) {
  Register();
  Command_(Spawn(1));
  EXPECT_EQ(All<StartProcess>().size(), 1u);
  Command_(Spawn(1));
  EXPECT_TRUE(All<StartProcess>().empty());
  Feed(ProcessSpawned{ProcessId(1), 71});
  ASSERT_EQ(Facts<ProcessStarted>().size(), 1u);
  Command_(Spawn(1));
  EXPECT_TRUE(All<StartProcess>().empty());
  EXPECT_EQ(Facts<ProcessStarted>().size(), 1u);
  Die(1, 4, 0);
  Command_(Spawn(1));
  EXPECT_TRUE(All<StartProcess>().empty());
  ASSERT_EQ(Facts<ProcessExited>().size(), 1u);
  EXPECT_EQ(Facts<ProcessExited>()[0].exit_code, 4);
}

TEST_F(AgentCoreTest, ReportsAProcessThatCouldNotStart) {
  Register();
  Command_(Spawn(1));
  Feed(SpawnFailed{ProcessId(1), Reason::kProgramMissing, "server s01: program /x: No such file"});
  ASSERT_EQ(Facts<ProcessStartFailed>().size(), 1u);
  EXPECT_EQ(Facts<ProcessStartFailed>()[0].reason, Reason::kProgramMissing);
  EXPECT_FALSE(Alive(1));
}

TEST_F(AgentCoreTest, RefusesProcessesBeyondItsLimit) {
  Register();
  for (uint64_t p = 1; p <= Policy().processes_max; ++p) Run(p, static_cast<int>(p));
  Command_(Spawn(99));
  ASSERT_EQ(Facts<ProcessStartFailed>().size(), 1u);
  EXPECT_EQ(Facts<ProcessStartFailed>()[0].reason, Reason::kNoCapacity);
}

TEST_F(AgentCoreTest, KillsAfterTheGrace) {
  Register();
  Run(1);
  Command_(KillProcess{kJob, ProcessId(1), Seconds(2)});
  EXPECT_EQ(Signals(), (Sent{{1, SIGTERM}}));
  EXPECT_EQ(core_->NextDeadline(), now_ + Seconds(2));
  Advance(Seconds(1));
  EXPECT_TRUE(Signals().empty());
  Command_(KillProcess{kJob, ProcessId(1), Seconds(60)});
  EXPECT_TRUE(Signals().empty()) << "a second order neither repeats nor prolongs";
  Advance(Seconds(1));
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
  Die(1);
  EXPECT_EQ(Facts<ProcessExited>().size(), 1u);
}

TEST_F(AgentCoreTest, KillsAtOnceWithoutGrace) {
  Register();
  Run(1);
  Command_(KillProcess{kJob, ProcessId(1), {}});
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
}

TEST_F(AgentCoreTest, KillsAProcessThatIsStillBeingStarted) {
  Register();
  Command_(Spawn(1));
  Command_(KillProcess{kJob, ProcessId(1), {}});
  EXPECT_TRUE(Signals().empty());
  EXPECT_EQ(core_->NextDeadline(), kNever);
  Feed(ProcessSpawned{ProcessId(1), 71});
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
}

TEST_F(AgentCoreTest, NeverStartsAProcessThatWasKilledBefore) {
  Register();
  Command_(KillProcess{kJob, ProcessId(5), {}});
  ASSERT_EQ(Facts<ProcessExited>().size(), 1u);
  Command_(Spawn(5));
  EXPECT_TRUE(All<StartProcess>().empty());
  EXPECT_EQ(Facts<ProcessExited>().size(), 1u);
}

TEST_F(AgentCoreTest, ReusesADeviceOnlyAfterItsProcessIsReaped) {
  Register();
  Run(1, 0);
  Command_(KillProcess{kJob, ProcessId(1), {}});
  Command_(Spawn(2, 0));
  EXPECT_TRUE(All<StartProcess>().empty());
  Command_(Spawn(3, 1));
  EXPECT_EQ(All<StartProcess>().size(), 1u) << "another device is free";
  Die(1);
  ASSERT_EQ(All<StartProcess>().size(), 1u);
  EXPECT_EQ(All<StartProcess>()[0].spawn.process, ProcessId(2));
}

TEST_F(AgentCoreTest, StartsAStandbyBesideALivingRank) {
  Register();
  Run(1, 0);
  Command_(Spawn(2, 0));
  EXPECT_EQ(All<StartProcess>().size(), 1u);
}

TEST_F(AgentCoreTest, BlocksTheDeviceOfAProcessThatSurvivesSigkill) {
  Register();
  Run(1, 0);
  Command_(KillProcess{kJob, ProcessId(1), {}});
  Command_(Spawn(2, 0));
  Advance(Policy().unkillable_after);
  ASSERT_EQ(Facts<ProcessStartFailed>().size(), 1u);
  EXPECT_EQ(Facts<ProcessStartFailed>()[0].reason, Reason::kServerQuarantined);
  Command_(Spawn(3, 0));
  EXPECT_EQ(Facts<ProcessStartFailed>().size(), 1u);
  Die(1);
  Command_(Spawn(4, 0));
  EXPECT_EQ(All<StartProcess>().size(), 1u);
}

TEST_F(AgentCoreTest, ReleasesAJobWithItsLastProcess) {
  Register();
  Join(1, 0);
  Run(2, 1);
  Command_(ReleaseJob{kJob});
  EXPECT_EQ(ToRank<StopRank>(1).size(), 1u);
  EXPECT_EQ(Signals(), (Sent{{1, SIGTERM}, {2, SIGTERM}}));
  Die(1, 0, SIGTERM);
  EXPECT_TRUE(All<ReleaseSnapshots>().empty());
  Advance(Seconds(3));
  EXPECT_EQ(Signals(), (Sent{{2, SIGKILL}}));
  Die(2);
  ASSERT_EQ(All<ReleaseSnapshots>().size(), 1u);
  Command_(ReleaseJob{kJob});
  EXPECT_EQ(All<ReleaseSnapshots>().size(), 1u) << "idempotent";
}

TEST_F(AgentCoreTest, ReportsTheNewestTwentyLastLines) {
  Register();
  Run(1);
  ProcessExitedObserved exited;
  exited.process = ProcessId(1);
  exited.exit_code = 9;
  exited.noticed = now_;
  for (int i = 0; i < 30; ++i) exited.last_lines.push_back(std::to_string(i));
  now_ += Milliseconds(5);
  Feed(exited);
  const auto facts = Facts<ProcessExited>();
  ASSERT_EQ(facts.size(), 1u);
  EXPECT_EQ(facts[0].last_lines.size(), 20u);
  EXPECT_EQ(facts[0].last_lines.back(), "29");
  EXPECT_EQ(facts[0].noticed_ago, Milliseconds(5));
  EXPECT_FALSE(facts[0].finished);
}

TEST_F(AgentCoreTest, ForwardsABoundedRateOfLines) {
  Register();
  Run(1);
  Feed(LinesCaptured{ProcessId(1), std::vector<std::string>(20, "x")});
  ASSERT_EQ(Facts<LinesPrinted>().size(), 1u);
  EXPECT_EQ(Facts<LinesPrinted>()[0].lines.size(), 5u);
  Feed(LinesCaptured{ProcessId(1), {"y"}});
  EXPECT_TRUE(Facts<LinesPrinted>().empty());
  EXPECT_EQ(core_->counts().lines_left_out, 16u);
  now_ += Seconds(1);
  Feed(LinesCaptured{ProcessId(1), {"z"}});
  ASSERT_EQ(Facts<LinesPrinted>().size(), 1u);
  EXPECT_EQ(Facts<LinesPrinted>()[0].lines,
            (std::vector<std::string>{"[16 lines left out; the log file has them]", "z"}));
}

TEST_F(AgentCoreTest, StopsGracefullyAndExitsWithZero) {
  Register();
  Run(1);
  Feed(StopRequested{});
  EXPECT_EQ(Signals(), (Sent{{1, SIGTERM}}));
  Command_(Spawn(2));
  EXPECT_EQ(Facts<ProcessStartFailed>().size(), 1u);
  Die(1, 0, SIGTERM);
  EXPECT_TRUE(All<ExitAgent>().empty()) << "the exit is not acknowledged yet";
  Command_(AcknowledgeFacts{last_fact_});
  ASSERT_EQ(All<ExitAgent>().size(), 1u);
  EXPECT_EQ(All<ExitAgent>()[0].code, 0);
}

TEST_F(AgentCoreTest, StopsWithoutAController) {
  Register();
  Run(1);
  Feed(ControllerLinkDown{"gone"});
  Feed(StopRequested{});
  Feed(StopRequested{});
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}})) << "asked twice: at once";
  Die(1);
  EXPECT_EQ(All<ExitAgent>().size(), 1u);
}

// ---- sockets of ranks

TEST_F(AgentCoreTest, AcceptsItsOwnRank) {
  Register();
  Connect(1);
  EXPECT_EQ(ToRank<HelloAccepted>(1).size(), 1u);
  Say(1, RankJoin{});
  ASSERT_EQ(Facts<ProcessJoined>().size(), 1u);
  EXPECT_EQ(Facts<ProcessJoined>()[0].mesh_address, "10.0.0.1:5000");
  EXPECT_TRUE(StatusOf(1).joined);
}

TEST_F(AgentCoreTest, RefusesStrangersOnTheSocket) {
  Register();
  Run(1);
  struct Case {
    const char* what;
    RankSocketOpened opened;
    RankToAgent first;
  };
  RankHello unknown = Hello(50);
  RankHello old = Hello(1);
  old.protocol_version = 99;
  const Case cases[] = {
      {"another process's pid", {ConnectionOf(1), 1, 1}, Hello(1)},
      {"a process that does not exist", {ConnectionOf(1), PidOf(1), PidOf(1)}, unknown},
      {"another protocol version", {ConnectionOf(1), PidOf(1), PidOf(1)}, old},
      {"no hello", {ConnectionOf(1), PidOf(1), PidOf(1)}, RankJoin{}},
  };
  for (const Case& c : cases) {
    Feed(c.opened);
    Say(1, c.first);
    EXPECT_EQ(ToRank<HelloRefused>(1).size(), 1u) << c.what;
    EXPECT_EQ(All<CloseConnection>().size(), 1u) << c.what;
    EXPECT_TRUE(Facts<ProcessJoined>().empty()) << c.what;
  }
}

TEST_F(AgentCoreTest, RefusesASecondConnectionOfOneProcess) {
  Register();
  Connect(1);
  Feed(RankSocketOpened{Connection(900), PidOf(1), PidOf(1)});
  Feed(RankMessageArrived{Connection(900), Hello(1)});
  ASSERT_EQ(All<SendToRank>().size(), 1u);
  EXPECT_TRUE(std::holds_alternative<HelloRefused>(All<SendToRank>()[0].message));
  EXPECT_EQ(All<SendToRank>()[0].connection, Connection(900));
}

TEST_F(AgentCoreTest, AcceptsARankThatConnectsBeforeItsStartIsKnown) {
  Register();
  Command_(Spawn(1));
  Feed(RankSocketOpened{ConnectionOf(1), PidOf(1), PidOf(1)});
  Say(1, Hello(1));
  EXPECT_TRUE(ToRank<HelloAccepted>(1).empty());
  Feed(ProcessSpawned{ProcessId(1), PidOf(1)});
  EXPECT_EQ(ToRank<HelloAccepted>(1).size(), 1u);
}

TEST_F(AgentCoreTest, RefusesConnectionsBeyondItsLimit) {
  Register();
  for (uint64_t i = 0; i < Policy().connections_max; ++i) {
    Feed(RankSocketOpened{Connection(500 + i), 1, 1});
    EXPECT_TRUE(All<CloseConnection>().empty());
  }
  Feed(RankSocketOpened{Connection(600), 1, 1});
  EXPECT_EQ(All<CloseConnection>().size(), 1u);
}

TEST_F(AgentCoreTest, KillsARankThatLivesOnWithoutItsSocket) {
  Register();
  Join(1);
  Feed(RankSocketClosed{ConnectionOf(1)});
  EXPECT_TRUE(Signals().empty());
  Advance(Policy().socket_loss_grace);
  EXPECT_EQ(Signals(), (Sent{{1, SIGKILL}}));
}

TEST_F(AgentCoreTest, LetsAFinishedRankCloseItsSocket) {
  Register();
  Join(1);
  Say(1, RankFinished{});
  Feed(RankSocketClosed{ConnectionOf(1)});
  Advance(Policy().socket_loss_grace * 2);
  EXPECT_TRUE(Signals().empty());
  Die(1, 0, 0);
  ASSERT_EQ(Facts<ProcessExited>().size(), 1u);
  EXPECT_TRUE(Facts<ProcessExited>()[0].finished);
}

// ---- generations

TEST_F(AgentCoreTest, ForwardsFenceAndAnswer) {
  Register();
  Join(1, 0);
  Join(2, 1);
  Command_(Fence(5, {1, 77}));
  ASSERT_EQ(ToRank<FenceRank>(1).size(), 1u);
  EXPECT_EQ(ToRank<FenceRank>(1)[0].generation, Generation(5));
  EXPECT_TRUE(ToRank<FenceRank>(2).empty());
  EXPECT_TRUE(Facts<ProcessCollected>().empty()) << "the agent never answers for a live rank";
  EXPECT_EQ(StatusOf(1).promised, Generation(0));
  Say(1, Answer(5));
  ASSERT_EQ(Facts<ProcessCollected>().size(), 1u);
  EXPECT_EQ(StatusOf(1).promised, Generation(5));
  EXPECT_TRUE(StatusOf(1).collected);
}

TEST_F(AgentCoreTest, AnswersARepeatedFenceFromWhatTheRankSaid) {
  Register();
  Join(1);
  Command_(Fence(5, {1}));
  Command_(Fence(5, {1}));
  EXPECT_TRUE(All<SendToRank>().empty());
  Say(1, Answer(5));
  Command_(Fence(5, {1}));
  EXPECT_TRUE(All<SendToRank>().empty());
  EXPECT_EQ(Facts<ProcessCollected>().size(), 1u);
}

TEST_F(AgentCoreTest, GivesNothingBelowTheGenerationThatWasTold) {
  // Whatever told the process generation 6, commands of generation 5 must not pass.
  const std::function<void()> tellings[] = {
      [this] { Command_(Fence(6, {1})); },
      [this] { Command_(AssignProcesses{MakeAssignment(6, {1})}); },
      [this] { Say(1, Answer(6, /*planned=*/true)); },
  };
  for (const auto& tell : tellings) {
    core_ = std::make_unique<AgentCore>(Inventory(), Policy(), 1);
    Register();
    Join(1);
    tell();
    const uint64_t before = core_->counts().stale_generation;
    Command_(AssignProcesses{MakeAssignment(5, {1})});
    EXPECT_TRUE(All<SendToRank>().empty());
    Command_(PrepareProcesses{kJob, Generation(5), {ProcessId(1)}});
    EXPECT_TRUE(All<SendToRank>().empty());
    Command_(Fence(5, {1}));
    EXPECT_TRUE(All<SendToRank>().empty());
    Command_(ResumeProcesses{kJob, Generation(5), Step(0)});
    EXPECT_TRUE(All<SendToRank>().empty());
    EXPECT_GE(core_->counts().stale_generation, before + 3);
    bool noticed = false;
    Command_(AssignProcesses{MakeAssignment(5, {1})});
    for (const AgentNotice& notice : All<AgentNotice>()) noticed |= notice.reason == Reason::kStaleGeneration;
    EXPECT_TRUE(noticed);
  }
}

TEST_F(AgentCoreTest, DropsWhatARankSaysInAGenerationItLeft) {
  Register();
  Join(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Command_(Fence(6, {1}));
  Say(1, RankConnected{Generation(5)});
  EXPECT_TRUE(All<SendFact>().empty());
  Say(1, RankReady{Generation(5), {}, 0, ""});
  EXPECT_TRUE(All<SendFact>().empty());
  Say(1, RankFailed{Generation(5), Rank(1), StatusCode::kUnavailable, "reset"});
  EXPECT_TRUE(All<SendFact>().empty());
  Say(1, SnapshotWanted{Generation(5), {}});
  EXPECT_TRUE(All<LoadSnapshot>().empty());
  Say(1, Answer(5));
  EXPECT_TRUE(All<SendFact>().empty());
  EXPECT_EQ(core_->counts().stale_generation, 5u);
}

TEST_F(AgentCoreTest, HandsAnAssignmentToItsOwnProcesses) {
  Register();
  Join(1, 0);
  Join(2, 1);
  Command_(AssignProcesses{MakeAssignment(5, {90, 1, 91, 2})});
  ASSERT_EQ(ToRank<AssignRank>(1).size(), 1u);
  ASSERT_EQ(ToRank<AssignRank>(2).size(), 1u);
  EXPECT_EQ(ToRank<AssignRank>(1)[0].rank, Rank(1));
  EXPECT_EQ(ToRank<AssignRank>(2)[0].rank, Rank(3));
  EXPECT_EQ(StatusOf(1).assigned, Generation(5));
  ASSERT_EQ(All<NoteAssigned>().size(), 1u);
}

TEST_F(AgentCoreTest, KeepsAnAssignmentUntilTheRankJoins) {
  Register();
  Connect(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  EXPECT_TRUE(All<SendToRank>().empty());
  Say(1, RankJoin{});
  EXPECT_EQ(ToRank<AssignRank>(1).size(), 1u);
}

TEST_F(AgentCoreTest, AFenceOvertakesAnAssignmentThatWaits) {
  Register();
  Connect(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Command_(Fence(6, {1}));
  Say(1, RankJoin{});
  EXPECT_TRUE(ToRank<AssignRank>(1).empty());
}

TEST_F(AgentCoreTest, FencesARankThatConnectsAfterTheFence) {
  Register();
  Run(1);
  Command_(Fence(5, {1}));
  Feed(RankSocketOpened{ConnectionOf(1), PidOf(1), PidOf(1)});
  Say(1, Hello(1));
  EXPECT_EQ(ToRank<HelloAccepted>(1).size(), 1u);
  EXPECT_EQ(ToRank<FenceRank>(1).size(), 1u);
}

TEST_F(AgentCoreTest, RepeatsProgressWhenAnAssignmentIsRepeated) {
  Register();
  Join(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Say(1, RankConnected{Generation(5)});
  EXPECT_EQ(Facts<ProcessConnected>().size(), 1u);
  Say(1, RankReady{Generation(5), {1, 2}, 3, "kept"});
  EXPECT_EQ(Facts<ProcessReady>().size(), 1u);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  EXPECT_TRUE(All<SendToRank>().empty());
  EXPECT_EQ(Facts<ProcessConnected>().size(), 1u);
  EXPECT_EQ(Facts<ProcessReady>().size(), 1u);
}

TEST_F(AgentCoreTest, ResumesOnceAndOnlyTheAssigned) {
  Register();
  Join(1, 0);
  Join(2, 1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Command_(ResumeProcesses{kJob, Generation(5), Step(3)});
  ASSERT_EQ(ToRank<ResumeRank>(1).size(), 1u);
  EXPECT_EQ(ToRank<ResumeRank>(1)[0].protected_step, Step(3));
  EXPECT_TRUE(ToRank<ResumeRank>(2).empty());
  Command_(ResumeProcesses{kJob, Generation(5), Step(3)});
  EXPECT_TRUE(All<SendToRank>().empty());
}

TEST_F(AgentCoreTest, IgnoresCommandsOfAnotherJob) {
  Register();
  Join(1);
  FenceProcesses fence = Fence(5, {1});
  fence.job = JobUid("other");
  Command_(fence);
  EXPECT_TRUE(All<SendToRank>().empty());
  Assignment assignment = MakeAssignment(5, {1});
  assignment.job = JobUid("other");
  Command_(AssignProcesses{assignment});
  EXPECT_TRUE(All<SendToRank>().empty());
  Command_(ProtectedStepRaised{JobUid("other"), Step(4)});
  EXPECT_TRUE(All<SendToRank>().empty());
}

TEST_F(AgentCoreTest, PassesThePlannedSwitchBothWays) {
  Register();
  Join(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Command_(PrepareProcesses{kJob, Generation(6), {ProcessId(1)}});
  ASSERT_EQ(ToRank<PrepareSwitch>(1).size(), 1u);
  Say(1, Answer(6, /*planned=*/true));
  ASSERT_EQ(Facts<ProcessCollected>().size(), 1u);
  EXPECT_TRUE(Facts<ProcessCollected>()[0].answer.planned);
  Command_(AssignProcesses{MakeAssignment(6, {1})});
  EXPECT_EQ(ToRank<AssignRank>(1).size(), 1u);
}

TEST_F(AgentCoreTest, KeepsRanksAndFencesThroughALossOfTheController) {
  Register();
  Join(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Say(1, RankConnected{Generation(5)});
  Feed(ControllerLinkDown{"gone"});
  Say(1, RankReady{Generation(5), {}, 0, "kept"});
  EXPECT_TRUE(Signals().empty());
  LinkUp();
  const AgentHello hello = All<SayHello>()[0].hello;
  ASSERT_EQ(hello.processes.size(), 1u);
  EXPECT_EQ(hello.processes[0].assigned, Generation(5));
  EXPECT_EQ(hello.processes[0].pid, PidOf(1));
  EXPECT_TRUE(hello.processes[0].joined);
  Welcome welcome;
  welcome.incarnation = Incarnation(1);
  welcome.keep = {ProcessId(1)};
  Command_(welcome);
  EXPECT_EQ(Facts<ProcessReady>().size(), 1u);
  Command_(AssignProcesses{MakeAssignment(4, {1})});
  EXPECT_TRUE(All<SendToRank>().empty());
}

TEST_F(AgentCoreTest, ReportsTheEndOfAFencedProcessAgain) {
  Register();
  Join(1);
  Die(1, 1, 0);
  Command_(AcknowledgeFacts{last_fact_});
  Command_(Fence(5, {1}));
  EXPECT_EQ(Facts<ProcessExited>().size(), 1u);
}

// ---- opaque jobs

TEST_F(AgentCoreTest, AFenceEndsAnOpaqueProcessOfAnEarlierGeneration) {
  Register();
  Run(1, 0, /*opaque=*/true);  // spawned in generation 3
  Command_(Fence(3, {1}));
  EXPECT_TRUE(Signals().empty());
  Command_(Fence(4, {1}));
  EXPECT_EQ(Signals(), (Sent{{1, SIGTERM}}));
}

TEST_F(AgentCoreTest, AnOpaqueProcessFinishesByExitCodeZeroUnlessItWasToldToEnd) {
  Register();
  Run(1, 0, true);
  Die(1, 0, 0);
  EXPECT_TRUE(Facts<ProcessExited>()[0].finished);
  Run(2, 0, true);
  Command_(KillProcess{kJob, ProcessId(2), Seconds(1)});
  Die(2, 0, 0);
  EXPECT_FALSE(Facts<ProcessExited>()[0].finished);
}

TEST_F(AgentCoreTest, OpaqueProcessesGetTorchrunsEnvironment) {
  SpawnProcess spawn = Spawn(1);
  spawn.spec.opaque = true;
  spawn.spec.environment["RANK"] = "mine";
  spawn.spec.environment["COLOR"] = "blue";
  spawn.rank = Rank(5);
  spawn.world_size = 8;
  spawn.local_rank = 1;
  spawn.local_world_size = 4;
  spawn.master_address = "10.0.0.9";
  spawn.master_port = 29500;
  spawn.restart_count = 2;
  const auto variables = BuildEnvironment(spawn, "10.0.0.1");
  const std::map<std::string, std::string> map(variables.begin(), variables.end());
  const std::map<std::string, std::string> expected = {
      {"RANK", "5"},          {"WORLD_SIZE", "8"},           {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "4"}, {"GROUP_RANK", "1"},        {"MASTER_ADDR", "10.0.0.9"},
      {"MASTER_PORT", "29500"},  {"TORCHELASTIC_RESTART_COUNT", "2"}, {"COLOR", "blue"},
      {"EVERSTEP_PROCESS_ID", "1"}, {"EVERSTEP_JOB", "job-1"}, {"EVERSTEP_HOST", "10.0.0.1"}};
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(map.contains(name)) << name;
    EXPECT_EQ(map.at(name), value) << name;
  }
  spawn.spec.opaque = false;
  const auto joining = BuildEnvironment(spawn, "10.0.0.1");
  EXPECT_EQ((std::map<std::string, std::string>(joining.begin(), joining.end()).at("RANK")), "mine");
}

// ---- snapshots

TEST_F(AgentCoreTest, PassesSnapshotsToTheKeeperAndItsFactsOn) {
  Register();
  Join(1);
  SnapshotStaged staged;
  staged.slot = 2;
  Say(1, staged);
  ASSERT_EQ(All<KeepStaged>().size(), 1u);
  EXPECT_EQ(All<KeepStaged>()[0].process, ProcessId(1));
  Feed(KeeperReported{SnapshotHeld{kJob, {}}});
  EXPECT_EQ(Facts<SnapshotHeld>().size(), 1u);
  Command_(CopySnapshot{});
  EXPECT_EQ(All<CopyForKeeping>().size(), 1u);
  Command_(DropSnapshots{});
  EXPECT_EQ(All<DropKept>().size(), 1u);
  Command_(ProtectedStepRaised{kJob, Step(9)});
  EXPECT_EQ(ToRank<SnapshotProtected>(1).size(), 1u);
  EXPECT_EQ(All<RaiseProtected>().size(), 1u);
}

TEST_F(AgentCoreTest, GivesALoadedSnapshotOnlyToTheGenerationThatWantedIt) {
  Register();
  Join(1);
  Command_(AssignProcesses{MakeAssignment(5, {1})});
  Say(1, SnapshotWanted{Generation(5), {}});
  EXPECT_EQ(All<LoadSnapshot>().size(), 1u);
  SnapshotProvided answer;
  answer.generation = Generation(5);
  Feed(SnapshotLoaded{ProcessId(1), answer, DescriptorToken(3)});
  ASSERT_EQ(All<SendToRank>().size(), 1u);
  EXPECT_EQ(All<SendToRank>()[0].descriptor, DescriptorToken(3));
  Command_(Fence(6, {1}));
  Feed(SnapshotLoaded{ProcessId(1), answer, DescriptorToken(4)});
  EXPECT_TRUE(All<SendToRank>().empty());
  ASSERT_EQ(All<DropDescriptor>().size(), 1u);
  EXPECT_EQ(All<DropDescriptor>()[0].descriptor, DescriptorToken(4));
}

// ---- any order

// Random commands, ranks and faults: no process is told a lower generation after a higher one, none is started twice,
// none on a device whose former process is ending, and the core never asks to be woken in the past for ever.
TEST_F(AgentCoreTest, KeepsItsPromisesInAnyOrder) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Prng prng(seed);
    core_ = std::make_unique<AgentCore>(Inventory(), Policy(), seed);
    sequence_ = 0;
    uint64_t incarnation = 1;
    std::map<uint64_t, uint64_t> told;       // by process
    std::set<uint64_t> started, running, ended, killed;
    std::map<uint64_t, int> device_of;
    std::set<uint64_t> open;                 // connections
    const auto check = [&] {
      for (const AgentEffect& effect : effects_) {
        if (const auto* start = std::get_if<StartProcess>(&effect)) {
          const uint64_t id = start->spawn.process.value;
          EXPECT_TRUE(started.insert(id).second) << "process " << id << " started twice";
          for (uint64_t other : killed) {
            if (running.contains(other)) {
              EXPECT_NE(device_of[other], start->spawn.device.value);
            }
          }
          device_of[id] = start->spawn.device.value;
        } else if (const auto* signal = std::get_if<SignalProcess>(&effect)) {
          EXPECT_TRUE(running.contains(signal->process.value));
          killed.insert(signal->process.value);
        } else if (const auto* sent = std::get_if<SendToRank>(&effect)) {
          const uint64_t id = sent->connection.value - 100;
          uint64_t generation = 0;
          if (const auto* fence = std::get_if<FenceRank>(&sent->message)) generation = fence->generation.value;
          if (const auto* assign = std::get_if<AssignRank>(&sent->message)) generation = assign->assignment.generation.value;
          if (const auto* resume = std::get_if<ResumeRank>(&sent->message)) generation = resume->generation.value;
          const bool binding = !std::holds_alternative<PrepareSwitch>(sent->message);
          if (const auto* prepare = std::get_if<PrepareSwitch>(&sent->message)) generation = prepare->generation.value;
          if (generation == 0) continue;
          EXPECT_GE(generation, told[id]) << "process " << id;
          if (binding) told[id] = std::max(told[id], generation);
        }
      }
      effects_.clear();
    };
    Register(incarnation);
    check();
    for (int round = 0; round < 400; ++round) {
      now_ += Milliseconds(prng.Between(0, 700));
      const uint64_t id = 1 + prng.UpTo(11);
      const uint64_t generation = 1 + prng.UpTo(9);
      switch (prng.UpTo(15)) {
        case 0: Command_(Spawn(id, static_cast<int>(id % 3))); break;
        case 1:
          if (started.contains(id) && !running.contains(id) && !ended.contains(id)) {
            running.insert(id);
            Feed(ProcessSpawned{ProcessId(id), PidOf(id)});
          }
          break;
        case 2:
          if (running.contains(id)) {
            running.erase(id);
            ended.insert(id);
            open.erase(id);
            Die(id);
          }
          break;
        case 3:
          if (running.contains(id) && open.insert(id).second) {
            Feed(RankSocketOpened{ConnectionOf(id), PidOf(id), PidOf(id)});
            check();
            Say(id, Hello(id));
          }
          break;
        case 4: Say(id, RankJoin{}); break;
        case 5: Command_(Fence(generation, {id})); break;
        case 6: Command_(AssignProcesses{MakeAssignment(generation, {id, (id + 1) % 12})}); break;
        case 7: Command_(ResumeProcesses{kJob, Generation(generation), Step(0)}); break;
        case 8: Command_(PrepareProcesses{kJob, Generation(generation), {ProcessId(id)}}); break;
        case 9: Say(id, Answer(generation, prng.Chance(1, 3))); break;
        case 10: Command_(KillProcess{kJob, ProcessId(id), Milliseconds(prng.Between(0, 500))}); break;
        case 11:
          Feed(ControllerLinkDown{"gone"});
          check();
          if (prng.Chance(1, 4)) ++incarnation;
          Register(incarnation, {ProcessId(id), ProcessId(id + 1), ProcessId(id + 2)});
          break;
        case 12:
          if (open.erase(id) > 0) Feed(RankSocketClosed{ConnectionOf(id)});
          break;
        case 13: Command_(AcknowledgeFacts{last_fact_}); break;
        case 14: Say(id, RankReady{Generation(generation), {}, 0, ""}); break;
        default: Feed(AgentTimeAdvanced{}); break;
      }
      check();
      for (int wakeups = 0; core_->NextDeadline() <= now_; ++wakeups) {
        ASSERT_LT(wakeups, 5);
        Feed(AgentTimeAdvanced{});
        check();
      }
      ASSERT_LE(core_->outbox().size(), Policy().outbox_facts_max);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace everstep
