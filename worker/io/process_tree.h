// Finds processes by a mark in the environment that they started with, whatever session, group or parent they moved
// to, and kills them. Used for what a rank process left behind, and for leftovers of an earlier agent of the same
// root. Blocking (reads /proc): called on the spawner's thread, and once before the agent registers. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep {

// Pids, other than the caller's, whose initial environment holds every one of `marks` ("NAME=value"). Kernel threads
// and processes of other users are left out.
std::vector<int> FindMarkedProcesses(const std::vector<std::string>& marks);

// Kills them with SIGKILL, again and again until none is left (a process may fork meanwhile), and reaps those that
// became the caller's children. Returns how many were killed. kDeadlineExceeded: some are still there.
Result<int> KillMarkedProcesses(const std::vector<std::string>& marks, Duration limit);

}  // namespace everstep
