// Everything that can happen to the controller's core: past-tense facts, fed by the shell (controller/io/loop) or by
// the simulator, one at a time. Plain data.
#pragma once

#include <string>
#include <variant>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/base/time.h"
#include "proto/model/facts.h"
#include "proto/model/job.h"

namespace everstep {

struct Now {
  Instant instant;
  WallTime wall;
};

struct AgentConnected { SessionId session; AgentHello hello; };
struct AgentDisconnected { SessionId session; };           // its stream ended or was reset
struct FactReceived { SessionId session; FactSequence sequence; Fact fact; };
struct HeartbeatReceived { Heartbeat heartbeat; };         // authenticated by the shell
enum class ProbeOutcome : uint8_t { kRefused, kConnected, kTimedOut };
struct ProbeFinished { ServerId server; Incarnation incarnation; ProbeOutcome outcome = ProbeOutcome::kTimedOut; };

// The record of this fence is on disk; answers ConfirmFence.
struct FenceBecameDurable { JobUid job; Generation generation; };

// Operator calls that change something. Reads are served from the view.
struct SubmitJob { JobSpec spec; };
struct CancelJob { std::string job; };                     // name or uid
struct SetDrain { ServerId server; bool draining = true; };
using OperatorRequest = std::variant<SubmitJob, CancelJob, SetDrain>;
struct OperatorCalled { CallId call; RequestId request; std::string identity; bool dry_run = false; OperatorRequest body; };

struct LoopLagged { Duration lag{}; };                     // the loop itself was late by this much: leases are extended
struct TimeAdvanced {};                                    // NextDeadline() has come

using Event = std::variant<AgentConnected, AgentDisconnected, FactReceived, HeartbeatReceived, ProbeFinished,
                           OperatorCalled, FenceBecameDurable, LoopLagged, TimeAdvanced>;

}  // namespace everstep
