#include "controller/io/loop/controller_loop.h"

#include <time.h>

#include <algorithm>
#include <future>
#include <utility>

#include "controller/io/store/ledger_convert.h"

namespace everstep {
namespace {

int64_t ReadClock(clockid_t clock) {
  timespec t{};
  ::clock_gettime(clock, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

Now SystemNow() {
  return Now{Instant(Duration(ReadClock(CLOCK_BOOTTIME))), WallTime{ReadClock(CLOCK_REALTIME) / 1000}};
}

ControllerLoop::ControllerLoop(LoopOptions options, Parts parts)
    : options_(options), parts_(std::move(parts)) {
  appended_ = durable_ = durable_shared_ = parts_.core->ledger().applied;
}

ControllerLoop::~ControllerLoop() { Stop(Duration(0)); }

void ControllerLoop::Start() { thread_ = std::thread([this] { Run(); }); }

void ControllerLoop::Stop(Duration patience) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) stop_deadline_ = parts_.clock().instant + patience;
    stopping_ = true;
  }
  work_.notify_one();
  room_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool ControllerLoop::Post(Event event) {
  {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [this] { return events_.size() < options_.events_max || stopping_; });
    if (stopping_) return false;
    events_.push_back(std::move(event));
  }
  work_.notify_one();
  return true;
}

void ControllerLoop::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  work_.notify_one();
}

bool ControllerLoop::RequestView(std::function<void(View)> done) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_ && view_requests_.size() >= options_.view_requests_max) return false;
    if (!stopping_) {
      view_requests_.push_back(std::move(done));
      done = nullptr;
    }
  }
  if (done) {
    done(nullptr);
  } else {
    work_.notify_one();
  }
  return true;
}

Result<ControllerLoop::View> ControllerLoop::GetView(Duration timeout) {
  auto promise = std::make_shared<std::promise<View>>();
  std::future<View> future = promise->get_future();
  if (!RequestView([promise](View view) { promise->set_value(std::move(view)); })) {
    return ResourceExhausted("too many reads wait for the controller; try again");
  }
  if (future.wait_for(timeout) != std::future_status::ready) {
    return DeadlineExceeded("the controller did not answer in time");
  }
  View view = future.get();
  if (view == nullptr) return Unavailable("the controller is stopping");
  return view;
}

void ControllerLoop::Run() {
  TakeEffects(parts_.core->Start(parts_.clock()));
  turn_started_ = parts_.clock().instant;
  ready_.store(true, std::memory_order_relaxed);
  do {
    PerformReady();
    StepConfirmed();
    WaitForWork();
    Turn();
  } while (!Stopping());
  ready_.store(false, std::memory_order_relaxed);
  std::vector<ViewRequest> requests;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    requests.swap(view_requests_);
  }
  for (Pending& pending : pending_) {
    if (auto* reply = std::get_if<ViewReply>(&pending.body)) reply->done(nullptr);
  }
  for (ViewRequest& request : requests) request(nullptr);
}

bool ControllerLoop::Stopping() {
  std::lock_guard lock(mutex_);
  return stopping_ && (pending_.empty() || parts_.clock().instant >= stop_deadline_);
}

void ControllerLoop::WaitForWork() {
  const Now before = parts_.clock();
  const Instant deadline = parts_.core->NextDeadline();
  Duration wait = options_.wait_max;
  if (deadline < before.instant + wait) wait = deadline - before.instant;
  wait = std::max(wait, stuck_deadline_ ? Milliseconds(1) : Duration(0));
  bool idle = false;
  {
    std::unique_lock lock(mutex_);
    const auto has_work = [this] {
      const bool takes_events = pending_.size() < options_.effects_pending_max;
      return (takes_events && !events_.empty()) || !view_requests_.empty() || woken_ ||
             durable_shared_ != durable_ || (stopping_ && pending_.empty());
    };
    idle = !has_work();
    if (idle && wait > Duration(0)) work_.wait_for(lock, wait, has_work);
    woken_ = false;
    durable_ = durable_shared_;
  }
  const Now after = parts_.clock();
  const Duration busy = before.instant - turn_started_;
  const Duration overslept = (after.instant - before.instant) - std::max(wait, Duration(0));
  turn_started_ = after.instant;
  last_turn_ns_.store(after.instant.time_since_epoch().count(), std::memory_order_relaxed);
  const Duration lag = busy + std::max(overslept, Duration(0));
  // First of all in this turn: the core extends its leases before anything can run out.
  if (lag > options_.lag_reported) StepCore(LoopLagged{lag});
}

void ControllerLoop::Turn() {
  StepQueued(false);
  RunTimers();
  CompactIfDue();
  AnswerViewRequests();
  PerformReady();
}

void ControllerLoop::StepQueued(bool drain_datagrams) {
  // Heartbeats first: they are what leases wait for.
  if (parts_.heartbeats != nullptr) {
    for (Heartbeat& heartbeat : parts_.heartbeats->Take(drain_datagrams)) {
      StepCore(HeartbeatReceived{std::move(heartbeat)});
    }
  }
  if (pending_.size() >= options_.effects_pending_max) return;
  std::deque<Event> events;
  {
    std::lock_guard lock(mutex_);
    events.swap(events_);
  }
  parts_.outputs->Turned(events.size());
  if (events.empty()) return;
  room_.notify_all();
  for (const Event& event : events) {
    StepCore(event);
  }
}

// What the core asked to hear once it is durable.
void ControllerLoop::StepConfirmed() {
  while (!confirmed_.empty()) {
    const FenceBecameDurable confirmed = confirmed_.front();
    confirmed_.pop_front();
    StepCore(confirmed);
  }
}

void ControllerLoop::RunTimers() {
  stuck_deadline_ = false;
  if (parts_.core->NextDeadline() > parts_.clock().instant) return;
  StepQueued(true);  // what has arrived comes before what runs out
  const Now now = parts_.clock();
  const Instant due = parts_.core->NextDeadline();
  if (due > now.instant) return;
  StepCore(TimeAdvanced{});
  if (parts_.core->NextDeadline() == due) {
    stuck_deadline_ = true;
    EVERSTEP_REPORT_BUG("a due deadline did not move");
  }
}

void ControllerLoop::StepCore(const Event& event) {
  const Now before = parts_.clock();
  Effects effects = parts_.core->Step(event, before);
  ReportPlanning(effects, parts_.clock().instant - before.instant);
  TakeEffects(std::move(effects));
  PerformReady();
  parts_.outputs->Stepped(parts_.clock().instant - before.instant);
}

void ControllerLoop::ReportPlanning(const Effects& effects, Duration duration) {
  const bool planned = std::any_of(effects.begin(), effects.end(), [](const Effect& effect) {
    const auto* measured = std::get_if<Measured>(&effect.body);
    return measured != nullptr && measured->what == Measured::What::kPlan;
  });
  if (!planned) return;
  Measured measured;
  measured.what = Measured::What::kPlanDuration;
  measured.seconds = ToSeconds(duration);
  parts_.outputs->Measure(measured);
}

void ControllerLoop::TakeEffects(Effects effects) {
  for (Effect& effect : effects) {
    auto* append = std::get_if<AppendRecord>(&effect.body);
    // Whoever heard of a change must find it in the next view.
    view_stale_ = view_stale_ || append != nullptr || std::holds_alternative<Notice>(effect.body) ||
                  std::holds_alternative<ReplyToOperator>(effect.body);
    if (append == nullptr) {
      EVERSTEP_CHECK(effect.after <= appended_);
      pending_.push_back({effect.after, std::move(effect.body)});
      continue;
    }
    EVERSTEP_CHECK(append->sequence == appended_.Next());
    appended_ = append->sequence;
    StoredRecord record{append->sequence, EncodeRecord(append->record)};
    ++records_since_snapshot_;
    bytes_since_snapshot_ += static_cast<int64_t>(record.bytes.size());
    batch_.push_back(std::move(record));
  }
  FlushAppends();
}

void ControllerLoop::FlushAppends() {
  if (batch_.empty()) return;
  const LedgerSequence upto = batch_.back().sequence;
  const Instant started = parts_.clock().instant;
  parts_.store->Append(std::move(batch_), [this, upto, started](const Status& status) {
    if (!status.ok()) {
      if (!failed_.exchange(true)) parts_.on_ledger_failure(status);
      return;
    }
    parts_.outputs->Appended(parts_.clock().instant - started);
    {
      std::lock_guard lock(mutex_);
      durable_shared_ = upto;
    }
    work_.notify_one();
  });
  batch_.clear();
}

void ControllerLoop::CompactIfDue() {
  if (records_since_snapshot_ < options_.snapshot_records && bytes_since_snapshot_ < options_.snapshot_bytes) return;
  if (compacting_.exchange(true)) return;
  records_since_snapshot_ = 0;
  bytes_since_snapshot_ = 0;
  const LedgerState& state = parts_.core->ledger();
  EVERSTEP_CHECK(state.applied == appended_);
  parts_.store->Compact(EncodeLedgerState(state), state.applied, [this](const Status& status) {
    if (!status.ok() && !failed_.exchange(true)) parts_.on_ledger_failure(status);
    compacting_.store(false);
  });
}

void ControllerLoop::PerformReady() {
  if (pending_.empty()) return;
  if (pending_.front().after > durable_) {
    std::lock_guard lock(mutex_);
    durable_ = durable_shared_;
  }
  const WallTime wall = parts_.clock().wall;
  while (!pending_.empty() && pending_.front().after <= durable_) {
    Pending pending = std::move(pending_.front());
    pending_.pop_front();
    if (auto* reply = std::get_if<ViewReply>(&pending.body)) {
      reply->done(std::move(reply->view));
    } else if (auto* confirm = std::get_if<ConfirmFence>(&std::get<EffectBody>(pending.body))) {
      confirmed_.push_back({confirm->job, confirm->generation});
    } else {
      Perform(std::get<EffectBody>(pending.body), wall);
    }
  }
}

void ControllerLoop::Perform(EffectBody& body, WallTime wall) {
  struct Visitor {
    LoopOutputs& out;
    WallTime wall;
    void operator()(const AppendRecord&) const { EVERSTEP_CHECK(false && "appends never wait"); }
    void operator()(const SendCommand& effect) const { out.Send(effect); }
    void operator()(const CloseSession& effect) const { out.Close(effect); }
    void operator()(const StartProbe& effect) const { out.Probe(effect); }
    void operator()(const ConfirmFence&) const { EVERSTEP_CHECK(false && "answered by PerformReady"); }
    void operator()(const ReplyToOperator& effect) const { out.Reply(effect); }
    void operator()(const Notice& effect) const { out.Notify(effect, wall); }
    void operator()(const ForwardLines& effect) const { out.Forward(effect); }
    void operator()(const ForwardMetric& effect) const { out.Forward(effect); }
    void operator()(const Measured& effect) const { out.Measure(effect); }
  };
  std::visit(Visitor{*parts_.outputs, wall}, body);
}

void ControllerLoop::AnswerViewRequests() {
  std::vector<ViewRequest> requests;
  {
    std::lock_guard lock(mutex_);
    requests.swap(view_requests_);
  }
  if (requests.empty()) return;
  const Now now = parts_.clock();
  if (view_ == nullptr || view_stale_ || now.instant - view_built_ > options_.view_age_max) {
    view_ = std::make_shared<const ClusterView>(parts_.core->MakeView(now));
    view_built_ = now.instant;
    view_stale_ = false;
  }
  for (ViewRequest& request : requests) {
    pending_.push_back({appended_, ViewReply{std::move(request), view_}});
  }
}

}  // namespace everstep
