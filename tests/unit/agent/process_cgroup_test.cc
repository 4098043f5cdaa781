// Control groups: against a folder that looks like one of cgroup2, and in the kernel's own where this machine lets us.
#include "worker/io/process_cgroup.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace everstep {
namespace {

namespace fs = std::filesystem;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

// A child that has left its session and sleeps.
pid_t StartSleeper() {
  const pid_t pid = fork();
  if (pid == 0) {
    setsid();
    for (;;) pause();
  }
  return pid;
}

int ReapedSignal(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return -1;
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

// The kernel makes these files in each new folder; here the test does.
class FakeHierarchy : public ::testing::Test {
 protected:
  FakeHierarchy() {
    path_ = (fs::temp_directory_path() / "everstep-cgroup-XXXXXX").string();
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
    WriteFile(path_ + "/cgroup.procs", "");
    // The first look makes the agent's folder, and finds that it is no cgroup.
    EXPECT_FALSE(ProcessCgroups::At(path_, "/root/a").available());
    EXPECT_EQ(std::distance(fs::directory_iterator(path_), fs::directory_iterator()), 1) << "nothing is left behind";
  }
  ~FakeHierarchy() override { fs::remove_all(path_); }

  ProcessCgroups Open(const std::string& folder) {
    fs::create_directory(folder);
    WriteFile(folder + "/cgroup.procs", "");
    return ProcessCgroups::At(path_, "/root/a");
  }
  std::string AgentFolder() const { return path_ + "/" + ProcessCgroups::NameOf("/root/a"); }

  std::string path_;
};

TEST_F(FakeHierarchy, AProcessEntersAFolderOfItsOwnAndOneWriteKillsIt) {
  const std::string folder = AgentFolder();
  const ProcessCgroups cgroups = Open(folder);
  ASSERT_TRUE(cgroups.available());
  const std::string enter = cgroups.MakeFor(ProcessId(7));
  EXPECT_EQ(enter, folder + "/rank-7/cgroup.procs");
  ASSERT_TRUE(fs::is_directory(folder + "/rank-7"));
  WriteFile(folder + "/rank-7/cgroup.kill", "");
  cgroups.Kill(ProcessId(7));
  EXPECT_EQ(ReadFile(folder + "/rank-7/cgroup.kill"), "1");
  fs::remove(folder + "/rank-7/cgroup.kill");
  EXPECT_TRUE(cgroups.Remove(ProcessId(7), Seconds(5)).ok());
  EXPECT_FALSE(fs::exists(folder + "/rank-7"));
}

TEST_F(FakeHierarchy, WithoutTheKillFileEachProcessThatIsListedIsKilled) {
  const std::string folder = AgentFolder();
  const ProcessCgroups cgroups = Open(folder);
  ASSERT_FALSE(cgroups.MakeFor(ProcessId(8)).empty());
  const pid_t first = StartSleeper(), second = StartSleeper();
  WriteFile(folder + "/rank-8/cgroup.procs", std::to_string(first) + "\n" + std::to_string(second) + "\n");
  EXPECT_TRUE(cgroups.Remove(ProcessId(8), Seconds(20)).ok());
  for (pid_t pid : {first, second}) {
    const bool reaped = kill(pid, 0) != 0;  // the one that was waited for
    EXPECT_TRUE(reaped || ReapedSignal(pid) == SIGKILL);
  }
}

TEST_F(FakeHierarchy, LeftoversOfAnEarlierAgentAreKilledAndCounted) {
  const std::string folder = AgentFolder();
  const ProcessCgroups cgroups = Open(folder);
  cgroups.MakeFor(ProcessId(1));
  cgroups.MakeFor(ProcessId(2));
  const pid_t left = StartSleeper();
  WriteFile(folder + "/rank-2/cgroup.procs", std::to_string(left) + "\n");
  const auto killed = cgroups.RemoveLeftovers(Seconds(20));
  ASSERT_TRUE(killed.ok());
  EXPECT_EQ(*killed, 1);
  EXPECT_EQ(kill(left, 0), -1);
  EXPECT_FALSE(fs::exists(folder + "/rank-1"));
}

TEST_F(FakeHierarchy, AnEmptyFolderThatSomebodyRemovedIsMadeAgain) {
  const ProcessCgroups cgroups = Open(AgentFolder());
  fs::remove_all(cgroups.folder());
  EXPECT_FALSE(cgroups.MakeFor(ProcessId(3)).empty());
  EXPECT_TRUE(fs::is_directory(cgroups.folder() + "/rank-3"));
}

TEST_F(FakeHierarchy, AParentThatCanNotBeWrittenMeansNone) {
  EXPECT_FALSE(ProcessCgroups::At(path_ + "/missing", "/root/a").available());
  const ProcessCgroups none;
  EXPECT_EQ(none.MakeFor(ProcessId(1)), "");
  EXPECT_TRUE(none.Remove(ProcessId(1), Duration(0)).ok());
  EXPECT_EQ(*none.RemoveLeftovers(Duration(0)), 0);
}

TEST(KernelsHierarchy, KillsWhateverAProcessStartedAndLeavesNoFolder) {
  const ProcessCgroups cgroups = ProcessCgroups::Find("/test/" + std::to_string(getpid()));
  if (!cgroups.available()) {
    std::puts("this machine has no writable cgroup v2 hierarchy: only that is checked");
    EXPECT_EQ(cgroups.MakeFor(ProcessId(1)), "");
    return;
  }
  const std::string enter = cgroups.MakeFor(ProcessId(1));
  ASSERT_FALSE(enter.empty());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    WriteFile(enter, "0");
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      setsid();
      [[maybe_unused]] const ssize_t told = write(ready[1], "x", 1);
      for (;;) pause();
    }
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[1]);
  cgroups.Kill(ProcessId(1));
  EXPECT_EQ(ReapedSignal(pid), SIGKILL);
  EXPECT_EQ(read(ready[0], &byte, 1), 0) << "the grandchild is gone, and its end of the pipe with it";
  close(ready[0]);
  EXPECT_TRUE(cgroups.Remove(ProcessId(1), Seconds(20)).ok());
  cgroups.Close();
  EXPECT_FALSE(fs::exists(cgroups.folder()));
}

}  // namespace
}  // namespace everstep
