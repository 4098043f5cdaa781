// Finding and signalling the whole process tree of a server, with real processes.
#include "controller/cli/process_tree.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>

namespace everstep::cli {
namespace {

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    poll(nullptr, 0, 5);
  }
  return true;
}

// A shell with a child, and a grandchild in a session of its own whose parent has ended: all carry
// the mark.
class Family {
 public:
  explicit Family(const std::string& mark) : mark_(mark) {
    pid_ = fork();
    if (pid_ == 0) {
      putenv(const_cast<char*>(mark_.c_str()));
      execl("/bin/sh", "sh", "-c", "(setsid sleep 300 &) ; sleep 300 & wait", nullptr);
      _exit(127);
    }
    key_ = ProcessKey{pid_, StartTicks(pid_)};
  }
  ~Family() {
    SignalTree(key_, mark_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  const ProcessKey& key() const { return key_; }
  std::vector<ProcessInfo> Tree() const { return ProcessTree(key_, mark_); }

 private:
  std::string mark_;
  pid_t pid_;
  ProcessKey key_;
};

TEST(ProcessTree, FindsDescendantsAndWhoeverLeftTheSession) {
  const std::string mark = "EVERSTEP_TEST_MARK=find-" + std::to_string(getpid());
  Family family(mark);
  ASSERT_TRUE(Eventually([&] { return family.Tree().size() == 3; })) << family.Tree().size();
  EXPECT_EQ(family.Tree().front().key, family.key()) << "the root comes first";
}

TEST(ProcessTree, KillReachesEveryMember) {
  const std::string mark = "EVERSTEP_TEST_MARK=kill-" + std::to_string(getpid());
  Family family(mark);
  ASSERT_TRUE(Eventually([&] { return family.Tree().size() == 3; }));
  EXPECT_EQ(SignalTree(family.key(), mark, SIGKILL).size(), 3u);
  EXPECT_TRUE(Eventually([&] { return family.Tree().empty(); }));
  EXPECT_TRUE(WaitUntilGone(family.key(), Seconds(20)));
}

TEST(ProcessTree, PausedTreeResumes) {
  const std::string mark = "EVERSTEP_TEST_MARK=pause-" + std::to_string(getpid());
  Family family(mark);
  ASSERT_TRUE(Eventually([&] { return family.Tree().size() == 3; }));
  const auto all = [&](char state) {
    for (const ProcessInfo& info : family.Tree()) {
      if ((info.state == 'T') != (state == 'T')) return false;
    }
    return true;
  };
  SignalTree(family.key(), mark, SIGSTOP);
  EXPECT_TRUE(Eventually([&] { return all('T'); }));
  EXPECT_FALSE(WaitUntilGone(family.key(), Milliseconds(1)));
  SignalTree(family.key(), mark, SIGCONT);
  EXPECT_TRUE(Eventually([&] { return all('S'); }));
}

TEST(ProcessTree, ReusedPidIsNotTakenForTheProcess) {
  const ProcessKey self{getpid(), StartTicks(getpid())};
  EXPECT_TRUE(IsAlive(self));
  EXPECT_FALSE(IsAlive(ProcessKey{self.pid, self.start_ticks + 1}));
  EXPECT_EQ(StartTicks(0), 0u);
}

}  // namespace
}  // namespace everstep::cli
