// Facts: what an agent tells the controller. Past tense, idempotent, sent again until acknowledged (in order of
// their sequence). Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/time.h"
#include "proto/model/assignment.h"
#include "proto/model/progress.h"
#include "proto/model/rank_messages.h"
#include "proto/model/server.h"

namespace everstep {

// A rank process as the agent sees it; all of them are listed when an agent registers.
struct ProcessStatus {
  JobUid job;
  ProcessId process;
  DeviceIndex device;
  int64_t pid = 0;
  bool joined = false;               // waits in Join or has an assignment
  std::string mesh_address;
  Generation promised;               // highest Fence it answered
  bool collected = false;            // answered Collect(promised) and has no assignment since
  RankReport report;                 // the answer, when collected
  Generation assigned;               // newest assignment it took; 0: none
  Progress progress;
  bool operator==(const ProcessStatus&) const = default;
};

struct ProcessStarted { JobUid job; ProcessId process; int64_t pid = 0; };
struct ProcessStartFailed { JobUid job; ProcessId process; Reason reason = Reason::kProgramMissing; std::string message; };
struct ProcessExited {
  JobUid job;
  ProcessId process;
  int32_t exit_code = 0;             // valid when signal == 0
  int32_t signal = 0;
  bool finished = false;             // RankFinished was said, or an opaque program ended with code 0
  Progress progress;                 // its page, read after its death
  std::vector<std::string> last_lines;  // newest last, at most 20
  Duration noticed_ago{};            // between the kernel's notice and the sending of this fact
};
struct ProcessJoined { JobUid job; ProcessId process; int64_t pid = 0; std::string mesh_address; };
struct ProcessCollected { JobUid job; ProcessId process; CollectAnswer answer; };
struct ProcessConnected { JobUid job; ProcessId process; RankConnected connected; };
struct ProcessReady { JobUid job; ProcessId process; RankReady ready; };
struct ProcessFailed { JobUid job; ProcessId process; RankFailed failed; };
struct SnapshotHeld { JobUid job; SnapshotInfo snapshot; };      // a verified copy is held by this agent
struct SnapshotLost { JobUid job; SnapshotInfo snapshot; Reason reason = Reason::kNone; std::string message; };
struct MetricObserved { JobUid job; ProcessId process; MetricReported metric; };
struct LinesPrinted { JobUid job; ProcessId process; std::vector<std::string> lines; };  // bounded
struct ProbeReturned { uint64_t nonce = 0; };
struct StorageTroubled { Reason reason = Reason::kStorageFailed; std::string message; };

using Fact = std::variant<ProcessStarted, ProcessStartFailed, ProcessExited, ProcessJoined, ProcessCollected,
                          ProcessConnected, ProcessReady, ProcessFailed, SnapshotHeld, SnapshotLost, MetricObserved,
                          LinesPrinted, ProbeReturned, StorageTroubled>;

// The first thing an agent says on a stream.
struct AgentHello {
  uint32_t protocol_version = kProtocolVersion;
  ServerInventory inventory;
  uint64_t start_nonce = 0;          // drawn once per agent process: a new nonce is a new incarnation
  Incarnation incarnation;           // the one it has, when it reconnects; 0 otherwise
  Term highest_term;                 // it refuses lower ones
  std::vector<ProcessStatus> processes;
  std::vector<std::pair<JobUid, SnapshotInfo>> snapshots;
};

// One UDP datagram. Authenticated with the key of the stream (Welcome).
struct Heartbeat {
  ServerId server;
  Incarnation incarnation;
  uint64_t sequence = 0;             // only a higher one renews the lease
  uint64_t loop_counter = 0;         // of the agent's main loop
  CommandSequence acted;             // newest command acted on
  struct Vote { ProcessId process; Generation generation; Step step; RankPhase phase = RankPhase::kStarting; };
  std::vector<Vote> votes;           // newest vote seen to pass, per rank process; at most 64
};

}  // namespace everstep
