// What happens to a rank, and what its session core wants done about it. Plain data. Events come from the agent's
// socket (I/O thread), from the program's calls and from the work that Join performs (training thread); the shell in
// worker/client feeds them to SessionCore under one mutex and performs the effects in order.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/assignment.h"
#include "proto/model/lineage.h"
#include "proto/model/progress.h"
#include "proto/model/rank_messages.h"

namespace everstep::session {

// ---- events: the agent's messages are events as they are (proto/model/rank_messages.h), and:

struct AgentLost { std::string message; };  // the socket ended

// Calls of the program, on the training thread. Each gets exactly one CallAnswered: at once, JoinCalled later.
struct JoinCalled {};
struct StepBegun { Step step; };
struct GradientsCompleted { Step step; };
struct VoteStarted { Step step; };
struct VotePassed {                  // the votes of all ranks arrived; what they said together
  Step step;
  Generation generation;
  Generation pending_generation_max;
  Step protected_step_min;
  bool out_of_range = false;
  bool not_finite = false;
};
struct VoteFailed { Step step; Rank suspect{-1}; Status status; };
struct Applied { Step step; };
struct SnapshotTaken { SnapshotStaged staged; };
struct FinishCalled {};              // after all ranks came to their end together
// A collective of the program failed. Not a call: no answer.
struct CollectiveFailed { Generation generation; Rank suspect{-1}; Status status; };

// Ends of work that the core asked for. `generation` is that of the work.
struct MeshConnected { Generation generation; };
struct RolledForward { Generation generation; };
struct RestoreDone { Generation generation; uint64_t bytes = 0; };
struct ServeDone { Generation generation; };
struct DigestsAgreed { Generation generation; Digest128 shard_digest{}; };
struct DigestsDiffer { Generation generation; std::string message; };
struct WorkFailed {
  Generation generation;
  Rank suspect{-1};
  Status status;
  bool by_program = false;           // a callback of the program said so: Join returns it
};
struct AbortConfirmed { Generation generation; };  // no call of that mesh can touch a buffer or cast a vote any more
struct DeadlinePassed {};

using Event = std::variant<HelloAccepted, HelloRefused, FenceRank, PrepareSwitch, AssignRank, ResumeRank,
                           SnapshotProtected, SnapshotProvided, SnapshotUnavailable, StopRank, AgentLost, JoinCalled,
                           StepBegun, GradientsCompleted, VoteStarted, VotePassed, VoteFailed, Applied, SnapshotTaken,
                           FinishCalled, CollectiveFailed, MeshConnected, RolledForward, RestoreDone, ServeDone,
                           DigestsAgreed, DigestsDiffer, WorkFailed, AbortConfirmed, DeadlinePassed>;

// ---- effects

struct SendToAgent { RankToAgent message; };
struct UpdatePage { Progress progress; };

// Work for the training thread, which is inside Join; one at a time, each ends with one of the events above.
struct ConnectMesh { Assignment assignment; Rank rank; };  // drops the mesh before it; MeshConnected | WorkFailed
struct RollForward { Generation generation; Step step; };  // run the program's apply; RolledForward | WorkFailed
struct InitializeState { Generation generation; };         // RestoreDone | WorkFailed
struct ReceiveState {                                      // over the mesh; RestoreDone | WorkFailed
  Generation generation;
  Rank source;
  std::vector<Rank> chain;           // all receivers of this source, this rank among them: each passes on to the next
};
struct CopySnapshot { SnapshotProvided snapshot; };        // from the oldest descriptor; RestoreDone | WorkFailed
struct ServeState { Generation generation; std::vector<Rank> chain; };     // ServeDone | WorkFailed
struct ExchangeDigests { Generation generation; StateId state; };          // DigestsAgreed | DigestsDiffer | WorkFailed

// At once, on the thread that performs effects: wakes whatever blocks in the mesh. Ends with AbortConfirmed.
struct AbortMesh { Generation generation; };
// Snapshots at or above `protected_step` must stay; staged ones above `discard_above` are off the chain.
struct KeepSnapshots { Step protected_step; bool discard = false; StateId discard_above; };
// The program's call returns.
enum class CallOutcome : uint8_t { kDone, kApply, kRedo, kNotFinite, kSwitch };
struct CallAnswered {
  Status status;
  CallOutcome outcome = CallOutcome::kDone;
  // VoteStarted: what this rank's vote carries.
  Generation pending_generation;
  Step protected_step;
};
struct ExitProcess { std::string message; };  // nothing can be saved: say so and leave

using Effect = std::variant<SendToAgent, UpdatePage, ConnectMesh, RollForward, InitializeState, ReceiveState,
                            CopySnapshot, ServeState, ExchangeDigests, AbortMesh, KeepSnapshots, CallAnswered,
                            ExitProcess>;

}  // namespace everstep::session
