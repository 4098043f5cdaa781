#include "worker/io/spawner.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "worker/io/process_tree.h"

namespace everstep {
namespace {

// Descriptors of a rank process, besides 0 to 2. The exec status pipe closes on exec.
constexpr int kPageFd = 3;
constexpr int kStagingFd = 4;
constexpr int kStatusFd = 5;
constexpr int kFirstHighFd = 16;

std::string ErrorText(int error) { return std::error_code(error, std::generic_category()).message(); }

Status MakeDirectories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return Internal("cannot create directory " + path + ": " + error.message());
  return OkStatus();
}

// A copy above the fixed numbers, so that placing one descriptor never overwrites another.
UniqueFd HighCopy(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, kFirstHighFd)); }

struct ExecFailure {
  int32_t stage = 0;  // 0: setup, 1: chdir, 2: exec
  int32_t error = 0;
};

struct ChildPlan {
  const char* program = nullptr;
  char* const* arguments = nullptr;
  char* const* environment = nullptr;
  const char* working_directory = nullptr;
  int input = -1, output = -1, page = -1, staging = -1, status = -1;
  int cgroup = -1;  // its cgroup.procs; -1: none
  pid_t parent = 0;
};

// Runs in the forked child: only calls that are safe after a fork of a process with threads.
[[noreturn]] void RunChild(const ChildPlan& plan) {
  const auto fail = [&plan](int stage) {
    const ExecFailure failure{stage, errno};
    [[maybe_unused]] const ssize_t written = write(plan.status, &failure, sizeof(failure));
    _exit(127);
  };
  setpgid(0, 0);
  // Before anything else runs, so that nothing it starts is ever outside. A kernel that refuses costs only the cgroup.
  if (plan.cgroup >= 0) {
    [[maybe_unused]] const ssize_t entered = write(plan.cgroup, "0", 1);
  }
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail(0);
  if (getppid() != plan.parent) _exit(127);  // the agent died before the line above
  for (int signal = 1; signal < 32; ++signal) {
    if (signal != SIGKILL && signal != SIGSTOP) ::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (dup2(plan.input, 0) < 0 || dup2(plan.output, 1) < 0 || dup2(plan.output, 2) < 0 ||
      dup2(plan.page, kPageFd) < 0 || dup2(plan.staging, kStagingFd) < 0 ||
      dup3(plan.status, kStatusFd, O_CLOEXEC) < 0) {
    fail(0);
  }
  syscall(SYS_close_range, kStatusFd + 1, ~0u, 0);
  ChildPlan moved = plan;
  moved.status = kStatusFd;
  const auto fail_moved = [&moved](int stage) {
    const ExecFailure failure{stage, errno};
    [[maybe_unused]] const ssize_t written = write(moved.status, &failure, sizeof(failure));
    _exit(127);
  };
  if (chdir(plan.working_directory) != 0) fail_moved(1);
  execve(plan.program, plan.arguments, plan.environment);
  fail_moved(2);
  _exit(127);
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Values of secrets, each the content of a file without its last newline.
Status AddSecrets(const JobSpec& spec, std::vector<std::string>& environment) {
  constexpr std::streamsize kSecretBytesMax = 64 << 10;
  for (const auto& [name, path] : spec.secret_files) {
    std::ifstream file(path, std::ios::binary);
    std::string value(static_cast<size_t>(kSecretBytesMax), '\0');
    file.read(value.data(), kSecretBytesMax);
    if (!file.eof()) return InvalidArgument("secret " + name + ": cannot read " + path + ", or it is too large");
    value.resize(static_cast<size_t>(file.gcount()));
    if (!value.empty() && value.back() == '\n') value.pop_back();
    if (value.find('\0') != std::string::npos) return InvalidArgument("secret " + name + ": " + path + " is not text");
    environment.push_back(name + "=" + value);
  }
  return OkStatus();
}

SpawnResult Failed(const SpawnRequest& request, Reason reason, std::string message) {
  SpawnResult result;
  result.process = request.spawn.process;
  result.reason = reason;
  result.message = "server " + request.server + ": " + std::move(message);
  return result;
}

SpawnResult StartNow(const SpawnRequest& request) {
  const JobSpec& spec = request.spawn.spec;
  auto paths = PathsOf(request.root, request.spawn.job, request.spawn.process);
  if (!paths.ok()) return Failed(request, Reason::kUserError, paths.status().message());
  const std::string& program = spec.program;
  if (program.empty() || program.front() != '/') {
    return Failed(request, Reason::kProgramMissing, "program " + program + " is not an absolute path");
  }
  if (access(program.c_str(), X_OK) != 0) {
    return Failed(request, Reason::kProgramMissing, "program " + program + ": " + ErrorText(errno));
  }
  std::string working_directory = spec.working_directory;
  if (working_directory.empty()) {
    working_directory = paths->working_directory;
    if (Status made = MakeDirectories(working_directory); !made.ok()) {
      return Failed(request, Reason::kStorageFailed, made.message());
    }
  }
  if (Status made = MakeDirectories(paths->output_directory); !made.ok()) {
    return Failed(request, Reason::kStorageFailed, made.message());
  }

  std::vector<std::string> arguments{program};
  arguments.insert(arguments.end(), spec.arguments.begin(), spec.arguments.end());
  std::vector<std::string> environment;
  const auto given = [&spec, &request](const std::string& name) {
    return spec.secret_files.contains(name) ||
           std::any_of(request.environment.begin(), request.environment.end(),
                       [&](const auto& variable) { return variable.first == name; });
  };
  for (const char* name : {"PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH"}) {
    const char* value = getenv(name);
    if (value != nullptr && !given(name)) environment.push_back(std::string(name) + "=" + value);
  }
  for (const auto& [name, value] : request.environment) environment.push_back(name + "=" + value);
  environment.push_back("EVERSTEP_AGENT_SOCKET=" + request.socket_path);
  environment.push_back("EVERSTEP_PAGE_FD=" + std::to_string(kPageFd));
  environment.push_back("EVERSTEP_STAGING_FD=" + std::to_string(kStagingFd));
  environment.push_back("EVERSTEP_OUTPUT_DIR=" + paths->output_directory);
  environment.push_back(RootMark(request.root));
  if (Status added = AddSecrets(spec, environment); !added.ok()) {
    return Failed(request, Reason::kUserError, added.message());
  }

  int output[2], status[2];
  if (pipe2(output, O_CLOEXEC) != 0) return Failed(request, Reason::kStorageFailed, "no pipe: " + ErrorText(errno));
  UniqueFd output_read(output[0]), output_write(output[1]);
  if (pipe2(status, O_CLOEXEC) != 0) return Failed(request, Reason::kStorageFailed, "no pipe: " + ErrorText(errno));
  UniqueFd status_read(status[0]), status_write(status[1]);
  UniqueFd input(open("/dev/null", O_RDONLY | O_CLOEXEC));
  fcntl(output_read.get(), F_SETFL, O_NONBLOCK);
  UniqueFd high_input = HighCopy(input.get()), high_output = HighCopy(output_write.get());
  UniqueFd high_page = HighCopy(request.page_fd), high_staging = HighCopy(request.staging_fd);
  UniqueFd high_status = HighCopy(status_write.get());
  if (!high_input.valid() || !high_output.valid() || !high_page.valid() || !high_staging.valid() ||
      !high_status.valid()) {
    return Failed(request, Reason::kStorageFailed, "no descriptor: " + ErrorText(errno));
  }

  const std::vector<char*> argument_pointers = Pointers(arguments), environment_pointers = Pointers(environment);
  ChildPlan plan;
  plan.program = program.c_str();
  plan.arguments = argument_pointers.data();
  plan.environment = environment_pointers.data();
  plan.working_directory = working_directory.c_str();
  plan.input = high_input.get();
  plan.output = high_output.get();
  plan.page = high_page.get();
  plan.staging = high_staging.get();
  plan.status = high_status.get();
  const std::string cgroup = request.cgroups.MakeFor(request.spawn.process);
  UniqueFd cgroup_procs(cgroup.empty() ? -1 : open(cgroup.c_str(), O_WRONLY | O_CLOEXEC));
  plan.cgroup = cgroup_procs.get();
  plan.parent = getpid();
  // _Fork runs no handlers of libraries (gRPC registers some): the child only sets itself up and calls exec.
  const pid_t pid = _Fork();
  if (pid < 0) return Failed(request, Reason::kNoCapacity, "cannot fork: " + ErrorText(errno));
  if (pid == 0) RunChild(plan);
  setpgid(pid, pid);  // in the child too: whoever comes first
  output_write.Reset();
  high_output.Reset();
  status_write.Reset();
  high_status.Reset();
  // The child is not reaped before its pidfd says so, hence the pid is still its own.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  ExecFailure failure;
  ssize_t got = 0;
  do {
    got = read(status_read.get(), &failure, sizeof(failure));
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(sizeof(failure)) || !pidfd.valid()) {
    if (!pidfd.valid()) kill(pid, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED);
    const Status removed = request.cgroups.Remove(request.spawn.process, Duration(0));
    (void)removed;  // it had nothing but the child
    switch (failure.stage) {
      case 1:
        return Failed(request, Reason::kUserError,
                      "working directory " + working_directory + ": " + ErrorText(failure.error));
      case 2:
        return Failed(request, Reason::kProgramMissing, "program " + program + ": " + ErrorText(failure.error));
      default:
        return Failed(request, Reason::kStorageFailed, "cannot start " + program + ": " + ErrorText(failure.error));
    }
  }
  SpawnResult result;
  result.process = request.spawn.process;
  result.pid = pid;
  result.pidfd = std::move(pidfd);
  result.output = std::move(output_read);
  return result;
}

}  // namespace

Result<ProcessPaths> PathsOf(const std::string& root, const JobUid& job, ProcessId process) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  if (job.value.empty() || job.value.size() > 128 || job.value.front() == '.' ||
      !std::all_of(job.value.begin(), job.value.end(), allowed)) {
    return InvalidArgument("job uid \"" + job.value + "\" can't be part of a path");
  }
  const std::string name = std::to_string(process.value);
  return ProcessPaths{root + "/work/" + job.value + "/" + name, root + "/output/" + job.value + "/" + name,
                      root + "/logs/" + job.value + "/" + name + ".log"};
}

std::string RootMark(const std::string& root) { return "EVERSTEP_AGENT_ROOT=" + root; }

Spawner::Spawner(EventLoop& loop) : loop_(loop), thread_([this] { Run(); }) {}

Spawner::~Spawner() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Spawner::Start(SpawnRequest request, std::function<void(SpawnResult)> done) {
  auto work = [this, request = std::move(request), done = std::move(done)] {
    auto result = std::make_shared<SpawnResult>(StartNow(request));
    loop_.Post([result, done] { done(std::move(*result)); });
  };
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void Spawner::Sweep(const std::string& root, const ProcessCgroups& cgroups, const JobUid& job, ProcessId process) {
  auto work = [root, cgroups, job, process] {
    const Status removed = cgroups.Remove(process, Seconds(2));
    (void)removed;  // as below
    const auto killed = KillMarkedProcesses(
        {RootMark(root), "EVERSTEP_PROCESS_ID=" + std::to_string(process.value)}, Seconds(2));
    (void)killed;  // one that survives shows up in the next sweep, and at the agent's next start
    if (auto paths = PathsOf(root, job, process); paths.ok()) {
      rmdir(paths->working_directory.c_str());
      rmdir(paths->output_directory.c_str());
    }
  };
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void Spawner::Run() {
  pthread_setname_np(pthread_self(), "spawner");
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace everstep
