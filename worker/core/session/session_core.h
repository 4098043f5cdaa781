// The decisions of a rank: when it may step, when it must leave, what it may say it holds. A pure state machine:
// Step(event, now) appends effects. Called by worker/client/session under its mutex, by the simulator directly.
//
//   Outside ──assign + join──► Connecting ─► RollingForward | Restoring | AwaitingSnapshot ─► Serving ─► Comparing
//      ▲                                                                                                  │
//      │ fence · switch at a boundary · a failed collective                                               ▼
//      └────────────────────────────── Stepping ◄──────────────── resume ──────────────────────────── Ready
//
// The promises it keeps (docs/protocol.md sections 2, 3 and 6):
// - It answers Collect(g) only when no call can touch the program's buffers or cast a vote any more, and never while
//   the program applies. From then on it refuses everything below g.
// - A vote counts as passed only if no fence arrived before; then the step is applied whatever comes.
// - Memory is called valid only when every byte belongs to `applied`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/time.h"
#include "worker/core/session/session_event.h"

namespace everstep::session {

struct SessionPolicy {
  ProcessId process;
  // A mesh that isn't left after this long is beyond help: the process ends. Default 5 s, range 100 ms to 60 s.
  Duration abort_confirm_max = Seconds(5);
  // Without an agent nobody will fence this rank: a failed collective aborts the mesh, so that peers learn of it.
  bool abort_on_failure = false;
};

// Where the rank is. Public for tests, status and the simulator.
enum class Stage : uint8_t {
  kOutside, kConnecting, kRollingForward, kRestoring, kAwaitingSnapshot, kServing, kComparing, kReady, kStepping,
  kFinished,
};

class SessionCore {
 public:
  explicit SessionCore(SessionPolicy policy) : policy_(policy) {}

  // Appends the effects of `event`. An UpdatePage, if any, comes before all others of the same event.
  void Step(const Event& event, Instant now, std::vector<Effect>& effects);
  Instant NextDeadline() const { return abort_deadline_; }

  Stage stage() const { return stage_; }
  const Progress& progress() const { return progress_; }
  Generation promised() const { return promised_; }
  Generation pending_generation() const { return pending_; }
  everstep::Step protected_step() const { return protected_step_; }
  // True when every call of the program but Join is refused.
  bool left() const { return stage_ != Stage::kStepping || lost_; }
  // REQUIRES: an assignment is held (from its AssignRank until the next fence is answered).
  const Assignment& assignment() const { return *assignment_; }
  bool has_assignment() const { return assignment_.has_value(); }
  Rank rank() const { return rank_; }
  const std::string& restored_from() const { return restored_from_; }
  uint64_t bytes_restored() const { return bytes_restored_; }
  uint64_t stale_refused_count() const { return stale_refused_count_; }

 private:
  using Effects = std::vector<Effect>;

  void On(const HelloAccepted&, Instant, Effects&) {}
  void On(const HelloRefused& event, Instant now, Effects& out);
  void On(const FenceRank& event, Instant now, Effects& out);
  void On(const PrepareSwitch& event, Instant now, Effects& out);
  void On(const AssignRank& event, Instant now, Effects& out);
  void On(const ResumeRank& event, Instant now, Effects& out);
  void On(const SnapshotProtected& event, Instant now, Effects& out);
  void On(const SnapshotProvided& event, Instant now, Effects& out);
  void On(const SnapshotUnavailable& event, Instant now, Effects& out);
  void On(const StopRank& event, Instant now, Effects& out);
  void On(const AgentLost& event, Instant now, Effects& out);
  void On(const JoinCalled& event, Instant now, Effects& out);
  void On(const StepBegun& event, Instant now, Effects& out);
  void On(const GradientsCompleted& event, Instant now, Effects& out);
  void On(const VoteStarted& event, Instant now, Effects& out);
  void On(const VotePassed& event, Instant now, Effects& out);
  void On(const VoteFailed& event, Instant now, Effects& out);
  void On(const Applied& event, Instant now, Effects& out);
  void On(const SnapshotTaken& event, Instant now, Effects& out);
  void On(const FinishCalled& event, Instant now, Effects& out);
  void On(const CollectiveFailed& event, Instant now, Effects& out);
  void On(const MeshConnected& event, Instant now, Effects& out);
  void On(const RolledForward& event, Instant now, Effects& out);
  void On(const RestoreDone& event, Instant now, Effects& out);
  void On(const ServeDone& event, Instant now, Effects& out);
  void On(const DigestsAgreed& event, Instant now, Effects& out);
  void On(const DigestsDiffer& event, Instant now, Effects& out);
  void On(const WorkFailed& event, Instant now, Effects& out);
  void On(const AbortConfirmed& event, Instant now, Effects& out);
  void On(const DeadlinePassed& event, Instant now, Effects& out);

  // Why the program's calls are refused now; OK while it may step.
  Status Refusal() const;
  const RankAssignment& mine() const { return assignment_->ranks[static_cast<size_t>(rank_.value)]; }
  std::vector<Rank> ReceiversOf(Rank source) const;
  // OK when memory is what the assignment takes it for.
  Status CheckAssignment(const AssignRank& event) const;
  void SayAgain(Effects& out) const;
  void Enter(Effects& out);                  // starts the work of the assignment, once the program is in Join
  void AbortIfConnected(Instant now, Effects& out);
  void RequestSnapshot(Effects& out);
  void AfterRestore(Effects& out);
  void AfterServe(Effects& out);
  // Ends the work in flight. False: its generation was left meanwhile, the result counts for nothing.
  bool EndWork(Generation generation, Effects& out);
  void FailAssignment(Rank suspect, const Status& status, Instant now, Effects& out);
  void ReportLoss(Rank suspect, const Status& status, Instant now, Effects& out);
  void AnswerIfFree(Effects& out);

  enum class Mesh : uint8_t { kNone, kOpen, kAborting };

  SessionPolicy policy_;
  Stage stage_ = Stage::kOutside;
  Mesh mesh_ = Mesh::kNone;
  Generation mesh_generation_;
  Instant abort_deadline_ = kNever;
  Progress progress_;
  Generation gradients_;                     // of complete gradients of applied + 1; 0: none
  Generation promised_;                      // everything below is refused. Invariant: never falls
  bool answer_due_ = false;                  // Collect(promised_) waits for its answer
  bool answered_ = false;                    // Collect(promised_) was answered and no assignment came since
  bool planned_ = false;                     // ... at a boundary
  Generation pending_;                       // rides in the votes; 0: none
  Generation switch_after_apply_;            // the passed vote carried it; 0: none
  everstep::Step protected_step_;
  std::optional<Assignment> assignment_;
  Rank rank_{-1};
  size_t source_index_ = 0;                  // of mine().sources
  uint64_t bytes_restored_ = 0;
  std::string restored_from_;
  bool work_in_flight_ = false;
  bool in_join_ = false;
  bool join_said_ = false;
  bool lost_ = false;                        // failed in this generation; waits for a fence
  bool stopped_ = false;
  std::string stop_message_;
  Digest128 shard_digest_{};
  uint64_t stale_refused_count_ = 0;
};

}  // namespace everstep::session
