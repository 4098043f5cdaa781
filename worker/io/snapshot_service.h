// What the agent needs from the keeper of snapshots (checkpoint/): it is told of staged, wanted and assigned states and
// of commands, and answers with facts. Implementations return at once and work on threads of their own.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/ids.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "proto/model/rank_messages.h"
#include "worker/io/unique_fd.h"

namespace everstep {

class SnapshotService {
 public:
  // Called on any thread.
  struct Handler {
    std::function<void(Fact)> on_fact;  // SnapshotHeld, SnapshotLost, StorageTroubled
    std::function<void(ProcessId, SnapshotProvided, UniqueFd)> on_loaded;
    std::function<void(ProcessId, SnapshotUnavailable)> on_load_failed;
  };
  virtual ~SnapshotService() = default;

  // `staging`: a duplicate of the process's staging memory, now the service's own. Once per process, at its start.
  virtual void AddStaging(const JobUid& job, ProcessId process, UniqueFd staging) = 0;
  virtual void Staged(const JobUid& job, ProcessId process, const SnapshotStaged& staged) = 0;
  virtual void Load(const JobUid& job, ProcessId process, const SnapshotWanted& wanted) = 0;
  virtual void Copy(const CopySnapshot& command) = 0;
  virtual void Drop(const DropSnapshots& command) = 0;
  virtual void RaiseProtected(const JobUid& job, Step step) = 0;
  // Of a fence: lower generations are refused, and their transfers end.
  virtual void NoteGeneration(const JobUid& job, Generation generation) = 0;
  virtual void NoteAssigned(const JobUid& job, Generation generation, Step start) = 0;
  virtual void ProcessGone(const JobUid& job, ProcessId process) = 0;
  virtual void Release(const JobUid& job) = 0;

  // For AgentHello.
  virtual std::vector<std::pair<JobUid, SnapshotInfo>> Held() = 0;
  // Where peers read from; empty: nowhere.
  virtual std::string transfer_address() const = 0;
};

}  // namespace everstep
