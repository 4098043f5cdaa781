// The recovery of one job (docs/recovery.md): its first half here, from the evidence to the fence; then collect.cc,
// plan.cc, assign.cc and closing.cc. Each transition is persisted before anybody is told.
#include <algorithm>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"
#include "proto/base/check.h"

namespace everstep {

namespace {
constexpr size_t kEvidenceMax = 2000;           // bytes
}  // namespace

void ControllerCore::Impl::SetStage(JobRow& job, JobStage stage, Instant deadline) {
  job.stage = stage;
  job.deadline = deadline;
  job.stage_since = now_.instant;
  dirty_ = true;
}

void ControllerCore::Impl::EnterPhase(JobRow& job, RecoveryPhase phase) {
  if (job.phase == phase) return;
  if (job.open && job.phase != RecoveryPhase::kNone) {
    Duration budget{};
    switch (job.phase) {
      case RecoveryPhase::kFence:
      case RecoveryPhase::kCollect: budget = policy_.collect_timeout(); break;
      case RecoveryPhase::kAssign:
      case RecoveryPhase::kConnect: budget = policy_.assign_timeout(); break;
      case RecoveryPhase::kRestore: budget = policy_.restore_timeout(); break;
      case RecoveryPhase::kResume: budget = policy_.resume_timeout(); break;
      default: break;
    }
    const Duration lasted = now_.instant - job.phase_since;
    if (job.open->phases.size() < 64) {
      job.open->phases.push_back({job.phase, job.phase_since - job.evidence_at, lasted, budget});
    }
    Push(Measured{Measured::What::kRecoveryPhase, Reason::kNone, job.phase, "", ToSeconds(lasted)});
  }
  job.phase = phase;
  job.phase_since = now_.instant;
}

void ControllerCore::Impl::Kill(ProcessRow& process, Duration grace) {
  if (process.exited) return;
  process.kill_sent = true;
  if (!process.spawn_sent && !process.reported) {
    process.exited = true;  // nobody was told to start it
    return;
  }
  SendTo(process.server, KillProcess{process.job, process.id, grace});
}

// ---- Fence

void ControllerCore::Impl::StartRecovery(JobRow& job, Reason reason, const std::string& evidence, Duration noticed_ago,
                                         bool planned) {
  const JobEntry& entry = Entry(job);
  EVERSTEP_CHECK(!entry.ended);
  const Generation above = std::max(entry.fenced, job.generation_floor);
  const Generation generation = Mutated(Mutation::kReuseGeneration) && above.value > 1 ? above : above.Next();
  RecoveryId id = entry.recovery;
  if (!job.open) {
    id = RecoveryId(ledger_.next_recovery);
    job.open = RecoveryRecord{};
    job.open->id = id;
    job.open->job = job.uid;
    job.open->job_name = entry.spec.name;
    job.open->from = entry.resumed;
    job.open->reason = reason;
    job.open->evidence = evidence;
    job.open->planned = planned;
    job.evidence_at = now_.instant - noticed_ago;
    if (job.complaint_deadline != kNever) job.evidence_at = std::min(job.evidence_at, job.complaint_at);
    job.open->started = WallTime{now_.wall.unix_microseconds - (now_.instant - job.evidence_at).count() / 1000};
    job.phase = RecoveryPhase::kDetect;
    job.phase_since = job.evidence_at;
  } else {
    ++job.open->generations_used;
    if (job.open->evidence.size() < kEvidenceMax) job.open->evidence += "; then " + evidence;
    if (!planned) job.open->planned = false;
  }
  if (!planned) job.world_target = 0;
  job.open->to = generation;
  EnterPhase(job, RecoveryPhase::kDecide);
  Append(GenerationFenced{job.uid, generation, id, reason, planned});
  job.reason = reason;
  job.message = evidence;
  job.complaint_deadline = kNever;
  job.complaint.clear();
  job.regrow_at = kNever;
  job.expected.clear();
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    process->planned = false;
    // An opaque process was started for one generation; all of them go, whatever stage they were in.
    if (process->exited || process->finished || (!process->member && !entry.spec.opaque)) continue;
    const ServerRow* server = FindServer(process->server);
    if (server == nullptr || server->dead) continue;
    process->excluded = false;
    if (process->kill_sent) continue;
    job.expected.insert(process->id);
  }
  Note(planned ? NoticeLevel::kInfo : NoticeLevel::kError, reason, planned ? "Planned switch started" : "Recovery started",
       {}, &job,
       {{"recovery", std::to_string(id.value)}, {"generation", std::to_string(generation.value)}, {"evidence", evidence}});
  Push(ConfirmFence{job.uid, generation});
  if (planned && !entry.spec.opaque) {
    // All ranks leave together after the step whose vote carried the pending generation.
    std::map<ServerId, std::vector<ProcessId>> by_server;
    for (ProcessId pid : job.expected) by_server[processes_.at(pid).server].push_back(pid);
    for (auto& [server, list] : by_server) SendTo(server, PrepareProcesses{job.uid, generation, std::move(list)});
    SetStage(job, JobStage::kPreparing, now_.instant + policy_.recovery_budget);
    return;
  }
  FenceMembers(job);
}

// The decision stands: whatever is learned from here on joins this generation's plan, or raises it.
void ControllerCore::Impl::OnFenceDurable(const FenceBecameDurable& event) {
  JobRow* job = FindJob(event.job);
  if (job == nullptr || job->stage == JobStage::kEnded || Entry(*job).fenced != event.generation) return;
  if (job->phase == RecoveryPhase::kDecide) EnterPhase(*job, RecoveryPhase::kFence);
}

void ControllerCore::Impl::FenceMembers(JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque) {
    // Its processes know no fence: they are killed, all of them, and only then is anything started.
    for (ProcessId pid : job.expected) Kill(processes_.at(pid), Duration(0));
    SetStage(job, JobStage::kCollecting, kNever);
  } else {
    std::map<ServerId, std::vector<ProcessId>> by_server;
    for (ProcessId pid : job.expected) {
      if (processes_.at(pid).collected < entry.fenced) by_server[processes_.at(pid).server].push_back(pid);
    }
    for (auto& [server, list] : by_server) SendTo(server, FenceProcesses{job.uid, entry.fenced, std::move(list)});
    SetStage(job, JobStage::kCollecting, now_.instant + policy_.collect_timeout());
  }
  CheckCollected(job);
}

}  // namespace everstep
