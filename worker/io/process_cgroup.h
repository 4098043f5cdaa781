// A control group (v2) for each rank process, below the agent's own: whatever the process starts stays in it, even when
// it wipes its environment, its session and its process group, and one write kills all of it. Where there is no writable
// unified hierarchy, the agent does without (process groups and the marks of process_tree.h). Thread-compatible; the
// kernel does the rest.
#pragma once

#include <string>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep {

class ProcessCgroups {
 public:
  ProcessCgroups() = default;                    // none: every call does nothing

  // Below the cgroup of the calling process in the unified hierarchy, named after the agent's root. None when there is
  // no such hierarchy, or it can't be written.
  static ProcessCgroups Find(const std::string& root);
  // Below `parent`, a folder that acts like one of cgroup2.
  static ProcessCgroups At(const std::string& parent, const std::string& root);

  // Short, and the same at each start of an agent of this root.
  static std::string NameOf(const std::string& root);

  bool available() const { return !folder_.empty(); }
  const std::string& folder() const { return folder_; }

  // The file that a process writes "0" to in order to enter its own cgroup, which is made here. Empty: none.
  std::string MakeFor(ProcessId process) const;
  // SIGKILL to all that is in it now, without waiting.
  void Kill(ProcessId process) const;
  // Kills until nothing lives in it and removes it. kDeadlineExceeded: something survives.
  Status Remove(ProcessId process, Duration limit) const;
  // The same for every process's cgroup that an earlier agent of this root left; returns how many processes there were.
  Result<int> RemoveLeftovers(Duration limit) const;
  // Removes the agent's own folder, when it is empty.
  void Close() const;

 private:
  std::string FolderOf(ProcessId process) const { return folder_ + "/rank-" + std::to_string(process.value); }

  std::string folder_;
};

}  // namespace everstep
