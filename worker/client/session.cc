#include "worker/client/session.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "worker/client/progress_writer.h"
#include "worker/client/session_impl.h"
#include "worker/collective/vote.h"

namespace everstep {
namespace {

constexpr int kExitInfrastructure = 75;  // JobExit::kInfrastructure
constexpr Duration kGreetingMax = Seconds(10);
constexpr Duration kFlushMax = Seconds(5);
constexpr size_t kMetricBacklogBytesMax = 1u << 20;
constexpr uint64_t kUserGroupFirst = uint64_t{1} << 32;  // ids below are the session's own

Instant Now() { return Instant(std::chrono::nanoseconds(client::BoottimeNanoseconds())); }

session::SessionPolicy PolicyOf(const SessionOptions& options, const client::RankEnvironment& environment) {
  session::SessionPolicy policy;
  policy.process = environment.process;
  policy.abort_confirm_max = options.abort_confirm_max;
  policy.abort_on_failure = environment.agent_socket.empty();
  return policy;
}

int PollTimeout(Instant deadline) {
  if (deadline == kNever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

}  // namespace

Session::Impl::Impl(const SessionOptions& options, client::RankEnvironment environment)
    : options_(options), environment_(std::move(environment)), core_(PolicyOf(options_, environment_)) {
  effects_.reserve(8);
}

Session::Impl::~Impl() {
  stopping_.store(true);
  if (io_thread_.joinable()) {
    WakeIo();
    io_thread_.join();
  }
  // The communicators call back to this object while they are destroyed.
  dp_group.reset();
  pp_group.reset();
  world.reset();
  listener_.reset();
  if (wake_fd_ >= 0) close(wake_fd_);
  if (work_fd_ >= 0) close(work_fd_);
  if (page_ != nullptr && page_ != own_page_.get()) munmap(page_, sizeof(ProgressPage));
}

Status Session::Impl::Start() {
  EVERSTEP_RETURN_IF_ERROR(MapPage());
  collective::MeshListener::Options listen;
  listen.interface = environment_.host;
  if (is_static()) {
    const std::string& address = environment_.static_world[static_cast<size_t>(environment_.static_rank)];
    const size_t colon = address.rfind(':');
    listen.interface = address.substr(0, colon);
    listen.port = static_cast<uint16_t>(std::strtoul(address.c_str() + colon + 1, nullptr, 10));
  }
  EVERSTEP_ASSIGN_OR_RETURN(listener_, collective::MeshListener::Create(listen));
  uint64_t staging_max = 0;
  if (!is_static()) {
    EVERSTEP_RETURN_IF_ERROR(link_.Connect(environment_.agent_socket));
    EVERSTEP_ASSIGN_OR_RETURN(staging_max, Greet());
  }
  if (environment_.staging_fd >= 0) {
    EVERSTEP_RETURN_IF_ERROR(staging_.Open(environment_.staging_fd, environment_.process, staging_max));
  }
  if (is_static()) return OkStatus();
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return Unavailable(std::string("eventfd: ") + std::strerror(errno));
  io_thread_ = std::thread([this] { IoLoop(); });
  return OkStatus();
}

Status Session::Impl::MapPage() {
  if (environment_.page_fd < 0) {
    own_page_ = std::make_unique<ProgressPage>();
    page_ = own_page_.get();
  } else {
    void* mapped = mmap(nullptr, sizeof(ProgressPage), PROT_READ | PROT_WRITE, MAP_SHARED, environment_.page_fd, 0);
    if (mapped == MAP_FAILED) {
      return InvalidArgument("EVERSTEP_PAGE_FD is " + std::to_string(environment_.page_fd) +
                             ": it can't be mapped: " + std::strerror(errno));
    }
    close(environment_.page_fd);
    page_ = static_cast<ProgressPage*>(mapped);
  }
  client::WriteProgress(*page_, core_.progress());
  return OkStatus();
}

void Session::Impl::Exit(const std::string& message) const {
  std::fprintf(stderr, "everstep: rank process %llu leaves: %s\n",
               static_cast<unsigned long long>(environment_.process.value), message.c_str());
  std::fflush(nullptr);
  _exit(kExitInfrastructure);
}

// ---- events and effects

void Session::Impl::Post(const session::Event& event) {
  std::optional<Generation> abort;
  {
    const std::lock_guard lock(mutex_);
    DispatchLocked(event);
    abort = std::exchange(abort_wanted_, std::nullopt);
  }
  if (abort) RunAbort(*abort);
}

session::CallAnswered Session::Impl::Call(const session::Event& event) {
  std::optional<Generation> abort;
  session::CallAnswered answer;
  {
    const std::lock_guard lock(mutex_);
    answer_.reset();
    DispatchLocked(event);
    EVERSTEP_CHECK(answer_.has_value());
    answer = std::move(*answer_);
    answer_.reset();
    abort = std::exchange(abort_wanted_, std::nullopt);
  }
  if (abort) RunAbort(*abort);
  return answer;
}

void Session::Impl::DispatchLocked(const session::Event& event) {
  effects_.clear();
  core_.Step(event, Now(), effects_);
  for (session::Effect& effect : effects_) PerformLocked(effect);
  while (!local_events_.empty()) {
    const session::Event next = std::move(local_events_.front());
    local_events_.pop_front();
    effects_.clear();
    core_.Step(next, Now(), effects_);
    for (session::Effect& effect : effects_) PerformLocked(effect);
  }
}

void Session::Impl::PerformLocked(session::Effect& effect) {
  if (auto* page = std::get_if<session::UpdatePage>(&effect)) {
    if (page->progress.phase == RankPhase::kReady) collective_sequence_ = 0;
    page->progress.collective_sequence = collective_sequence_;
    client::WriteProgress(*page_, page->progress);
  } else if (auto* answer = std::get_if<session::CallAnswered>(&effect)) {
    answer_ = std::move(*answer);
    wake_training_.notify_all();
  } else if (auto* send = std::get_if<session::SendToAgent>(&effect)) {
    if (is_static()) {
      AnswerLocallyLocked(send->message);
    } else {
      SendLocked(send->message);
    }
  } else if (auto* abort = std::get_if<session::AbortMesh>(&effect)) {
    abort_wanted_ = abort->generation;
    left_generation_.store(std::max(left_generation_.load(), abort->generation.value));
  } else if (auto* keep = std::get_if<session::KeepSnapshots>(&effect)) {
    staging_.Keep(keep->protected_step);
    if (keep->discard) staging_.Discard(keep->discard_above);
  } else if (auto* exit = std::get_if<session::ExitProcess>(&effect)) {
    Exit(exit->message);
  } else {
    if (std::holds_alternative<session::CopySnapshot>(effect)) work_fd_ = std::exchange(provided_fd_, -1);
    std::visit(
        [this](auto& e) {
          if constexpr (std::is_constructible_v<Work, std::decay_t<decltype(e)>&&>) work_.emplace(std::move(e));
        },
        effect);
    wake_training_.notify_all();
  }
}

void Session::Impl::SendLocked(const RankToAgent& message) {
  const Status status = link_.Send(message);
  if (status.code() == StatusCode::kUnavailable) Exit("the agent is gone (" + status.message() + ")");
  if (!status.ok()) EVERSTEP_REPORT_BUG("a message to the agent exceeds a limit");
  if (link_.wants_to_write()) WakeIo();
}

void Session::Impl::AnswerLocallyLocked(const RankToAgent& message) {
  if (std::holds_alternative<RankJoin>(message)) {
    local_events_.emplace_back(AssignRank{client::StaticAssignment(environment_, options_.micro_batch_count),
                                          Rank(environment_.static_rank)});
  } else if (const auto* ready = std::get_if<RankReady>(&message)) {
    local_events_.emplace_back(ResumeRank{ready->generation, Step(0)});
  } else if (const auto* failed = std::get_if<RankFailed>(&message)) {
    std::string text = "a static world can't recover: " + failed->message;
    if (failed->suspect.value >= 0) text += " (rank " + std::to_string(failed->suspect.value) + ")";
    local_events_.emplace_back(StopRank{std::move(text)});
  }
}

void Session::Impl::RunAbort(Generation generation) {
  std::vector<std::shared_ptr<collective::Communicator>> communicators;
  std::shared_ptr<collective::AbortSource> connect_abort;
  {
    const std::lock_guard lock(mutex_);
    aborted_ = std::max(aborted_, generation);
    if (connect_generation_ <= generation) connect_abort = connect_abort_;
    for (const Tracked& tracked : tracked_) {
      if (tracked.generation > generation) continue;
      if (auto communicator = tracked.communicator.lock()) communicators.push_back(std::move(communicator));
    }
  }
  const Status reason = Aborted("generation " + std::to_string(generation.value) + " is over");
  if (connect_abort) connect_abort->Trigger(reason);
  for (const auto& communicator : communicators) communicator->Abort(reason);
  for (const auto& communicator : communicators) {
    if (const Status status = communicator->AbortAndWait(reason, options_.abort_confirm_max); !status.ok()) {
      Exit("a collective did not end after its abort: " + status.message());
    }
  }
  Post(session::AbortConfirmed{generation});
}

// ---- the agent

Result<uint64_t> Session::Impl::Greet() {
  RankHello hello;
  hello.process = environment_.process;
  hello.pid = getpid();
  hello.mesh_address = listener_->address();
  EVERSTEP_RETURN_IF_ERROR(link_.Send(hello));
  const Instant deadline = Now() + kGreetingMax;
  while (true) {
    EVERSTEP_RETURN_IF_ERROR(link_.Flush());
    auto received = link_.Receive();
    if (!received.ok()) return Unavailable("the agent closed before it answered: " + received.status().message());
    for (client::AgentLink::Received& r : *received) {
      if (const auto* refused = std::get_if<HelloRefused>(&r.message)) {
        return FailedPrecondition("the agent refused this process: " + refused->message);
      }
      const auto* accepted = std::get_if<HelloAccepted>(&r.message);
      if (accepted == nullptr) return Internal("the agent's first message is not an answer to the greeting");
      // Messages behind the answer in the same read belong to the session.
      const std::lock_guard lock(mutex_);
      for (size_t i = static_cast<size_t>(&r - received->data()) + 1; i < received->size(); ++i) {
        DispatchLocked(std::visit([](auto& m) { return session::Event(std::move(m)); }, (*received)[i].message));
      }
      return accepted->staging_bytes_max;
    }
    if (Now() >= deadline) return Unavailable("the agent did not answer the greeting");
    pollfd waiting{link_.fd(), static_cast<short>(POLLIN | (link_.wants_to_write() ? POLLOUT : 0)), 0};
    if (poll(&waiting, 1, PollTimeout(deadline)) < 0 && errno != EINTR) {
      return Unavailable(std::string("poll: ") + std::strerror(errno));
    }
  }
}

void Session::Impl::WakeIo() {
  if (wake_fd_ < 0 || std::this_thread::get_id() == io_thread_.get_id()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

void Session::Impl::IoLoop() {
  while (!stopping_.load()) {
    Instant deadline;
    short interest = POLLIN;
    {
      const std::lock_guard lock(mutex_);
      deadline = core_.NextDeadline();
      if (link_.wants_to_write()) interest = static_cast<short>(POLLIN | POLLOUT);
    }
    pollfd waiting[2] = {{link_.fd(), interest, 0}, {wake_fd_, POLLIN, 0}};
    if (poll(waiting, 2, PollTimeout(deadline)) < 0 && errno != EINTR) Exit(std::string("poll: ") + std::strerror(errno));
    if ((waiting[1].revents & POLLIN) != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
    }
    if ((waiting[0].revents & POLLOUT) != 0) {
      const std::lock_guard lock(mutex_);
      const Status status = link_.Flush();
      if (!status.ok() && !stopping_.load()) DispatchLocked(session::AgentLost{status.message()});
    }
    if ((waiting[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) ReadAgent();
    if (deadline != kNever && Now() >= deadline) Post(session::DeadlinePassed{});
  }
}

void Session::Impl::ReadAgent() {
  auto received = link_.Receive();
  if (!received.ok()) {
    Post(session::AgentLost{received.status().message()});
    stopping_.store(true);  // reached only after the session is finished
    return;
  }
  for (client::AgentLink::Received& r : *received) {
    session::Event event = std::visit([](auto& m) { return session::Event(std::move(m)); }, r.message);
    std::optional<Generation> abort;
    {
      const std::lock_guard lock(mutex_);
      provided_fd_ = r.fd;
      DispatchLocked(event);
      if (provided_fd_ >= 0) close(std::exchange(provided_fd_, -1));  // nobody wants it any more
      abort = std::exchange(abort_wanted_, std::nullopt);
    }
    if (abort) RunAbort(*abort);
  }
}

// ---- the observer of communicators

void Session::Impl::CollectiveEntered() {
  const std::lock_guard lock(mutex_);
  ++collective_sequence_;
  Progress progress = core_.progress();
  progress.collective_sequence = collective_sequence_;
  client::WriteProgress(*page_, progress);
}

void Session::Impl::CollectiveEnded(Generation generation, Rank suspect, const Status& failure) {
  Post(session::CollectiveFailed{generation, suspect, failure});
}

void Session::Impl::Track(Generation generation, const std::shared_ptr<collective::Communicator>& communicator) {
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(tracked_, [](const Tracked& t) { return t.communicator.expired(); });
    tracked_.push_back({generation, communicator});
    over = generation <= aborted_;
  }
  if (over) communicator->Abort(Aborted("generation " + std::to_string(generation.value) + " is over"));
}

// ---- the program's calls

Result<Membership> Session::Impl::Join() {
  // A failure that the program saw in an asynchronous operation only is told before the rank leaves.
  for (const auto& communicator : {world, dp_group, pp_group}) {
    if (communicator && communicator->aborted()) {
      CollectiveEnded(communicator->generation(), communicator->Suspect(), communicator->abort_reason());
    }
  }
  {
    const std::lock_guard lock(mutex_);
    answer_.reset();
  }
  Post(session::JoinCalled{});
  while (true) {
    std::optional<Work> work;
    {
      std::unique_lock lock(mutex_);
      wake_training_.wait(lock, [this] { return answer_.has_value() || work_.has_value(); });
      if (answer_) {
        const session::CallAnswered answer = std::move(*answer_);
        answer_.reset();
        if (!answer.status.ok()) return answer.status;
        joined_generation_.store(core_.assignment().generation.value);
        return MembershipLocked();
      }
      work = std::exchange(work_, std::nullopt);
    }
    Post(std::visit([this](const auto& w) { return Do(w); }, *work));
  }
}

Status Session::Impl::BeginStep(Step step) { return Call(session::StepBegun{step}).status; }
Status Session::Impl::GradientsComplete(Step step) { return Call(session::GradientsCompleted{step}).status; }

Result<CommitOutcome> Session::Impl::Commit(Step step, const VoteExtras& extras) {
  if (!apply) return FailedPrecondition("Commit needs SetApply");
  Generation generation;
  {
    const std::lock_guard lock(mutex_);
    generation = core_.progress().generation;
    if (core_.progress().phase == RankPhase::kComputing) DispatchLocked(session::GradientsCompleted{step});
  }
  const session::CallAnswered started = Call(session::VoteStarted{step});
  if (!started.status.ok()) return started.status;

  collective::VoteBallot ballot;
  ballot.generation = generation;
  ballot.step = step;
  ballot.protected_step_min = started.protected_step.value;
  ballot.pending_generation_max = started.pending_generation.value;
  ballot.flags_or = (extras.out_of_range ? collective::kVoteOutOfRange : 0) |
                    (extras.not_finite ? collective::kVoteNotFinite : 0);
  const collective::VoteFence fence{&mutex_, [this] { return core_.left(); }, {}};
  const Result<collective::VoteBallot> result = collective::Vote(world->inner(), ballot, fence);

  session::CallAnswered decided;
  if (result.ok()) {
    session::VotePassed passed;
    passed.step = step;
    passed.generation = generation;
    passed.pending_generation_max = Generation(result->pending_generation_max);
    passed.protected_step_min = Step(result->protected_step_min);
    passed.out_of_range = (result->flags_or & collective::kVoteOutOfRange) != 0;
    passed.not_finite = (result->flags_or & collective::kVoteNotFinite) != 0;
    decided = Call(passed);
  } else {
    decided = Call(session::VoteFailed{step, world->Suspect(), result.status()});
  }
  if (!decided.status.ok()) return decided.status;
  if (decided.outcome == session::CallOutcome::kRedo) return CommitOutcome::kRedo;
  if (decided.outcome == session::CallOutcome::kNotFinite) return CommitOutcome::kNotFinite;

  // From here on the step is applied, whatever happens around it.
  if (const Status status = apply(step); !status.ok()) {
    // Memory is torn between two steps: this process has nothing left to offer.
    return Internal("apply of step " + std::to_string(step.value) + " failed: " + status.message());
  }
  const session::CallAnswered applied = Call(session::Applied{step});
  const int64_t every = environment_.snapshot_every;
  if (every > 0 && step.value % every == 0 && applied.outcome == session::CallOutcome::kDone) {
    // One that finds no free slot is skipped, and counted; a rank without staging memory has nowhere to put it.
    if (const Status status = Snapshot(); status.code() == StatusCode::kInternal) return status;
  }
  return applied.outcome == session::CallOutcome::kSwitch ? CommitOutcome::kSwitch : CommitOutcome::kApplied;
}

Status Session::Impl::Snapshot() {
  Progress progress;
  ShardIndex shard;
  {
    const std::lock_guard lock(mutex_);
    progress = core_.progress();
    if (core_.left()) return Aborted("the rank left its generation; call Join again");
    if (!progress.memory_valid) return FailedPrecondition("the state is not whole");
    shard = core_.assignment().ranks[static_cast<size_t>(core_.rank().value)].shard();
  }
  Result<SnapshotStaged> staged = staging_.Take(registry, progress.applied, shard, progress.generation);
  {
    const std::lock_guard lock(mutex_);
    staged.ok() ? ++counters_.snapshots_taken : ++counters_.snapshots_skipped;
  }
  if (!staged.ok()) return staged.status();
  Post(session::SnapshotTaken{std::move(staged).value()});
  return OkStatus();
}

void Session::Impl::ReportMetric(Step step, std::string_view name, double value) {
  if (is_static()) return;
  const std::lock_guard lock(mutex_);
  if (link_.outgoing_bytes() > kMetricBacklogBytesMax) {
    ++counters_.metrics_dropped;
    return;
  }
  SendLocked(MetricReported{step, std::string(name.substr(0, client::kTensorNameBytesMax)), value});
}

Status Session::Impl::Finish() {
  {
    const std::lock_guard lock(mutex_);
    if (core_.left()) return Aborted("the rank left its generation; call Join again");
  }
  if (const Status status = world->Barrier(); !status.ok()) {
    return Aborted("not all ranks came to their end: " + status.message());
  }
  if (const Status status = Call(session::FinishCalled{}).status; !status.ok()) return status;
  const Instant deadline = Now() + kFlushMax;
  while (!is_static()) {
    pollfd waiting{link_.fd(), POLLOUT, 0};
    {
      const std::lock_guard lock(mutex_);
      if (!link_.Flush().ok() || !link_.wants_to_write()) break;
    }
    if (Now() >= deadline) return Unavailable("the agent does not read its socket");
    poll(&waiting, 1, PollTimeout(deadline));
  }
  return OkStatus();
}

Result<std::unique_ptr<collective::Communicator>> Session::Impl::CreateGroup(std::span<const Rank> ranks, uint32_t id) {
  if (!world) return FailedPrecondition("Join comes first");
  return world->CreateGroup(ranks, collective::GroupId(kUserGroupFirst + id));
}

Progress Session::Impl::progress() const {
  const std::lock_guard lock(mutex_);
  Progress progress = core_.progress();
  progress.collective_sequence = collective_sequence_;
  return progress;
}

SessionCounters Session::Impl::counters() const {
  const std::lock_guard lock(mutex_);
  SessionCounters counters = counters_;
  counters.stale_refused = core_.stale_refused_count();
  return counters;
}

// ---- the public face

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

Result<std::unique_ptr<Session>> Session::Create(const SessionOptions& options) {
  const auto get = [](const char* name) -> const char* { return std::getenv(name); };
  EVERSTEP_ASSIGN_OR_RETURN(client::RankEnvironment environment, client::ReadEnvironment(get));
  return CreateIn(options, environment);
}

Result<std::unique_ptr<Session>> Session::CreateIn(const SessionOptions& options,
                                                   const client::RankEnvironment& environment) {
  auto impl = std::make_unique<Impl>(options, environment);
  EVERSTEP_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

Status Session::RegisterTensor(std::string_view name, std::string_view dtype, std::span<const int64_t> global_shape,
                               std::span<const int64_t> offsets, std::span<const int64_t> shape, void* data,
                               size_t bytes) {
  TensorInfo info;
  info.name = name;
  info.dtype = dtype;
  info.global_shape.assign(global_shape.begin(), global_shape.end());
  info.offsets.assign(offsets.begin(), offsets.end());
  info.shape.assign(shape.begin(), shape.end());
  info.bytes = bytes;
  return impl_->registry.Register(std::move(info), data);
}
void Session::ClearTensors() { impl_->registry.Clear(); }
void Session::SetLayout(std::function<Status(const Assignment&, const RankAssignment&)> layout) {
  impl_->layout = std::move(layout);
}
void Session::SetInitialize(std::function<Status()> initialize) { impl_->initialize = std::move(initialize); }
void Session::SetApply(std::function<Status(Step)> apply) { impl_->apply = std::move(apply); }
void Session::SetDataPosition(std::function<uint64_t()> position) { impl_->data_position = std::move(position); }
Result<Membership> Session::Join() { return impl_->Join(); }
collective::Communicator& Session::world() {
  EVERSTEP_CHECK(impl_->world != nullptr);
  return *impl_->world;
}
collective::Communicator& Session::dp_group() {
  EVERSTEP_CHECK(impl_->dp_group != nullptr);
  return *impl_->dp_group;
}
collective::Communicator& Session::pp_group() {
  EVERSTEP_CHECK(impl_->pp_group != nullptr);
  return *impl_->pp_group;
}
Result<std::unique_ptr<collective::Communicator>> Session::CreateGroup(std::span<const Rank> ranks, uint32_t id) {
  return impl_->CreateGroup(ranks, id);
}
Status Session::BeginStep(Step step) { return impl_->BeginStep(step); }
Status Session::GradientsComplete(Step step) { return impl_->GradientsComplete(step); }
Result<CommitOutcome> Session::Commit(Step step, const VoteExtras& extras) { return impl_->Commit(step, extras); }
Status Session::Snapshot() { return impl_->Snapshot(); }
void Session::ReportMetric(Step step, std::string_view name, double value) { impl_->ReportMetric(step, name, value); }
Status Session::Finish() { return impl_->Finish(); }
bool Session::generation_over() const { return impl_->generation_over(); }
bool Session::is_static() const { return impl_->is_static(); }
ProcessId Session::process() const { return impl_->process(); }
Progress Session::progress() const { return impl_->progress(); }
SessionCounters Session::counters() const { return impl_->counters(); }

}  // namespace everstep
