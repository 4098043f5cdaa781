// Commands: what the controller tells an agent. Each carries (term, sequence); agents refuse a lower term and an
// older sequence of the same stream. All are idempotent: an agent that already did it says so again. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/time.h"
#include "proto/model/assignment.h"
#include "proto/model/facts.h"
#include "proto/model/job.h"

namespace everstep {

struct Welcome {                     // answer to AgentHello
  Incarnation incarnation;
  Duration heartbeat_interval{};
  std::string heartbeat_address;     // host:port of the controller's UDP socket
  uint64_t heartbeat_key_id = 0;     // filled by the shell
  std::array<uint8_t, 32> heartbeat_key{};  // filled by the shell
  std::vector<ProcessId> keep;       // every other process is killed
};
struct Refuse {                      // the agent must not serve: it kills all its processes
  std::string message;
  bool permanent = false;            // a person must act (name taken, version too old): the agent exits. Otherwise its
};                                   // incarnation is dead: it comes back with a fresh nonce
struct SpawnProcess {
  JobUid job;
  ProcessId process;
  DeviceIndex device;
  bool standby = false;
  int32_t restart_count = 0;
  // Opaque jobs know their place before they start; joining ones get it from their assignment.
  Rank rank{-1};
  int32_t world_size = 0;
  int32_t local_rank = 0;
  int32_t local_world_size = 0;
  std::string master_address;        // host
  int32_t master_port = 0;
  Generation generation;
  JobSpec spec;
};
struct KillProcess { JobUid job; ProcessId process; Duration grace{}; };  // zero grace: SIGKILL at once
struct FenceProcesses { JobUid job; Generation generation; std::vector<ProcessId> processes; };
struct PrepareProcesses { JobUid job; Generation generation; std::vector<ProcessId> processes; };
struct AssignProcesses { Assignment assignment; };     // the agent hands it to its own processes named in it
struct ResumeProcesses { JobUid job; Generation generation; Step protected_step; };
struct ProtectedStepRaised { JobUid job; Step step; };
struct CopySnapshot {                // keep a verified copy of a peer's snapshot, or persist one's own
  JobUid job;
  SnapshotSource source;
  Digest128 digest{};
  uint64_t bytes = 0;
  SnapshotTier to = SnapshotTier::kPeer;
};
struct DropSnapshots { JobUid job; std::vector<SnapshotInfo> snapshots; };
struct ReleaseJob { JobUid job; };   // the job ended: kill its processes, free its memory
struct AcknowledgeFacts { FactSequence upto; };
struct Probe { uint64_t nonce = 0; };

using Command = std::variant<Welcome, Refuse, SpawnProcess, KillProcess, FenceProcesses, PrepareProcesses,
                             AssignProcesses, ResumeProcesses, ProtectedStepRaised, CopySnapshot, DropSnapshots,
                             ReleaseJob, AcknowledgeFacts, Probe>;

struct CommandHeader {
  Term term;
  CommandSequence sequence;          // rises by one within a stream
};

}  // namespace everstep
