#include "worker/io/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace everstep {

Result<std::unique_ptr<Supervisor>> Supervisor::Create(EventLoop& loop, SupervisorOptions options, Deliver deliver,
                                                       std::function<void()> before_exit) {
  // Orphans of rank processes become children of the agent, so that they can be seen and reaped.
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    return Internal(std::string("cannot become a child subreaper: ") + strerror(errno));
  }
  std::unique_ptr<Supervisor> supervisor(
      new Supervisor(loop, std::move(options), std::move(deliver), std::move(before_exit)));
  Supervisor* raw = supervisor.get();
  OutputCapture::Handler handler;
  handler.on_lines = [raw](ProcessId process, std::vector<std::string> lines) {
    raw->deliver_(LinesCaptured{process, std::move(lines)});
  };
  handler.on_trouble = [raw](Reason reason, std::string message) {
    raw->deliver_(StorageWentWrong{reason, std::move(message)});
  };
  EVERSTEP_ASSIGN_OR_RETURN(supervisor->capture_, OutputCapture::Create(loop, supervisor->options_.output, handler));
  supervisor->spawner_ = std::make_unique<Spawner>(loop);
  raw->ReapOrphans();
  return supervisor;
}

Supervisor::Supervisor(EventLoop& loop, SupervisorOptions options, Deliver deliver, std::function<void()> before_exit)
    : loop_(loop), options_(std::move(options)), deliver_(std::move(deliver)), before_exit_(std::move(before_exit)) {}

Supervisor::~Supervisor() {
  for (auto& [id, entry] : entries_) {
    if (entry.pidfd.valid()) loop_.Unwatch(entry.pidfd.get());
  }
}

void Supervisor::Perform(const StartProcess& effect) {
  const ProcessId id = effect.spawn.process;
  auto page = ProgressPageMapping::Create();
  auto staging = CreateGrowingMemory("everstep-staging-" + std::to_string(id.value));
  if (!page.ok() || !staging.ok()) {
    const Status status = page.ok() ? staging.status() : page.status();
    deliver_(SpawnFailed{id, Reason::kNoCapacity, "server " + options_.server + ": " + status.message()});
    return;
  }
  if (options_.on_staging) {
    UniqueFd copy(fcntl(staging->get(), F_DUPFD_CLOEXEC, 0));
    if (copy.valid()) options_.on_staging(effect.spawn.job, id, std::move(copy));
  }
  SpawnRequest request;
  request.spawn = effect.spawn;
  request.environment = effect.environment;
  request.server = options_.server;
  request.root = options_.root;
  request.socket_path = options_.socket_path;
  request.cgroups = options_.cgroups;
  request.page_fd = page->fd();
  request.staging_fd = staging->get();
  entries_.insert_or_assign(
      id, Entry{effect.spawn.job, std::move(page).value(), std::move(staging).value(), 0, UniqueFd()});
  ++starting_count_;
  spawner_->Start(std::move(request), [this](SpawnResult result) { OnSpawned(std::move(result)); });
}

void Supervisor::OnSpawned(SpawnResult result) {
  --starting_count_;
  auto it = entries_.find(result.process);
  if (result.pid == 0) {
    deliver_(SpawnFailed{result.process, result.reason, result.message});
    return;
  }
  Entry& entry = it->second;  // it is forgotten only after it is reaped
  entry.pid = result.pid;
  entry.pidfd = std::move(result.pidfd);
  const ProcessId id = result.process;
  if (auto paths = PathsOf(options_.root, entry.job, id); paths.ok()) {
    capture_->Add(id, paths->log_file, std::move(result.output));
  }
  const Status watched = loop_.Watch(entry.pidfd.get(), EPOLLIN, [this, id](uint32_t) { OnExit(id); });
  EVERSTEP_CHECK(watched.ok());
  deliver_(ProcessSpawned{id, result.pid});
}

void Supervisor::OnExit(ProcessId process) {
  const Instant noticed = BootTimeNow();
  auto it = entries_.find(process);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  // The zombie still owns its number, so this can't hit a stranger's group.
  kill(-entry.pid, SIGKILL);
  options_.cgroups.Kill(process);
  siginfo_t info{};
  int waited = 0;
  do {
    waited = waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(entry.pidfd.get()), &info, WEXITED | WNOHANG);
  } while (waited != 0 && errno == EINTR);
  if (waited == 0 && info.si_pid == 0) return;
  loop_.Unwatch(entry.pidfd.get());
  entry.pidfd.Reset();
  entry.pid = 0;
  ProcessExitedObserved exited;
  exited.process = process;
  exited.noticed = noticed;
  if (info.si_code == CLD_EXITED) {
    exited.exit_code = info.si_status;
  } else {
    exited.signal = info.si_status;
  }
  exited.progress = entry.page.Read(/*writer_gone=*/true);
  spawner_->Sweep(options_.root, options_.cgroups, entry.job, process);

  // The last lines come from the capture thread; a disk that hangs must not delay the news of a death.
  struct Pending {
    bool told = false;
    EventLoop::TimerId timer;
  };
  auto pending = std::make_shared<Pending>();
  auto tell = [this, pending, exited = std::move(exited)](std::vector<std::string> lines) mutable {
    if (std::exchange(pending->told, true)) return;
    loop_.Cancel(pending->timer);
    exited.last_lines = std::move(lines);
    before_exit_();
    deliver_(std::move(exited));
  };
  const Duration wait = info.si_code == CLD_EXITED ? options_.own_last_lines_wait : options_.last_lines_wait;
  pending->timer = loop_.At(noticed + wait, [tell]() mutable { tell({}); });
  capture_->Finish(process, [tell](std::vector<std::string> lines) mutable { tell(std::move(lines)); });
}

void Supervisor::Perform(const SignalProcess& effect) {
  auto it = entries_.find(effect.process);
  if (it == entries_.end() || it->second.pid == 0) return;
  kill(-it->second.pid, effect.signal);
  if (getpgid(it->second.pid) != it->second.pid) {  // it moved to another group
    syscall(SYS_pidfd_send_signal, it->second.pidfd.get(), effect.signal, nullptr, 0);
  }
  if (effect.signal == SIGKILL) options_.cgroups.Kill(effect.process);
  // A stopped process acts on SIGTERM only when it goes on.
  if (effect.signal == SIGTERM) kill(-it->second.pid, SIGCONT);
}

void Supervisor::Perform(const NoteProcessGone& effect) {
  auto it = entries_.find(effect.process);
  if (it == entries_.end() || it->second.pid != 0) return;
  entries_.erase(it);
}

std::optional<Progress> Supervisor::ReadProgress(ProcessId process) const {
  auto it = entries_.find(process);
  if (it == entries_.end()) return std::nullopt;
  return it->second.page.Read(it->second.pid == 0);
}

std::vector<Heartbeat::Vote> Supervisor::ReadVotes() const {
  std::vector<Heartbeat::Vote> votes;
  for (const auto& [id, entry] : entries_) {
    if (entry.pid == 0) continue;
    const Progress progress = entry.page.Read(false);
    if (progress.generation == Generation(0)) continue;
    votes.push_back({id, progress.generation, progress.vote_passed, progress.phase});
  }
  return votes;
}

size_t Supervisor::alive_count() const {
  return static_cast<size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const auto& e) { return e.second.pid != 0; }));
}

void Supervisor::KillAllNow() {
  for (const auto& [id, entry] : entries_) {
    if (entry.pid == 0) continue;
    kill(-entry.pid, SIGKILL);
    options_.cgroups.Kill(id);
  }
}

void Supervisor::ReapOrphans() {
  // Not while a start is under way: the new process may be dead already and must be reaped through its pidfd.
  for (int turn = 0; turn < 64 && starting_count_ == 0; ++turn) {
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
    const bool known = std::any_of(entries_.begin(), entries_.end(),
                                   [&info](const auto& e) { return e.second.pid == info.si_pid; });
    if (known) break;  // OnExit is about to reap it
    waitid(P_PID, static_cast<id_t>(info.si_pid), &info, WEXITED | WNOHANG);
  }
  loop_.At(BootTimeNow() + Seconds(1), [this] { ReapOrphans(); });
}

}  // namespace everstep
