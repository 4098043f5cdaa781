#include "worker/core/session/session_core.h"

#include <algorithm>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/mutation.h"
#include "proto/model/names.h"

namespace everstep::session {
namespace {

void Answer(std::vector<Effect>& out, Status status) {
  CallAnswered answer;
  answer.status = std::move(status);
  out.emplace_back(std::move(answer));
}

void Answer(std::vector<Effect>& out, CallOutcome outcome) {
  CallAnswered answer;
  answer.outcome = outcome;
  out.emplace_back(std::move(answer));
}

std::string StepText(everstep::Step step) { return std::to_string(step.value); }

}  // namespace

void SessionCore::Step(const Event& event, Instant now, Effects& effects) {
  const Progress before = progress_;
  const size_t first = effects.size();
  std::visit([&](const auto& e) { On(e, now, effects); }, event);
  // The page goes first: whatever is said or done next is already on it, should this process die in between.
  if (progress_ != before) {
    effects.emplace(effects.begin() + static_cast<std::ptrdiff_t>(first), UpdatePage{progress_});
  }
}

Status SessionCore::Refusal() const {
  if (stopped_) return FailedPrecondition(stop_message_);
  if (stage_ == Stage::kFinished) return FailedPrecondition("the session is finished");
  if (stage_ != Stage::kStepping || lost_) return Aborted("the rank left its generation; call Join again");
  return OkStatus();
}

std::vector<Rank> SessionCore::ReceiversOf(Rank source) const {
  std::vector<Rank> receivers;
  for (const RankAssignment& r : assignment_->ranks) {
    if (r.action == RestoreAction::kFetchFromRank && r.source_rank == source) receivers.push_back(r.rank);
  }
  return receivers;
}

// ---- leaving

void SessionCore::On(const HelloRefused& event, Instant, Effects& out) {
  out.emplace_back(ExitProcess{"the agent refused this process: " + event.message});
}

void SessionCore::On(const AgentLost& event, Instant, Effects& out) {
  if (stage_ == Stage::kFinished) return;
  out.emplace_back(ExitProcess{"the agent is gone (" + event.message + "); a rank must not outlive it"});
}

void SessionCore::On(const FenceRank& event, Instant now, Effects& out) {
  const bool told_before = event.generation == promised_ && (answered_ || answer_due_);
  if (event.generation < promised_ || (event.generation == promised_ && !told_before)) {
    ++stale_refused_count_;  // an assignment of this generation or a later fence overtook it
    return;
  }
  if (told_before) {
    if (answered_) AnswerIfFree(out);
    return;
  }
  promised_ = event.generation;
  planned_ = false;
  answered_ = false;
  answer_due_ = true;
  switch_after_apply_ = Generation(0);
  if (pending_ <= promised_) pending_ = Generation(0);
  if (Mutated(Mutation::kSkipFence)) {
    AnswerIfFree(out);
    return;
  }
  if (stage_ != Stage::kFinished) stage_ = Stage::kOutside;
  AbortIfConnected(now, out);
  AnswerIfFree(out);
}

void SessionCore::AbortIfConnected(Instant now, Effects& out) {
  if (mesh_ != Mesh::kOpen) return;
  mesh_ = Mesh::kAborting;
  abort_deadline_ = now + policy_.abort_confirm_max;
  out.emplace_back(AbortMesh{mesh_generation_});
}

void SessionCore::On(const AbortConfirmed& event, Instant, Effects& out) {
  if (mesh_ != Mesh::kAborting || event.generation != mesh_generation_) return;
  mesh_ = Mesh::kNone;
  abort_deadline_ = kNever;
  AnswerIfFree(out);
  Enter(out);
}

void SessionCore::On(const DeadlinePassed&, Instant now, Effects& out) {
  if (now < abort_deadline_) return;
  abort_deadline_ = kNever;
  out.emplace_back(ExitProcess{"a collective of generation " + std::to_string(mesh_generation_.value) +
                               " did not end after its abort"});
}

void SessionCore::AnswerIfFree(Effects& out) {
  if (!answer_due_ && !answered_) return;
  // 1. A call still inside the mesh could cast a vote or write to a buffer. 2. Work in flight writes to memory.
  // 3. Apply is never interrupted, and memory is torn while it runs.
  const bool inside = !planned_ && mesh_ != Mesh::kNone && !Mutated(Mutation::kSkipFence) && !Mutated(Mutation::kAnswerBeforeAbort);
  if (inside || work_in_flight_ || progress_.phase == RankPhase::kApplying) {
    if (Mutated(Mutation::kTornIsValid) && !inside && !work_in_flight_ && progress_.memory_valid) {
      out.emplace_back(SendToAgent{CollectAnswer{promised_, {true, progress_.applied, gradients_}, false}});
    }
    return;
  }
  answer_due_ = false;
  answered_ = true;
  assignment_.reset();
  lost_ = false;
  if (stage_ != Stage::kFinished) {
    progress_.phase = progress_.memory_valid || progress_.phase != RankPhase::kStarting ? RankPhase::kJoining
                                                                                         : RankPhase::kStarting;
  }
  CollectAnswer answer;
  answer.generation = promised_;
  answer.planned = planned_;
  answer.report.memory_valid = progress_.memory_valid;
  if (progress_.memory_valid) {
    answer.report.applied = progress_.applied;
    answer.report.gradients = Mutated(Mutation::kForgetUndecided) ? Generation(0) : gradients_;
  }
  out.emplace_back(SendToAgent{std::move(answer)});
}

void SessionCore::On(const PrepareSwitch& event, Instant, Effects&) {
  if (event.generation <= promised_) {
    ++stale_refused_count_;
    return;
  }
  pending_ = std::max(pending_, event.generation);
}

void SessionCore::On(const StopRank& event, Instant now, Effects& out) {
  if (stopped_ || stage_ == Stage::kFinished) return;
  stopped_ = true;
  stop_message_ = event.message.empty() ? "the job ends" : event.message;
  stage_ = Stage::kOutside;
  AbortIfConnected(now, out);
  if (in_join_ && !work_in_flight_) {
    in_join_ = false;
    Answer(out, FailedPrecondition(stop_message_));
  }
}

void SessionCore::On(const CollectiveFailed& event, Instant now, Effects& out) {
  if (event.generation != progress_.generation || stage_ != Stage::kStepping) return;
  ReportLoss(event.suspect, event.status, now, out);
}

void SessionCore::ReportLoss(Rank suspect, const Status& status, Instant now, Effects& out) {
  if (lost_) return;
  lost_ = true;
  out.emplace_back(
      SendToAgent{RankFailed{assignment_->generation, suspect, status.code(), status.message()}});
  if (policy_.abort_on_failure) AbortIfConnected(now, out);
}

// ---- entering

Status SessionCore::CheckAssignment(const AssignRank& event) const {
  const Assignment& a = event.assignment;
  const auto wrong = [](std::string message) { return FailedPrecondition(std::move(message)); };
  if (event.rank.value < 0 || static_cast<size_t>(event.rank.value) >= a.ranks.size()) {
    return wrong("the assignment has no rank " + std::to_string(event.rank.value));
  }
  for (size_t i = 0; i < a.ranks.size(); ++i) {
    if (a.ranks[i].rank != Rank(static_cast<int32_t>(i))) return wrong("the assignment's ranks are out of order");
  }
  const RankAssignment& r = a.ranks[static_cast<size_t>(event.rank.value)];
  if (r.process != policy_.process) return wrong("the assignment names another process for this rank");
  const StateId point = a.recovery_point;
  switch (r.action) {
    case RestoreAction::kInitialize:
      if (point.step != everstep::Step(0)) return wrong("only step 0 can be computed");
      break;
    case RestoreAction::kKeep:
      if (!progress_.memory_valid || progress_.applied != point) return wrong("memory is not at the recovery point");
      break;
    case RestoreAction::kRollForward:
      if (!progress_.memory_valid || progress_.applied.step.Next() != point.step || gradients_ != point.generation) {
        return wrong("no complete gradients of the recovery point are held");
      }
      break;
    case RestoreAction::kFetchFromRank:
      if (r.source_rank.value < 0 || static_cast<size_t>(r.source_rank.value) >= a.ranks.size() ||
          r.source_rank == r.rank ||
          a.ranks[static_cast<size_t>(r.source_rank.value)].action == RestoreAction::kFetchFromRank) {
        return wrong("the source of the state is not a rank that has it");
      }
      break;
    case RestoreAction::kFetchFromSnapshot:
      if (r.sources.empty()) return wrong("no snapshot is named");
      break;
  }
  return OkStatus();
}

void SessionCore::On(const AssignRank& event, Instant now, Effects& out) {
  const Generation generation = event.assignment.generation;
  if (stopped_ || stage_ == Stage::kFinished) return;
  if (assignment_ && assignment_->generation == generation && promised_ == generation) {
    SayAgain(out);  // told twice
    return;
  }
  if (generation < promised_ && !Mutated(Mutation::kAcceptStaleGeneration)) {
    ++stale_refused_count_;
    return;
  }
  Status status = OkStatus();
  if (answer_due_ || work_in_flight_ || assignment_ || stage_ != Stage::kOutside) {
    status = FailedPrecondition("an assignment came before this rank left its generation");
  } else {
    status = CheckAssignment(event);
  }
  if (!status.ok()) {
    out.emplace_back(SendToAgent{RankFailed{generation, Rank(-1), status.code(), status.message()}});
    return;
  }
  promised_ = generation;
  answered_ = false;
  planned_ = false;
  lost_ = false;
  if (pending_ <= generation) pending_ = Generation(0);
  assignment_ = event.assignment;
  rank_ = event.rank;
  source_index_ = 0;
  bytes_restored_ = 0;
  // The recovery point is decided: an undecided step that isn't it never counts.
  if (mine().action != RestoreAction::kRollForward) gradients_ = Generation(0);
  AbortIfConnected(now, out);  // left at a boundary: the old mesh stood until everybody had left
  Enter(out);
}

void SessionCore::SayAgain(Effects& out) const {
  const Generation generation = assignment_->generation;
  if (stage_ == Stage::kOutside || stage_ == Stage::kConnecting) return;
  out.emplace_back(SendToAgent{RankConnected{generation}});
  if (stage_ == Stage::kReady || stage_ == Stage::kStepping) {
    out.emplace_back(SendToAgent{RankReady{generation, shard_digest_, bytes_restored_, restored_from_}});
  }
}

void SessionCore::Enter(Effects& out) {
  // Until the program is in Join its memory is its own.
  if (!in_join_ || !assignment_ || stage_ != Stage::kOutside) return;
  if (answer_due_ || lost_ || stopped_ || work_in_flight_ || mesh_ != Mesh::kNone) return;
  stage_ = Stage::kConnecting;
  mesh_ = Mesh::kOpen;
  mesh_generation_ = assignment_->generation;
  work_in_flight_ = true;
  out.emplace_back(ConnectMesh{*assignment_, rank_});
}

void SessionCore::On(const JoinCalled&, Instant now, Effects& out) {
  if (stopped_ || stage_ == Stage::kFinished) {
    Answer(out, Refusal());
    return;
  }
  in_join_ = true;
  if (!join_said_) {
    join_said_ = true;
    progress_.phase = RankPhase::kJoining;
    out.emplace_back(SendToAgent{RankJoin{}});
  }
  if (stage_ == Stage::kStepping) {  // nobody asked it to leave
    ReportLoss(Rank(-1), Aborted("the program left its generation by itself"), now, out);
    stage_ = Stage::kOutside;
    progress_.phase = RankPhase::kJoining;
    AbortIfConnected(now, out);
    return;
  }
  Enter(out);
}

bool SessionCore::EndWork(Generation generation, Effects& out) {
  work_in_flight_ = false;
  if (stopped_) {
    if (in_join_) {
      in_join_ = false;
      Answer(out, FailedPrecondition(stop_message_));
    }
    return false;
  }
  if (stage_ == Stage::kOutside || !assignment_ || assignment_->generation != generation || promised_ != generation) {
    if (progress_.phase == RankPhase::kApplying || progress_.phase == RankPhase::kRestoring) {
      progress_.phase = RankPhase::kJoining;
    }
    AnswerIfFree(out);
    return false;
  }
  return true;
}

void SessionCore::FailAssignment(Rank suspect, const Status& status, Instant now, Effects& out) {
  stage_ = Stage::kOutside;
  progress_.phase = RankPhase::kJoining;
  ReportLoss(suspect, status, now, out);
  AbortIfConnected(now, out);  // peers that wait for this rank's part learn of it
}

void SessionCore::On(const WorkFailed& event, Instant now, Effects& out) {
  // A snapshot that turned out bad: the next copy. Memory is torn meanwhile, and the page says so.
  const bool try_next = stage_ == Stage::kRestoring && mine().action == RestoreAction::kFetchFromSnapshot;
  if (!EndWork(event.generation, out)) return;
  if (try_next && !event.by_program && ++source_index_ < mine().sources.size()) {
    RequestSnapshot(out);
    return;
  }
  FailAssignment(event.suspect, event.status, now, out);
  if (event.by_program) {
    in_join_ = false;
    Answer(out, event.status);
  }
}

void SessionCore::On(const MeshConnected& event, Instant, Effects& out) {
  if (!EndWork(event.generation, out)) return;
  out.emplace_back(SendToAgent{RankConnected{event.generation}});
  switch (mine().action) {
    case RestoreAction::kKeep:
      restored_from_ = "kept";
      AfterRestore(out);
      return;
    case RestoreAction::kRollForward:
      stage_ = Stage::kRollingForward;
      progress_.phase = RankPhase::kApplying;
      progress_.memory_valid = false;
      progress_.vote_passed = std::max(progress_.vote_passed, assignment_->recovery_point.step);
      restored_from_ = "rolled-forward";
      work_in_flight_ = true;
      if (Mutated(Mutation::kServeWhileApplying) && !ReceiversOf(rank_).empty()) {
        out.emplace_back(ServeState{assignment_->generation, ReceiversOf(rank_)});
      }
      out.emplace_back(RollForward{event.generation, assignment_->recovery_point.step});
      return;
    case RestoreAction::kFetchFromSnapshot: RequestSnapshot(out); return;
    case RestoreAction::kInitialize:
    case RestoreAction::kFetchFromRank: break;
  }
  stage_ = Stage::kRestoring;
  progress_.phase = RankPhase::kRestoring;
  progress_.memory_valid = false;
  work_in_flight_ = true;
  if (mine().action == RestoreAction::kInitialize) {
    restored_from_ = "initialized";
    out.emplace_back(InitializeState{event.generation});
  } else {
    restored_from_ = "rank " + std::to_string(mine().source_rank.value);
    out.emplace_back(ReceiveState{event.generation, mine().source_rank, ReceiversOf(mine().source_rank)});
  }
}

void SessionCore::RequestSnapshot(Effects& out) {
  stage_ = Stage::kAwaitingSnapshot;
  out.emplace_back(SendToAgent{SnapshotWanted{assignment_->generation, mine().sources[source_index_]}});
}

void SessionCore::On(const SnapshotProvided& event, Instant now, Effects& out) {
  // An unwanted one still brought a descriptor; the shell drops it when no CopySnapshot follows.
  if (stage_ != Stage::kAwaitingSnapshot || event.generation != assignment_->generation) {
    ++stale_refused_count_;
    return;
  }
  if (event.state != assignment_->recovery_point) {
    On(SnapshotUnavailable{event.generation, StatusCode::kDataLoss, "the agent provided another state"}, now, out);
    return;
  }
  stage_ = Stage::kRestoring;
  progress_.phase = RankPhase::kRestoring;
  progress_.memory_valid = false;
  restored_from_ = event.from;
  work_in_flight_ = true;
  out.emplace_back(CopySnapshot{event});
}

void SessionCore::On(const SnapshotUnavailable& event, Instant now, Effects& out) {
  if (stage_ != Stage::kAwaitingSnapshot || event.generation != assignment_->generation) {
    ++stale_refused_count_;
    return;
  }
  if (++source_index_ < mine().sources.size()) {
    RequestSnapshot(out);
    return;
  }
  FailAssignment(Rank(-1), Status(event.code == StatusCode::kOk ? StatusCode::kUnavailable : event.code, event.message),
                 now, out);
}

void SessionCore::On(const RolledForward& event, Instant, Effects& out) {
  // Applied is applied, also when a fence came meanwhile: the answer must say so. The work's own generation does not
  // matter, the gradients' does.
  progress_.applied = {progress_.applied.step.Next(), gradients_};
  progress_.memory_valid = true;
  gradients_ = Generation(0);
  if (!EndWork(event.generation, out)) return;
  progress_.phase = RankPhase::kJoining;
  AfterRestore(out);
}

void SessionCore::On(const RestoreDone& event, Instant, Effects& out) {
  // Whole is whole, also when a fence came meanwhile: this may be the last copy.
  if (assignment_ && assignment_->generation == event.generation) {
    progress_.memory_valid = true;
    progress_.applied = assignment_->recovery_point;
  }
  if (!EndWork(event.generation, out)) return;
  progress_.phase = RankPhase::kJoining;
  bytes_restored_ = event.bytes;
  AfterRestore(out);
}

void SessionCore::AfterRestore(Effects& out) {
  std::vector<Rank> receivers = ReceiversOf(rank_);
  if (receivers.empty()) {
    AfterServe(out);
    return;
  }
  stage_ = Stage::kServing;
  work_in_flight_ = true;
  out.emplace_back(ServeState{assignment_->generation, std::move(receivers)});
}

void SessionCore::On(const ServeDone& event, Instant, Effects& out) {
  if (EndWork(event.generation, out)) AfterServe(out);
}

void SessionCore::AfterServe(Effects& out) {
  stage_ = Stage::kComparing;
  work_in_flight_ = true;
  out.emplace_back(ExchangeDigests{assignment_->generation, progress_.applied});
}

void SessionCore::On(const DigestsAgreed& event, Instant, Effects& out) {
  if (!EndWork(event.generation, out)) return;
  stage_ = Stage::kReady;
  shard_digest_ = event.shard_digest;
  progress_.phase = RankPhase::kReady;
  out.emplace_back(SendToAgent{RankReady{event.generation, event.shard_digest, bytes_restored_, restored_from_}});
}

void SessionCore::On(const DigestsDiffer& event, Instant now, Effects& out) {
  if (!EndWork(event.generation, out)) return;
  // All ranks come to this verdict by themselves: an abort would only hide it from those that still compare.
  stage_ = Stage::kOutside;
  progress_.phase = RankPhase::kJoining;
  ReportLoss(Rank(-1), DataLoss("DigestMismatch: " + event.message), now, out);
}

void SessionCore::On(const ResumeRank& event, Instant, Effects& out) {
  if (!assignment_ || event.generation != assignment_->generation || promised_ != event.generation ||
      stage_ != Stage::kReady) {
    if (stage_ != Stage::kStepping) ++stale_refused_count_;  // told twice otherwise
    return;
  }
  stage_ = Stage::kStepping;
  in_join_ = false;
  protected_step_ = event.protected_step;
  progress_.phase = RankPhase::kComputing;
  progress_.generation = event.generation;
  progress_.collective_sequence = 0;
  progress_.vote_passed = assignment_->recovery_point.step;
  out.emplace_back(KeepSnapshots{protected_step_, true, assignment_->recovery_point});
  Answer(out, CallOutcome::kDone);
}

// ---- stepping

void SessionCore::On(const SnapshotProtected& event, Instant, Effects& out) {
  if (event.step <= protected_step_) return;
  protected_step_ = event.step;
  out.emplace_back(KeepSnapshots{protected_step_, false, {}});
}

void SessionCore::On(const StepBegun& event, Instant, Effects& out) {
  Status status = Refusal();
  if (status.ok() && event.step != progress_.applied.step.Next()) {
    status = InvalidArgument("step " + StepText(event.step) + " does not follow the applied step " +
                             StepText(progress_.applied.step));
  }
  if (status.ok()) {
    progress_.phase = RankPhase::kComputing;
    gradients_ = Generation(0);
  }
  Answer(out, std::move(status));
}

void SessionCore::On(const GradientsCompleted& event, Instant, Effects& out) {
  Status status = Refusal();
  if (status.ok() && event.step != progress_.applied.step.Next()) {
    status = InvalidArgument("gradients of step " + StepText(event.step) + " after the applied step " +
                             StepText(progress_.applied.step));
  }
  if (status.ok()) {
    progress_.phase = RankPhase::kReduced;
    gradients_ = progress_.generation;
  }
  Answer(out, std::move(status));
}

void SessionCore::On(const VoteStarted& event, Instant, Effects& out) {
  Status status = Refusal();
  if (status.ok() && (event.step != progress_.applied.step.Next() || progress_.phase != RankPhase::kReduced)) {
    status = FailedPrecondition("the gradients of step " + StepText(event.step) + " were not reported complete");
  }
  CallAnswered answer;
  if (status.ok()) {
    progress_.phase = RankPhase::kVoting;
    answer.pending_generation = pending_;
    answer.protected_step = protected_step_;
  }
  answer.status = std::move(status);
  out.emplace_back(std::move(answer));
}

void SessionCore::On(const VotePassed& event, Instant now, Effects& out) {
  // A fence that came first wins, though every vote arrived: this rank may have told the controller already that it
  // did not apply. Its gradients are held, and whoever applied is the proof for rolling forward.
  Status status = Refusal();
  if (!status.ok()) {
    Answer(out, std::move(status));
    return;
  }
  if (event.step != progress_.applied.step.Next() || event.generation != progress_.generation ||
      progress_.phase != RankPhase::kVoting) {
    On(VoteFailed{event.step, Rank(-1), Internal("the vote is not that of this step and generation")}, now, out);
    return;
  }
  if (event.out_of_range || event.not_finite) {
    gradients_ = Generation(0);
    progress_.phase = RankPhase::kComputing;
    Answer(out, event.out_of_range ? CallOutcome::kRedo : CallOutcome::kNotFinite);
    return;
  }
  progress_.vote_passed = event.step;
  progress_.phase = RankPhase::kApplying;
  progress_.memory_valid = Mutated(Mutation::kTornIsValid);
  if (event.pending_generation_max > progress_.generation) switch_after_apply_ = event.pending_generation_max;
  if (event.protected_step_min > protected_step_) {
    protected_step_ = event.protected_step_min;
    out.emplace_back(KeepSnapshots{protected_step_, false, {}});
  }
  Answer(out, CallOutcome::kApply);
}

void SessionCore::On(const VoteFailed& event, Instant now, Effects& out) {
  if (Status status = Refusal(); !status.ok()) {
    Answer(out, std::move(status));
    return;
  }
  ReportLoss(event.suspect, event.status, now, out);
  Answer(out, Refusal());
}

void SessionCore::On(const Applied& event, Instant, Effects& out) {
  EVERSTEP_CHECK(progress_.phase == RankPhase::kApplying && event.step == progress_.applied.step.Next());
  progress_.applied = {event.step, progress_.generation};
  progress_.memory_valid = true;
  progress_.phase = RankPhase::kComputing;
  gradients_ = Generation(0);
  if (answer_due_) {
    AnswerIfFree(out);
    Answer(out, CallOutcome::kSwitch);
    return;
  }
  if (switch_after_apply_ > promised_) {
    promised_ = std::exchange(switch_after_apply_, Generation(0));
    if (pending_ <= promised_) pending_ = Generation(0);
    stage_ = Stage::kOutside;
    planned_ = true;
    answer_due_ = true;
    // The old mesh stays up until the next assignment: a peer may still wait for the vote's result to reach it.
    AnswerIfFree(out);
    Answer(out, CallOutcome::kSwitch);
    return;
  }
  switch_after_apply_ = Generation(0);
  Answer(out, lost_ || stopped_ ? CallOutcome::kSwitch : CallOutcome::kDone);
}

void SessionCore::On(const SnapshotTaken& event, Instant, Effects& out) {
  out.emplace_back(SendToAgent{event.staged});
}

void SessionCore::On(const FinishCalled&, Instant, Effects& out) {
  Status status = Refusal();
  if (status.ok()) {
    stage_ = Stage::kFinished;
    progress_.phase = RankPhase::kFinished;
    out.emplace_back(SendToAgent{RankFinished{}});
  }
  Answer(out, std::move(status));
}

}  // namespace everstep::session
