// How a recovery ends: resumed, overdue, or with its job (docs/recovery.md).
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"
#include "proto/model/names.h"

namespace everstep {
namespace {

constexpr Duration kStandbyWaitMax = Seconds(5);  // of a job whose step takes longer

}  // namespace

void ControllerCore::Impl::CloseRecovery(JobRow& job, const std::string& outcome) {
  EnterPhase(job, RecoveryPhase::kNone);
  job.proofs.clear();
  job.lost.clear();
  job.retries = 0;
  job.standby_failures = 0;
  job.avoided.clear();
  job.failure_counted = false;
  // A rank that is the only holder of its shard stays on its draining server. Another switch at once would end the same way.
  const bool stayed = std::any_of(job_processes_[job.uid].begin(), job_processes_[job.uid].end(), [&](ProcessId id) {
    const ProcessRow& process = processes_.at(id);
    return process.member && !process.exited && Draining(process.server);
  });
  job.drain_switches = stayed ? job.drain_switches + 1 : 0;
  job.drain_at = stayed ? now_.instant + Seconds(1) * (1 << std::min(job.drain_switches, 4)) : kNever;
  const JobEntry& entry = Entry(job);
  job.regrow_at = kNever;
  job.world_target = 0;
  job.outranked_by.clear();
  if (outcome == "resumed" && !entry.spec.opaque && entry.assignment &&
      static_cast<int32_t>(entry.assignment->ranks.size()) < WorldWanted(entry)) {
    job.regrow_at = now_.instant + policy_.regrow_delay;
  }
  if (!job.open) return;
  RecoveryRecord& record = *job.open;
  record.outcome = outcome;
  const bool resumed = outcome == "resumed";
  if (resumed && entry.assignment && !entry.spec.opaque) {
    for (const RankAssignment& r : entry.assignment->ranks) {
      const ProcessRow& process = processes_.at(r.process);
      const bool kept = r.action == RestoreAction::kKeep || r.action == RestoreAction::kRollForward ||
                        std::any_of(job.inputs.survivors.begin(), job.inputs.survivors.end(),
                                    [&](const SurvivorReport& s) { return s.process == r.process; });
      record.ranks.push_back({r.rank, r.server, r.process, kept, process.restored_from, process.bytes_restored});
    }
  }
  const Duration total = now_.instant - job.evidence_at;
  Push(Measured{Measured::What::kRecovery, record.reason, RecoveryPhase::kNone, outcome, ToSeconds(total)});
  Note(NoticeLevel::kInfo, record.decision == Reason::kNone ? record.reason : record.decision,
       resumed ? "Recovery ended" : "Recovery closed", {}, &job,
       {{"recovery", std::to_string(record.id.value)},
        {"outcome", outcome},
        {"generation", std::to_string(record.to.value)},
        {"step", std::to_string(record.recovery_point.step.value)},
        {"stepsLost", std::to_string(record.steps_lost)},
        {"milliseconds", fmt::format("{:.1f}", ToMilliseconds(total))}});
  const bool again = record.from.value > 0;  // not the job's start
  Append(RecoveryEnded{std::move(record)});
  job.open.reset();
  if (resumed && again && !entry.spec.opaque) {
    job.standby_after = job.committed;
    job.standby_at = now_.instant + kStandbyWaitMax;
  }
}

// A starting standby loads its program and data, on a rank's server perhaps, while all ranks compute the interrupted step
// again: it is started when that step is through.
void ControllerCore::Impl::NoteCommitted(JobRow& job, everstep::Step step) {
  if (step <= job.committed) return;
  job.committed = step;
  if (!job.standby_after || step <= *job.standby_after) return;
  job.standby_after.reset();
  job.standby_at = Instant{};
  dirty_ = true;
}

// ---- deadlines

void ControllerCore::Impl::OnStageDeadline(JobRow& job) {
  if (now_.instant >= job.complaint_deadline) {
    job.complaint_deadline = kNever;
    const std::string complaint = std::exchange(job.complaint, "");
    if (Finishing(job)) return;
    if (job.stage == JobStage::kRunning || job.stage == JobStage::kAssigned || job.stage == JobStage::kPreparing) {
      if (++job.retries > kRetriesMax) {
        EndJob(job, JobState::kFailed, Reason::kPhaseDeadline, static_cast<int32_t>(JobExit::kInfrastructure),
               fmt::format("{} generations in a row failed without a lost member; the newest: {}", job.retries, complaint));
        return;
      }
      StartRecovery(job, Reason::kPeerComplaint, complaint, now_.instant - job.complaint_at, false);
      return;
    }
  }
  if (now_.instant < job.deadline) return;
  job.deadline = kNever;
  const JobEntry& entry = Entry(job);
  switch (job.stage) {
    case JobStage::kPreparing:
      // The step is longer than the budget: leave now, redo it.
      Note(NoticeLevel::kInfo, Reason::kPhaseDeadline, "Planned switch overdue", {}, &job);
      FenceMembers(job);
      return;
    case JobStage::kCollecting:
      Decide(job);
      return;
    case JobStage::kWaiting:
      TryPlan(job);
      return;
    case JobStage::kGathering: {
      std::vector<Loss> losses;
      for (const PlannedSlot& slot : entry.plan->slots) {
        ProcessRow& process = processes_.at(slot.process);
        if (process.joined || process.exited || (entry.spec.opaque && process.started)) continue;
        const std::string evidence = fmt::format("the process for rank {} on {} did not reach Join within {:.0f} s",
                                                 slot.rank.value, slot.server.value,
                                                 ToSeconds(policy_.process_start_timeout));
        Kill(process, Duration(0));
        job.avoided.insert(slot.server);
        losses.push_back({&process, Reason::kPhaseDeadline, evidence, Duration(0)});
      }
      if (losses.empty()) return;
      if (++job.retries > kRetriesMax) {
        EndJob(job, JobState::kFailed, Reason::kPhaseDeadline, static_cast<int32_t>(JobExit::kInfrastructure),
               losses[0].evidence);
        return;
      }
      for (Loss& loss : losses) loss.process->planned = false;
      Amend(job, losses[0].evidence);
      return;
    }
    case JobStage::kAssigned: {
      // Whoever did not come through in time goes; the others form a higher generation.
      if (++job.retries > kRetriesMax) {
        EndJob(job, JobState::kFailed, Reason::kPhaseDeadline, static_cast<int32_t>(JobExit::kInfrastructure),
               fmt::format("the recovery exceeded its budget {} times in a row", job.retries));
        return;
      }
      std::string late;
      const bool restoring = job.phase == RecoveryPhase::kRestore;
      for (const RankAssignment& r : entry.assignment->ranks) {
        ProcessRow& process = processes_.at(r.process);
        if ((restoring ? process.ready : process.connected) == entry.fenced || process.exited) continue;
        late += fmt::format("{}rank {} on {}", late.empty() ? "" : ", ", r.rank.value, r.server.value);
        if (job.retries > 1) {
          // First its process is the suspect, then its server.
          if (job.retries > 2) job.avoided.insert(r.server);
          process.excluded = true;
          RememberLost(job, process);
          Kill(process, Duration(0));
        }
      }
      StartRecovery(job, Reason::kPhaseDeadline,
                    fmt::format("{} overdue: {}", RecoveryPhaseName(job.phase), late), Duration(0), false);
      return;
    }
    case JobStage::kAdopting:
    case JobStage::kRunning:
    case JobStage::kEnded:
      return;
  }
}

// ---- the end

void ControllerCore::Impl::EndJob(JobRow& job, JobState outcome, Reason reason, int32_t exit_code,
                                  const std::string& message) {
  if (job.stage == JobStage::kEnded) return;
  if (job.open) {
    job.open->decision_message = message;
    CloseRecovery(job, "job ended");
  }
  Append(JobEnded{job.uid, outcome, reason, exit_code, message, job.last_lines, now_.wall});
  job.reason = reason;
  job.message = message;
  job.regrow_at = job.complaint_deadline = job.standby_check = kNever;
  job.expected.clear();
  SetStage(job, JobStage::kEnded, kNever);
  // Spares that only keep its copies are told, too.
  std::set<ServerId> servers = std::exchange(job.touched, {});
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    servers.insert(process->server);
    process->kill_sent = true;
    process->planned = false;
    // Never told to start: nothing to reap.
    if (!process->spawn_sent && !process->reported) process->exited = true;
  }
  for (const ServerId& server : servers) {
    if (!Mutated(Mutation::kSkipRelease)) SendTo(server, ReleaseJob{job.uid});
  }
  Note(outcome == JobState::kFailed ? NoticeLevel::kError : NoticeLevel::kInfo, reason, "Job ended", {}, &job,
       {{"exitCode", std::to_string(exit_code)}, {"message", message}});
}

}  // namespace everstep
