#include "controller/io/loop/controller_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "controller/io/loop/replay.h"
#include "controller/io/loop/watch.h"
#include "controller/io/store/ledger_convert.h"
#include "controller/io/store/memory_backend.h"
#include "controller/io/store/threaded_store.h"

namespace everstep {
namespace {

// A core that a test scripts: each event is recorded, and answered by `on_event`.
class ScriptedCore : public CoreInterface {
 public:
  std::function<Effects(const Event&, ScriptedCore&)> on_event;
  Instant deadline = kNever;
  LedgerState state;

  // An append and what depends on it.
  Effect Append(Record record) {
    const LedgerSequence sequence = state.applied.Next();
    Apply(state, sequence, record);
    return {sequence, AppendRecord{sequence, std::move(record)}};
  }
  Effect Now(EffectBody body) { return {state.applied, std::move(body)}; }

  Effects Start(everstep::Now) override { return {Append(TermStarted{Term(state.term.value + 1)})}; }
  Effects Step(const Event& event, everstep::Now now) override {
    if (std::holds_alternative<TimeAdvanced>(event) && deadline <= now.instant) deadline = kNever;
    return on_event ? on_event(event, *this) : Effects{};
  }
  Instant NextDeadline() const override { return deadline; }
  const LedgerState& ledger() const override { return state; }
  ClusterView MakeView(everstep::Now) const override {
    ClusterView view;
    view.term = state.term;
    return view;
  }
};

// Records effects as text; waits for them.
class RecordedOutputs : public LoopOutputs {
 public:
  void Send(const SendCommand& effect) override { Add("send " + std::to_string(effect.session.value)); }
  void Close(const CloseSession& effect) override { Add("close " + std::to_string(effect.session.value)); }
  void Probe(const StartProbe& effect) override { Add("probe " + effect.address); }
  void Reply(const ReplyToOperator& effect) override { Add("reply " + effect.message); }
  void Notify(const Notice& effect, WallTime) override { Add("notice " + effect.what); }
  void Forward(const ForwardLines&) override { Add("lines"); }
  void Forward(const ForwardMetric&) override { Add("metric"); }
  void Measure(const Measured&) override { Add("measured"); }

  std::vector<std::string> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return seen_.size() >= count; });
    return seen_;
  }
  std::vector<std::string> Seen() {
    std::lock_guard lock(mutex_);
    return seen_;
  }
  void Add(std::string text) {
    std::lock_guard lock(mutex_);
    seen_.push_back(std::move(text));
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> seen_;
};

// Holds writes of the ledger until opened.
class Gate {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void WaitForWriter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool open_ = false;
};

class ControllerLoopTest : public ::testing::Test {
 protected:
  ControllerLoopTest()
      : store_(std::make_unique<FaultyLedgerBackend>(std::make_unique<MemoryLedgerBackend>(disk_), faults_)) {}

  void StartLoop(LoopOptions options = {}) {
    auto core = std::make_unique<ScriptedCore>();
    core->on_event = script_;
    core_ = core.get();
    if (deadline_) core->deadline = *deadline_;
    ControllerLoop::Parts parts;
    parts.core = std::move(core);
    parts.store = &store_;
    parts.outputs = &outputs_;
    parts.heartbeats = heartbeats_;
    if (clock_) parts.clock = clock_;
    parts.on_ledger_failure = [this](const Status& status) { outputs_.Add("fatal " + status.message()); };
    loop_ = std::make_unique<ControllerLoop>(options, std::move(parts));
    loop_->Start();
  }
  void TearDown() override {
    gate_.Open();
    if (loop_) loop_->Stop(Seconds(5));
    store_.Close();
  }

  static Event Call(uint64_t id) {
    return OperatorCalled{CallId(id), RequestId("r"), "op", false, CancelJob{std::to_string(id)}};
  }
  static uint64_t IdOf(const Event& event) { return std::get<OperatorCalled>(event).call.value; }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>();
  std::shared_ptr<FaultyLedgerBackend::Faults> faults_ = std::make_shared<FaultyLedgerBackend::Faults>();
  Gate gate_;
  ThreadedLedgerStore store_;
  RecordedOutputs outputs_;
  HeartbeatSource* heartbeats_ = nullptr;
  std::function<Effects(const Event&, ScriptedCore&)> script_;
  std::function<Now()> clock_;
  std::optional<Instant> deadline_;
  ScriptedCore* core_ = nullptr;
  std::unique_ptr<ControllerLoop> loop_;
};

TEST_F(ControllerLoopTest, NothingLeavesBeforeTheLedgerIsDurable) {
  faults_->before_write = [this] { gate_.Pass(); };
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    if (!std::holds_alternative<OperatorCalled>(event)) return effects;
    effects.push_back(core.Append(ServerDrainSet{ServerId("s01"), true, RequestId("r")}));
    effects.push_back(core.Now(ReplyToOperator{CallId(1), OkStatus(), {}, "drained"}));
    effects.push_back(core.Now(CloseSession{SessionId(4)}));
    return effects;
  };
  StartLoop();
  ASSERT_TRUE(loop_->Post(Call(1)));
  gate_.WaitForWriter();
  EXPECT_EQ(loop_->GetView(Milliseconds(20)).status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(outputs_.Seen().empty());
  gate_.Open();
  EXPECT_EQ(outputs_.Wait(2), (std::vector<std::string>{"reply drained", "close 4"}));
  EXPECT_EQ(disk_->records.size(), 2u);
}

TEST_F(ControllerLoopTest, TheCoreHearsOfAFenceOnlyWhenItIsDurable) {
  faults_->before_write = [this] { gate_.Pass(); };
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    if (std::holds_alternative<OperatorCalled>(event)) {
      effects.push_back(core.Append(ServerDrainSet{ServerId("s01"), true, RequestId("r")}));
      effects.push_back(core.Now(ConfirmFence{JobUid("j"), Generation(7)}));
    } else if (const auto* fence = std::get_if<FenceBecameDurable>(&event)) {
      effects.push_back(core.Now(CloseSession{SessionId(fence->generation.value)}));
    }
    return effects;
  };
  StartLoop();
  ASSERT_TRUE(loop_->Post(Call(1)));
  gate_.WaitForWriter();
  EXPECT_TRUE(outputs_.Seen().empty());
  gate_.Open();
  EXPECT_EQ(outputs_.Wait(1), std::vector<std::string>{"close 7"});
}

TEST_F(ControllerLoopTest, EffectsLeaveInTheirOrderWhateverTheirSequence) {
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    const uint64_t id = IdOf(event);
    effects.push_back(core.Now(StartProbe{ServerId("s"), Incarnation(1), std::to_string(id), Seconds(1)}));
    if (id % 3 == 0) effects.push_back(core.Append(ServerDrainSet{ServerId("s01"), true, RequestId("r")}));
    effects.push_back({LedgerSequence(0), CloseSession{SessionId(id)}});
    return effects;
  };
  StartLoop();
  std::vector<std::string> expected;
  for (uint64_t i = 0; i < 500; ++i) {
    ASSERT_TRUE(loop_->Post(Call(i)));
    expected.push_back("probe " + std::to_string(i));
    expected.push_back("close " + std::to_string(i));
  }
  EXPECT_EQ(outputs_.Wait(1000), expected);
}

TEST_F(ControllerLoopTest, AFailedAppendIsReportedOnceAndNoPromiseLeaves) {
  script_ = [](const Event&, ScriptedCore& core) -> Effects {
    Effects effects;
    effects.push_back(core.Append(ServerDrainSet{ServerId("s01"), true, RequestId("r")}));
    effects.push_back(core.Now(ReplyToOperator{CallId(1), OkStatus(), {}, "drained"}));
    return effects;
  };
  StartLoop();
  ASSERT_TRUE(loop_->GetView(Seconds(10)).ok());  // the term is durable
  {
    std::lock_guard lock(faults_->mutex);
    faults_->write_failure = ResourceExhausted("no space");
  }
  ASSERT_TRUE(loop_->Post(Call(1)));
  ASSERT_TRUE(loop_->Post(Call(2)));
  outputs_.Wait(1);
  loop_->Stop(Milliseconds(50));
  store_.Close();
  EXPECT_EQ(outputs_.Seen(), std::vector<std::string>{"fatal no space"});
}

TEST_F(ControllerLoopTest, ADeadlineThatHasComeIsFedAfterWaitingDatagrams) {
  struct Source : HeartbeatSource {
    std::vector<Heartbeat> Take(bool drain) override {
      std::vector<Heartbeat> out;
      if (drain) {
        out.emplace_back();
        out.back().server = ServerId("late");
      }
      return out;
    }
  } source;
  heartbeats_ = &source;
  deadline_ = SystemNow().instant + Milliseconds(5);
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    if (auto* beat = std::get_if<HeartbeatReceived>(&event)) {
      effects.push_back(core.Now(StartProbe{beat->heartbeat.server, {}, "beat of " + beat->heartbeat.server.value, {}}));
    }
    if (std::holds_alternative<TimeAdvanced>(event)) effects.push_back(core.Now(StartProbe{{}, {}, "time", {}}));
    return effects;
  };
  StartLoop();
  EXPECT_EQ(outputs_.Wait(2), (std::vector<std::string>{"probe beat of late", "probe time"}));
  loop_->Stop(Seconds(5));  // before `source` goes
}

TEST_F(ControllerLoopTest, ItsOwnLagIsFedBeforeAnyTimer) {
  // A clock that jumps by ten seconds once, as if all had been stopped, past a deadline that was far away.
  std::atomic<int64_t> jump{0};
  clock_ = [&jump] {
    Now now = SystemNow();
    now.instant += Duration(jump.load());
    return now;
  };
  deadline_ = SystemNow().instant + Seconds(3);
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    if (auto* lagged = std::get_if<LoopLagged>(&event)) {
      const bool right = lagged->lag > Seconds(9) && lagged->lag < Seconds(11);
      effects.push_back(core.Now(StartProbe{{}, {}, right ? "lag" : "wrong lag", {}}));
    }
    if (std::holds_alternative<TimeAdvanced>(event)) effects.push_back(core.Now(StartProbe{{}, {}, "time", {}}));
    return effects;
  };
  StartLoop();
  ASSERT_TRUE(loop_->GetView(Seconds(10)).ok());
  jump = Seconds(10).count();
  const std::vector<std::string> seen = outputs_.Wait(2);
  EXPECT_EQ(seen, (std::vector<std::string>{"probe lag", "probe time"}));
}

TEST_F(ControllerLoopTest, AFullQueueMakesPostersWait) {
  LoopOptions options;
  options.events_max = 4;
  std::mutex hold;
  hold.lock();
  script_ = [&hold](const Event&, ScriptedCore& core) -> Effects {
    std::lock_guard wait(hold);
    return {core.Now(CloseSession{SessionId(1)})};
  };
  StartLoop(options);
  std::atomic<int> posted{0};
  std::thread poster([&] {
    for (int i = 0; i < 100; ++i) {
      EXPECT_TRUE(loop_->Post(Call(i)));
      ++posted;
    }
  });
  while (posted < 4) std::this_thread::yield();
  EXPECT_LE(posted.load(), 9);  // at most one batch being stepped and one that waits
  hold.unlock();
  poster.join();
  EXPECT_EQ(outputs_.Wait(100).size(), 100u);
}

TEST_F(ControllerLoopTest, CompactionKeepsTheLedgerBoundedAndReplayEqualsLive) {
  LoopOptions options;
  options.snapshot_records = 50;
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    Effects effects;
    const uint64_t id = IdOf(event);
    effects.push_back(core.Append(ServerRegistered{ServerId("s" + std::to_string(id % 7)), Incarnation(id + 1), id, "rack"}));
    effects.push_back(core.Now(CloseSession{SessionId(id)}));
    return effects;
  };
  StartLoop(options);
  for (uint64_t i = 0; i < 5000; ++i) {
    ASSERT_TRUE(loop_->Post(Call(i)));
    if (i % 100 == 0) outputs_.Wait(i + 1);
  }
  outputs_.Wait(5000);
  loop_->Stop(Seconds(5));
  store_.Close();
  EXPECT_LT(disk_->records.size(), 400u);
  const auto replayed = ReplayLedger(*MemoryLedgerBackend(disk_).Load());
  ASSERT_TRUE(replayed.ok()) << replayed.status().ToString();
  EXPECT_EQ(*replayed, core_->state);
}

TEST_F(ControllerLoopTest, AViewShowsWhatAnOperatorWasToldBefore) {
  script_ = [](const Event& event, ScriptedCore& core) -> Effects {
    if (!std::holds_alternative<OperatorCalled>(event)) return {};
    Effects effects;
    effects.push_back(core.Append(TermStarted{core.state.term.Next()}));
    effects.push_back(core.Now(ReplyToOperator{CallId(1), OkStatus(), {}, "done"}));
    return effects;
  };
  StartLoop();
  for (uint64_t i = 1; i <= 20; ++i) {
    ASSERT_TRUE(loop_->Post(Call(i)));
    outputs_.Wait(i);
    const auto view = loop_->GetView(Seconds(10));
    ASSERT_TRUE(view.ok());
    EXPECT_EQ((*view)->term, Term(1 + i));
  }
}

TEST_F(ControllerLoopTest, TheTimeOfAPlanIsMeasuredAroundItsStep) {
  struct Timed : RecordedOutputs {
    void Measure(const Measured& effect) override {
      const bool planned = effect.what == Measured::What::kPlanDuration && effect.seconds > 0;
      Add(planned ? "plan duration" : "measured");
    }
  } timed;
  auto core = std::make_unique<ScriptedCore>();
  core->on_event = [](const Event&, ScriptedCore& c) -> Effects {
    Measured plan;
    plan.what = Measured::What::kPlan;
    return {c.Now(plan)};
  };
  ControllerLoop::Parts parts;
  parts.core = std::move(core);
  parts.store = &store_;
  parts.outputs = &timed;
  parts.on_ledger_failure = [](const Status&) {};
  ControllerLoop loop({}, std::move(parts));
  loop.Start();
  ASSERT_TRUE(loop.Post(Call(1)));
  std::vector<std::string> seen = timed.Wait(2);
  loop.Stop(Seconds(1));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, (std::vector<std::string>{"measured", "plan duration"}));
}

TEST_F(ControllerLoopTest, AfterStopNothingIsTaken) {
  StartLoop();
  loop_->Stop(Seconds(1));
  EXPECT_FALSE(loop_->Post(Call(1)));
  EXPECT_EQ(loop_->GetView(Seconds(1)).status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(loop_->ready());
}

TEST_F(ControllerLoopTest, ACommandLeavesWithinAMillisecondOfItsEvent) {
  std::mutex mutex;
  std::condition_variable sent;
  struct Timed : RecordedOutputs {
    std::function<void()> on_close;
    void Close(const CloseSession&) override { on_close(); }
  } timed;
  int done = 0;
  timed.on_close = [&] {
    std::lock_guard lock(mutex);
    ++done;
    sent.notify_all();
  };
  auto core = std::make_unique<ScriptedCore>();
  core->on_event = [](const Event&, ScriptedCore& c) -> Effects { return {c.Now(CloseSession{SessionId(1)})}; };
  ControllerLoop::Parts parts;
  parts.core = std::move(core);
  parts.store = &store_;
  parts.outputs = &timed;
  parts.on_ledger_failure = [](const Status&) {};
  ControllerLoop loop({}, std::move(parts));
  loop.Start();
  ASSERT_TRUE(loop.GetView(Seconds(10)).ok());
  std::vector<Duration> times;
  for (int i = 0; i < 300; ++i) {
    const Instant before = SystemNow().instant;
    ASSERT_TRUE(loop.Post(Call(1)));
    std::unique_lock lock(mutex);
    sent.wait(lock, [&] { return done == i + 1; });
    times.push_back(SystemNow().instant - before);
  }
  loop.Stop(Seconds(1));
  std::sort(times.begin(), times.end());
  RecordProperty("p50_us", static_cast<int>(times[150].count() / 1000));
  std::printf("event to command: p50 %.0f us, p99 %.0f us\n", times[150].count() / 1e3, times[297].count() / 1e3);
  EXPECT_LT(times[150], Milliseconds(1));
}

TEST(WatchHub, ASlowWatcherLosesTheOldestAndIsTold) {
  WatchHub hub;
  int notified = 0;
  auto watcher = hub.Subscribe(JobUid("a"), [&] { ++notified; });
  for (size_t i = 0; i < kWatchItemsMax + 5; ++i) {
    hub.Publish(JobUid("a"), ForwardMetric{JobUid("a"), Rank(0), Step(static_cast<int64_t>(i)), "loss", 1.0});
  }
  hub.Publish(JobUid("b"), ForwardMetric{JobUid("b"), Rank(0), Step(1), "loss", 1.0});
  const Watcher::Taken taken = watcher->Take();
  EXPECT_EQ(notified, 1);
  EXPECT_EQ(taken.dropped, 5u);
  ASSERT_EQ(taken.items.size(), kWatchItemsMax);
  EXPECT_EQ(std::get<ForwardMetric>(taken.items.front()).step, Step(5));
  EXPECT_TRUE(watcher->Take().items.empty());
}

TEST(WatchHub, HasALimitAndForgetsThoseThatLeft) {
  WatchHub hub;
  std::vector<std::shared_ptr<Watcher>> watchers;
  for (size_t i = 0; i < kWatchersMax; ++i) watchers.push_back(hub.Subscribe(JobUid("a"), [] {}));
  EXPECT_EQ(hub.Subscribe(JobUid("a"), [] {}), nullptr);
  watchers.pop_back();
  EXPECT_NE(hub.Subscribe(JobUid("a"), [] {}), nullptr);
}

TEST(Replay, NamesTheRecordThatIsDamaged) {
  StoredLedger stored;
  stored.records.push_back({LedgerSequence(1), EncodeRecord(TermStarted{Term(1)})});
  stored.records.push_back({LedgerSequence(2), "\xff"});
  const auto state = ReplayLedger(stored);
  EXPECT_EQ(state.status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(state.status().message().rfind("record 2: ", 0), 0u) << state.status().message();
}

}  // namespace
}  // namespace everstep
