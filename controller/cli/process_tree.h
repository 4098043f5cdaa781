// The processes of one server of a local cluster, found through /proc: the agent, its descendants,
// and whatever left the tree (a grandchild after setsid) but still carries the server's mark in its
// environment. Called by the `local` commands on the main thread. Linux only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/time.h"

namespace everstep::cli {

// A process by pid and start time, so that a reused pid is not taken for it.
struct ProcessKey {
  pid_t pid = 0;
  uint64_t start_ticks = 0;  // field 22 of /proc/PID/stat
  auto operator<=>(const ProcessKey&) const = default;
};

struct ProcessInfo {
  ProcessKey key;
  pid_t parent = 0;
  char state = '?';  // 'T' stopped, 'Z' zombie
};

// Every process this user can see, zombies left out.
std::vector<ProcessInfo> AllProcesses();

// True while that very process runs (a zombie does not).
bool IsAlive(const ProcessKey& key);
// The start time of a live process; 0 when there is none.
uint64_t StartTicks(pid_t pid);

// The root's process and all descendants, and every process whose environment holds `mark`
// ("NAME=value").
std::vector<ProcessInfo> ProcessTree(const ProcessKey& root, const std::string& mark);

// Sends `signal` to the root first (so that it cannot start others), then to the rest, until a look
// finds nobody that the signal has not reached. Returns the pids it was sent to. REQUIRES: signal
// is SIGKILL, SIGSTOP or SIGCONT.
std::vector<pid_t> SignalTree(const ProcessKey& root, const std::string& mark, int signal);

// Waits until the process is gone. False when it is not within the timeout.
bool WaitUntilGone(const ProcessKey& key, Duration timeout);

}  // namespace everstep::cli
