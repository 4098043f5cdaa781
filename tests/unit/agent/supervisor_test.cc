// The process supervisor with real processes.
#include "worker/io/supervisor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "worker/io/process_tree.h"
#include "worker/io/root_directory.h"

namespace everstep {
namespace {

constexpr Duration kPatience = Seconds(20);

std::string MakeRoot() {
  std::string path = (std::filesystem::temp_directory_path() / "everstep-agent-XXXXXX").string();
  EVERSTEP_CHECK(mkdtemp(path.data()) != nullptr);
  return path;
}

// True once the process is gone or a zombie; waits on its pidfd.
bool DiesSoon(int pid) {
  UniqueFd handle(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!handle.valid()) return errno == ESRCH;
  pollfd waiting{handle.get(), POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(kPatience.count() / 1'000'000)) == 1;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

class SupervisorTest : public ::testing::Test {
 protected:
  SupervisorTest() : root_(MakeRoot()), loop_(EventLoop::Create().value()) {}
  ~SupervisorTest() override {
    supervisor_.reset();
    std::filesystem::remove_all(root_);
  }

  void Create(OutputCaptureLimits limits = {}) {
    SupervisorOptions options;
    options.server = "s01";
    options.root = root_;
    options.socket_path = root_ + "/agent.sock";
    options.output = limits;
    options.cgroups = cgroups_;
    options.last_lines_wait = kPatience;  // a loaded machine must not cost a test its lines
    auto created = Supervisor::Create(
        *loop_, options, [this](AgentEvent event) { events_.push_back(std::move(event)); }, [] {});
    ASSERT_TRUE(created.ok()) << created.status().ToString();
    supervisor_ = std::move(created).value();
  }

  StartProcess Shell(uint64_t process, const std::string& script) {
    StartProcess start;
    start.spawn.job = JobUid("job");
    start.spawn.process = ProcessId(process);
    start.spawn.spec.program = "/bin/sh";
    start.spawn.spec.arguments = {"-c", script};
    start.environment = {{"EVERSTEP_PROCESS_ID", std::to_string(process)}};
    return start;
  }

  // Turns the loop until `done` holds; false when that takes too long.
  bool RunUntil(const std::function<bool()>& done) {
    bool late = false;
    const auto timer = loop_->At(BootTimeNow() + kPatience, [&late] { late = true; });
    loop_->RunWhile([&] { return !late && !done(); });
    loop_->Cancel(timer);
    return !late;
  }

  template <typename T>
  std::optional<T> Find(uint64_t process) const {
    for (const AgentEvent& event : events_) {
      const auto* found = std::get_if<T>(&event);
      if (found != nullptr && found->process == ProcessId(process)) return *found;
    }
    return std::nullopt;
  }
  std::optional<ProcessExitedObserved> RunToEnd(StartProcess start) {
    const uint64_t id = start.spawn.process.value;
    supervisor_->Perform(start);
    RunUntil([&] { return Find<ProcessExitedObserved>(id) || Find<SpawnFailed>(id); });
    return Find<ProcessExitedObserved>(id);
  }

  const std::string root_;
  std::unique_ptr<EventLoop> loop_;
  std::vector<AgentEvent> events_;
  ProcessCgroups cgroups_;
  std::unique_ptr<Supervisor> supervisor_;
};

TEST_F(SupervisorTest, ReportsStartAndExitCode) {
  Create();
  const auto exited = RunToEnd(Shell(1, "exit 7"));
  ASSERT_TRUE(Find<ProcessSpawned>(1));
  EXPECT_GT(Find<ProcessSpawned>(1)->pid, 0);
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->exit_code, 7);
  EXPECT_EQ(exited->signal, 0);
}

TEST_F(SupervisorTest, ReportsTheSignalThatEndedAProcess) {
  Create();
  const auto exited = RunToEnd(Shell(1, "kill -SEGV $$"));
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->signal, SIGSEGV);
}

TEST_F(SupervisorTest, NamesServerAndPathWhenTheProgramIsMissing) {
  Create();
  struct Case {
    std::string program;
    std::string directory;
    Reason reason;
    std::string says;
  };
  const std::string text = root_ + "/text";
  std::ofstream(text) << "not a program";
  const Case cases[] = {
      {"/no/such/program", "", Reason::kProgramMissing, "/no/such/program"},
      {text, "", Reason::kProgramMissing, text},
      {"relative", "", Reason::kProgramMissing, "relative"},
      {"/bin/sh", "/no/such/directory", Reason::kUserError, "/no/such/directory"},
  };
  uint64_t id = 0;
  for (const Case& c : cases) {
    StartProcess start = Shell(++id, "exit 0");
    start.spawn.spec.program = c.program;
    start.spawn.spec.working_directory = c.directory;
    EXPECT_FALSE(RunToEnd(start));
    const auto failed = Find<SpawnFailed>(id);
    ASSERT_TRUE(failed) << c.program;
    EXPECT_EQ(failed->reason, c.reason) << failed->message;
    EXPECT_NE(failed->message.find(c.says), std::string::npos) << failed->message;
    EXPECT_NE(failed->message.find("s01"), std::string::npos) << failed->message;
  }
}

TEST_F(SupervisorTest, RefusesAJobUidThatWouldLeaveTheRoot) {
  Create();
  StartProcess start = Shell(1, "exit 0");
  start.spawn.job = JobUid("../../etc");
  EXPECT_FALSE(RunToEnd(start));
  EXPECT_TRUE(Find<SpawnFailed>(1));
}

TEST_F(SupervisorTest, CapturesBothStreamsInOrderAndKeepsTheLastLines) {
  Create();
  const auto exited = RunToEnd(Shell(1, "i=0; while [ $i -lt 30 ]; do echo line $i; i=$((i+1)); done; echo oops >&2; "
                                        "printf unfinished; exit 1"));
  ASSERT_TRUE(exited);
  ASSERT_EQ(exited->last_lines.size(), 20u);
  EXPECT_EQ(exited->last_lines[19], "unfinished");
  EXPECT_EQ(exited->last_lines[18], "oops");
  EXPECT_EQ(exited->last_lines[17], "line 29");
  const std::string log = ReadFile(root_ + "/logs/job/1.log");
  EXPECT_EQ(log.substr(0, 7), "line 0\n");
  EXPECT_NE(log.find("oops\nunfinished"), std::string::npos);
  const auto lines = Find<LinesCaptured>(1);
  ASSERT_TRUE(lines);
  EXPECT_EQ(lines->lines.front(), "line 0");
}

TEST_F(SupervisorTest, RotatesLogsAndBoundsWhatIsPassedOn) {
  OutputCaptureLimits limits;
  limits.log_bytes_max = 10'000;
  limits.batch_lines_max = 10;
  Create(limits);
  ASSERT_TRUE(RunToEnd(Shell(1, "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done")));
  EXPECT_TRUE(std::filesystem::exists(root_ + "/logs/job/1.log.1"));
  EXPECT_LE(std::filesystem::file_size(root_ + "/logs/job/1.log"), 80'000u);
  for (const AgentEvent& event : events_) {
    const auto* lines = std::get_if<LinesCaptured>(&event);
    if (lines != nullptr) {
      EXPECT_LE(lines->lines.size(), 11u);
    }
  }
}

TEST_F(SupervisorTest, PassesExactlyTheDescriptorsOfTheContract) {
  Create();
  const auto exited = RunToEnd(Shell(1, "ls /proc/$$/fd; cat"));  // cat: stdin is empty
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->exit_code, 0);
  EXPECT_EQ(exited->last_lines, (std::vector<std::string>{"0", "1", "2", "3", "4"}));
}

TEST_F(SupervisorTest, GivesTheProcessItsEnvironment) {
  Create();
  const std::string secret = root_ + "/secret";
  std::ofstream(secret) << "hush\n";
  StartProcess start = Shell(
      1, "echo $EVERSTEP_AGENT_SOCKET; echo $EVERSTEP_PAGE_FD $EVERSTEP_STAGING_FD; echo $TOKEN; "
         "test -d $EVERSTEP_OUTPUT_DIR && echo ok; pwd; echo $COLOR");
  start.spawn.spec.secret_files["TOKEN"] = secret;
  start.environment.emplace_back("COLOR", "blue");
  const auto exited = RunToEnd(start);
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->last_lines, (std::vector<std::string>{root_ + "/agent.sock", "3 4", "hush", "ok",
                                                          root_ + "/work/job/1", "blue"}));
}

TEST_F(SupervisorTest, ReadsTheProgressPageAfterDeath) {
  Create();
  // Byte 4 of the page is the phase, byte 5 whether memory is valid.
  const auto exited = RunToEnd(Shell(1, "printf '\\005\\001' | dd of=/proc/self/fd/3 bs=1 seek=4 conv=notrunc 2>&-; "
                                        "kill -9 $$"));
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->progress.phase, RankPhase::kReduced);
  EXPECT_TRUE(exited->progress.memory_valid);
}

TEST_F(SupervisorTest, DistrustsAPageThatWasBeingWrittenAtDeath) {
  Create();
  const auto exited = RunToEnd(Shell(1, "printf '\\001\\000\\000\\000\\005\\001' | dd of=/proc/self/fd/3 bs=1 "
                                        "conv=notrunc 2>&-; kill -9 $$"));
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->progress.phase, RankPhase::kReduced);
  EXPECT_FALSE(exited->progress.memory_valid);
}

TEST_F(SupervisorTest, HandsOutStagingMemoryThatCannotShrink) {
  UniqueFd staging;
  SupervisorOptions options;
  options.server = "s01";
  options.root = root_;
  options.socket_path = root_ + "/agent.sock";
  options.on_staging = [&staging](const JobUid&, ProcessId, UniqueFd fd) { staging = std::move(fd); };
  auto created = Supervisor::Create(*loop_, options, [this](AgentEvent e) { events_.push_back(std::move(e)); }, [] {});
  ASSERT_TRUE(created.ok());
  supervisor_ = std::move(created).value();
  ASSERT_TRUE(RunToEnd(Shell(1, "printf kept > /proc/self/fd/4 && kill -9 $$")));
  char bytes[4] = {};
  ASSERT_EQ(pread(staging.get(), bytes, sizeof(bytes), 0), 4);  // outlives the process
  EXPECT_EQ(std::string(bytes, 4), "kept");
  EXPECT_NE(ftruncate(staging.get(), 1), 0);
}

TEST_F(SupervisorTest, KillsGrandchildrenThatMovedToAnotherSession) {
  Create();
  const auto exited = RunToEnd(Shell(1, "setsid sleep 1000 & echo $!; exit 3"));
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->exit_code, 3);
  ASSERT_EQ(exited->last_lines.size(), 1u);
  const int grandchild = std::stoi(exited->last_lines[0]);
  EXPECT_TRUE(DiesSoon(grandchild));
}

TEST_F(SupervisorTest, KillsAGrandchildThatWipedItsEnvironmentAndLeftItsGroup) {
  cgroups_ = ProcessCgroups::Find(root_);
  Create();
  if (!cgroups_.available()) {
    std::puts("this machine has no writable cgroup v2 hierarchy: only that ranks run without is checked");
    EXPECT_TRUE(RunToEnd(Shell(1, "exit 0")));
    return;
  }
  supervisor_->Perform(Shell(1, "setsid env -i /bin/sh -c 'echo $$; exec sleep 1000' & exec sleep 1000"));
  ASSERT_TRUE(RunUntil([this] { return Find<LinesCaptured>(1).has_value(); }));
  const int grandchild = std::stoi(Find<LinesCaptured>(1)->lines[0]);
  EXPECT_TRUE(FindMarkedProcesses({"EVERSTEP_PROCESS_ID=1", RootMark(root_)}).size() == 1) << "only the rank has a mark";
  supervisor_->Perform(SignalProcess{ProcessId(1), SIGKILL});
  EXPECT_TRUE(DiesSoon(grandchild));
  ASSERT_TRUE(RunUntil([this] { return Find<ProcessExitedObserved>(1).has_value(); }));
  supervisor_.reset();  // the sweep is done
  EXPECT_FALSE(std::filesystem::exists(cgroups_.folder() + "/rank-1"));
  cgroups_.Close();
}

TEST_F(SupervisorTest, SignalsTheWholeGroup) {
  Create();
  supervisor_->Perform(Shell(1, "sleep 1000 & echo $!; trap 'exit 9' TERM; wait"));
  ASSERT_TRUE(RunUntil([this] { return Find<LinesCaptured>(1).has_value(); }));
  const int child = std::stoi(Find<LinesCaptured>(1)->lines[0]);
  supervisor_->Perform(SignalProcess{ProcessId(1), SIGTERM});
  ASSERT_TRUE(RunUntil([this] { return Find<ProcessExitedObserved>(1).has_value(); }));
  EXPECT_EQ(Find<ProcessExitedObserved>(1)->exit_code, 9);
  EXPECT_TRUE(DiesSoon(child));
}

TEST_F(SupervisorTest, TermReachesAStoppedProcess) {
  Create();
  supervisor_->Perform(Shell(1, "echo up; kill -STOP $$; exit 0"));
  ASSERT_TRUE(RunUntil([this] { return Find<LinesCaptured>(1).has_value(); }));
  supervisor_->Perform(SignalProcess{ProcessId(1), SIGTERM});
  ASSERT_TRUE(RunUntil([this] { return Find<ProcessExitedObserved>(1).has_value(); }));
}

TEST_F(SupervisorTest, TellsOfAnExitAlthoughAGrandchildHoldsTheOutput) {
  Create();
  const auto exited = RunToEnd(Shell(1, "sleep 1000 & echo last; exit 0"));
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->last_lines, (std::vector<std::string>{"last"}));
}

TEST_F(SupervisorTest, RanksDieWithAnAgentThatIsKilled) {
  int report[2];
  ASSERT_EQ(pipe(report), 0);
  const pid_t agent = fork();
  ASSERT_GE(agent, 0);
  if (agent == 0) {
    Create();
    supervisor_->Perform(Shell(1, "exec sleep 1000"));
    RunUntil([this] { return Find<ProcessSpawned>(1).has_value(); });
    const int pid = static_cast<int>(Find<ProcessSpawned>(1)->pid);
    [[maybe_unused]] const ssize_t written = write(report[1], &pid, sizeof(pid));
    pause();
    _exit(0);
  }
  int rank = 0;
  ASSERT_EQ(read(report[0], &rank, sizeof(rank)), static_cast<ssize_t>(sizeof(rank)));
  EXPECT_EQ(kill(rank, 0), 0);
  kill(agent, SIGKILL);
  waitpid(agent, nullptr, 0);
  EXPECT_TRUE(DiesSoon(rank));
  close(report[0]);
  close(report[1]);
}

TEST_F(SupervisorTest, KillsLeftoversOfAnEarlierAgentOfTheSameRootOnly) {
  auto root = OpenRoot(root_ + "/agent");
  ASSERT_TRUE(root.ok());
  const auto start = [](const std::string& mark) {
    std::string variable = mark;
    char* environment[] = {variable.data(), nullptr};
    std::string program = "/bin/sleep", argument = "1000";
    char* arguments[] = {program.data(), argument.data(), nullptr};
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments, environment), 0);
    return pid;
  };
  const pid_t ours = start(RootMark(root->path));
  const pid_t other = start(RootMark(root->path + "-other"));
  // Both have called exec once their environment is the new one.
  const Instant deadline = BootTimeNow() + kPatience;
  while (FindMarkedProcesses({RootMark(root->path)}).empty() ||
         FindMarkedProcesses({RootMark(root->path + "-other")}).empty()) {
    ASSERT_LT(BootTimeNow(), deadline);
  }
  auto killed = KillLeftovers(*root);
  ASSERT_TRUE(killed.ok());
  EXPECT_EQ(*killed, 1);
  EXPECT_TRUE(DiesSoon(ours));
  EXPECT_EQ(kill(other, 0), 0);
  kill(other, SIGKILL);
  waitpid(ours, nullptr, 0);
  waitpid(other, nullptr, 0);
}

TEST_F(SupervisorTest, OneRootServesOneAgent) {
  auto first = OpenRoot(root_);
  ASSERT_TRUE(first.ok());
  auto second = OpenRoot(root_);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("--root"), std::string::npos);
  EXPECT_NE(second.status().message().find(root_), std::string::npos);
  first->lock.Reset();
  EXPECT_TRUE(OpenRoot(root_).ok());
}

}  // namespace
}  // namespace everstep
