// The agent's root directory: made, checked, locked by one agent at a time. Called once by main.
#pragma once

#include <string>

#include "proto/base/status.h"
#include "worker/io/unique_fd.h"

namespace everstep {

struct RootDirectory {
  std::string path;   // absolute, without links
  UniqueFd lock;      // held as long as the agent lives
};

// kInvalidArgument, with field, value and remedy in one line: it can't be made, written or locked.
Result<RootDirectory> OpenRoot(const std::string& path);

// Kills every process that an earlier agent of this root left behind. REQUIRES: the lock is held.
// kDeadlineExceeded: one survives.
Result<int> KillLeftovers(const RootDirectory& root);

}  // namespace everstep
