// What happens to an agent, as past-tense facts: the only input of AgentCore besides the time. Made by worker/io on
// the agent's loop thread. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/time.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "proto/model/progress.h"
#include "proto/model/rank_messages.h"

namespace everstep {

// One accepted connection of the agent's unix socket; never reused within one agent process.
using Connection = StrongNumber<struct ConnectionTag, uint64_t>;
// A file descriptor that the shell keeps for the core until it is sent or dropped; 0: none.
using DescriptorToken = StrongNumber<struct DescriptorTokenTag, uint64_t>;

// A stream to the controller is being opened: whatever is said on it must begin with AgentHello.
struct ControllerLinkUp {};
struct ControllerLinkDown { std::string message; };
struct CommandArrived { CommandHeader header; Command command; };

struct RankSocketOpened {
  Connection connection;
  int64_t peer_pid = 0;
  int64_t peer_group = 0;           // process group of the peer: the pid of the rank process that it belongs to
};
struct RankMessageArrived { Connection connection; RankToAgent message; };
struct RankSocketClosed { Connection connection; };

struct ProcessSpawned { ProcessId process; int64_t pid = 0; };
struct SpawnFailed { ProcessId process; Reason reason = Reason::kProgramMissing; std::string message; };
struct ProcessExitedObserved {
  ProcessId process;
  int32_t exit_code = 0;
  int32_t signal = 0;
  Progress progress;                // its page, read after its death
  std::vector<std::string> last_lines;
  Instant noticed;                  // when the kernel's notice was seen
};
struct LinesCaptured { ProcessId process; std::vector<std::string> lines; };

// What the keeper of snapshots (checkpoint/) has to say: SnapshotHeld or SnapshotLost, and the answers to LoadSnapshot.
struct KeeperReported { Fact fact; };
struct SnapshotLoaded { ProcessId process; SnapshotProvided answer; DescriptorToken descriptor; };
struct SnapshotLoadFailed { ProcessId process; SnapshotUnavailable answer; };

struct StorageWentWrong { Reason reason = Reason::kStorageFailed; std::string message; };  // logs, work directories
struct StopRequested {};            // the agent itself is asked to end
struct AgentTimeAdvanced {};

using AgentEvent =
    std::variant<ControllerLinkUp, ControllerLinkDown, CommandArrived, RankSocketOpened, RankMessageArrived,
                 RankSocketClosed, ProcessSpawned, SpawnFailed, ProcessExitedObserved, LinesCaptured, KeeperReported,
                 SnapshotLoaded, SnapshotLoadFailed, StorageWentWrong, StopRequested, AgentTimeAdvanced>;

}  // namespace everstep
