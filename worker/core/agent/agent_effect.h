// What AgentCore wants done, as imperatives. worker/io performs them in order on the agent's loop thread. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "worker/core/agent/agent_event.h"

namespace everstep {

// First message on the stream. The shell fills in each process's progress from its page, and what the keeper holds.
struct SayHello { AgentHello hello; };
struct SendFact { FactSequence sequence; Fact fact; };
// Ends the current stream. `reopen` false: open no new one until OpenControllerLink.
struct CloseControllerLink { bool reopen = true; };
struct OpenControllerLink {};
// Heartbeats go to Welcome's address, with its key, from now on.
struct StartHeartbeats { Welcome welcome; };
struct StopHeartbeats {};

struct SendToRank { Connection connection; AgentToRank message; DescriptorToken descriptor; };
struct CloseConnection { Connection connection; };

struct StartProcess { SpawnProcess spawn; std::vector<std::pair<std::string, std::string>> environment; };
// To the whole process group.
struct SignalProcess { ProcessId process; int32_t signal = 0; };

// For the keeper of snapshots, which decides what is held, promised and freed (checkpoint/core/custody.h).
struct KeepStaged { JobUid job; ProcessId process; SnapshotStaged staged; };
struct LoadSnapshot { JobUid job; ProcessId process; SnapshotWanted wanted; };
struct CopyForKeeping { CopySnapshot command; };
struct DropKept { DropSnapshots command; };
struct RaiseProtected { JobUid job; Step step; };
struct NoteGeneration { JobUid job; Generation generation; };  // by a fence
struct NoteAssigned { JobUid job; Generation generation; Step start; };
// Reaped, or never started: nobody writes its staging memory any more.
struct NoteProcessGone { JobUid job; ProcessId process; };
// After the job's last process is gone.
struct ReleaseSnapshots { JobUid job; };
struct DropDescriptor { DescriptorToken descriptor; };

enum class AgentNoticeLevel : uint8_t { kDebug, kInfo, kWarning, kError };
// A log line: constant text, then keys.
struct AgentNotice {
  AgentNoticeLevel level = AgentNoticeLevel::kInfo;
  Reason reason = Reason::kNone;
  std::string message;
  std::vector<std::pair<std::string, std::string>> keys;
};
// The agent ends, after the effects before it.
struct ExitAgent { int32_t code = 0; std::string message; };

using AgentEffect =
    std::variant<SayHello, SendFact, CloseControllerLink, OpenControllerLink, StartHeartbeats, StopHeartbeats,
                 SendToRank, CloseConnection, StartProcess, SignalProcess, KeepStaged, LoadSnapshot, CopyForKeeping,
                 DropKept, RaiseProtected, NoteGeneration, NoteAssigned, NoteProcessGone, ReleaseSnapshots, DropDescriptor, AgentNotice,
                 ExitAgent>;
using AgentEffects = std::vector<AgentEffect>;

}  // namespace everstep
