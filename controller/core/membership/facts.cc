// Facts of agents, one handler each. A fact from a session that no longer counts, or about a process of another server,
// changes nothing; it is counted.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/model/names.h"

namespace everstep {

namespace {
constexpr size_t kLinesKept = 20;
constexpr size_t kMetricsKept = 32;
}  // namespace

ProcessRow* ControllerCore::Impl::FindProcess(ProcessId id) {
  auto it = processes_.find(id);
  return it == processes_.end() ? nullptr : &it->second;
}

ProcessRow* ControllerCore::Impl::OwnProcess(ServerRow& server, const JobUid& job, ProcessId id) {
  ProcessRow* process = FindProcess(id);
  if (process == nullptr || process->job != job || process->server != server.inventory.server ||
      process->incarnation != server.incarnation) {
    CountStale("fact");
    return nullptr;
  }
  return process;
}

void ControllerCore::Impl::CountStale(const char* kind) {
  Push(Measured{Measured::What::kStaleMessage, Reason::kStaleGeneration, RecoveryPhase::kNone, kind, 0});
}

void ControllerCore::Impl::OnFact(const FactReceived& event) {
  ServerRow* server = FindSession(event.session);
  if (server == nullptr || server->dead || server->session != event.session) {
    CountStale("fact");
    return;
  }
  server->liveness.OnStreamMessage(now_.instant);
  if (server->late) {
    server->late = false;
    dirty_ = true;
  }
  if (event.sequence > server->facts_seen) {
    const ServerId id = server->inventory.server;
    server->facts_seen = event.sequence;
    std::visit([&](const auto& fact) { Handle(*server, fact); }, event.fact);
    server = FindServer(id);
    if (server == nullptr || server->dead) return;
  }
  Send(*server, AcknowledgeFacts{server->facts_seen});
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessStarted& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  if (process == nullptr || process->exited) return;
  process->started = process->reported = true;
  process->pid = fact.pid;
  JobRow* job = FindJob(fact.job);
  if (job != nullptr && job->stage == JobStage::kGathering) CheckGathered(*job);
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessStartFailed& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited) return;
  process->exited = true;
  dirty_ = true;  // its device is free, whatever became of the job
  if (job == nullptr || job->stage == JobStage::kEnded) return;
  job->last_lines = {fact.message};
  Note(NoticeLevel::kError, fact.reason, "Process did not start", server.inventory.server, job,
       {{"message", fact.message}});
  const bool elsewhere = std::any_of(servers_.begin(), servers_.end(), [&](const auto& other) {
    return other.first != server.inventory.server && Usable(other.second) && !Avoids(*job, other.first);
  });
  if (process->planned && elsewhere) job->avoided.insert(server.inventory.server);
  if (fact.reason == Reason::kProgramMissing) {
    job->banned.insert(server.inventory.server);
    // At the job's start this is the user's mistake; later another server may still do.
    if (Entry(*job).resumed.value == 0) {
      EndJob(*job, JobState::kFailed, Reason::kProgramMissing, static_cast<int32_t>(JobExit::kUserSignal), fact.message);
      return;
    }
  }
  if (process->planned && ++job->retries > kRetriesMax) {
    EndJob(*job, JobState::kFailed, fact.reason, static_cast<int32_t>(JobExit::kInfrastructure), fact.message);
    return;
  }
  LoseProcesses(*job, {{process, fact.reason, fact.message, Duration(0)}});
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessExited& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited) return;
  process->exited = true;
  process->started = true;
  process->finished = fact.finished;
  process->progress = fact.progress;
  for (const std::string& line : fact.last_lines) process->lines.push_back(line);
  while (process->lines.size() > kLinesKept) process->lines.pop_front();
  dirty_ = true;  // its device is free, whatever became of the job
  if (job == nullptr || job->stage == JobStage::kEnded) return;
  const Reason reason = fact.signal != 0 ? Reason::kProcessKilled : Reason::kProcessExited;
  const std::string how = fact.signal != 0 ? fmt::format("signal {}", fact.signal)
                                           : fmt::format("exit code {}", fact.exit_code);
  const std::string evidence =
      process->rank.value >= 0
          ? fmt::format("rank {} on {} ended with {}", process->rank.value, process->server.value, how)
          : fmt::format("standby on {} ended with {}", process->server.value, how);
  if (process->finished && fact.exit_code != 0 && fact.signal == 0) {
    job->last_lines.assign(process->lines.begin(), process->lines.end());
    EndJob(*job, JobState::kFailed, Reason::kUserError, std::min(fact.exit_code, static_cast<int32_t>(JobExit::kUserSignal)),
           evidence + " after its last step");
    return;
  }
  if (process->finished) {
    Note(NoticeLevel::kDebug, Reason::kJobFinished, "Rank finished", process->server, job,
         {{"rank", std::to_string(process->rank.value)}});
    if (FinishIfAllFinished(*job)) return;
    if (Entry(*job).spec.opaque || process->member) {
      CheckCollected(*job);  // it answers no Collect any more
      return;                // the others are about to finish, too
    }
  }
  if (Finishing(*job)) {
    FinishIfAllFinished(*job);
    return;
  }
  if (process->kill_sent) {
    LoseProcesses(*job, {{process, reason, evidence, fact.noticed_ago}});
    return;
  }
  job->last_lines.assign(process->lines.begin(), process->lines.end());
  Note(NoticeLevel::kError, reason, "Process ended", process->server, job,
       {{"rank", std::to_string(process->rank.value)}, {"how", how},
        {"phase", std::string(RankPhaseName(fact.progress.phase))},
        {"step", std::to_string(fact.progress.applied.step.value)}});
  if ((process->member || process->planned) && CountFailure(*job, *process, fact)) return;  // the job ended
  LoseProcesses(*job, {{process, reason, evidence, fact.noticed_ago}});
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessJoined& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited || job == nullptr) return;
  process->started = process->joined = process->reported = true;
  process->pid = fact.pid;
  process->mesh_address = fact.mesh_address;
  dirty_ = true;
  if (job->stage == JobStage::kGathering) CheckGathered(*job);
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessCollected& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited || job == nullptr) return;
  const JobEntry& entry = Entry(*job);
  if (fact.answer.generation != entry.fenced || !job->expected.contains(process->id) || process->excluded ||
      (job->stage != JobStage::kCollecting && job->stage != JobStage::kPreparing)) {
    CountStale("collect");
    return;
  }
  process->collected = fact.answer.generation;
  process->report = fact.answer.report;
  if (fact.answer.report.memory_valid) {
    job->committed = std::max(job->committed, fact.answer.report.applied.step);
  }
  if (job->phase == RecoveryPhase::kDecide) EnterPhase(*job, RecoveryPhase::kFence);
  if (job->phase == RecoveryPhase::kFence) EnterPhase(*job, RecoveryPhase::kCollect);
  CheckCollected(*job);
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessConnected& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited || job == nullptr) return;
  if (job->stage != JobStage::kAssigned || fact.connected.generation != Entry(*job).fenced) {
    CountStale("connected");
    return;
  }
  process->connected = fact.connected.generation;
  if (job->phase == RecoveryPhase::kAssign) EnterPhase(*job, RecoveryPhase::kConnect);
  bool all = true;
  for (ProcessRow* other : ProcessesOf(job->uid)) {
    if (other->member && !other->exited && other->assigned == Entry(*job).fenced) {
      all &= other->connected == Entry(*job).fenced;
    }
  }
  if (all && job->phase == RecoveryPhase::kConnect) {
    EnterPhase(*job, RecoveryPhase::kRestore);
    job->deadline = now_.instant + policy_.restore_timeout();
  }
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessReady& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited || job == nullptr) return;
  if (job->stage != JobStage::kAssigned || fact.ready.generation != Entry(*job).fenced) {
    CountStale("ready");
    return;
  }
  process->connected = process->ready = fact.ready.generation;
  process->restored_from = fact.ready.restored_from;
  process->bytes_restored = fact.ready.bytes_restored;
  process->digest = fact.ready.shard_digest;
  CheckReady(*job);
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProcessFailed& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || process->exited || job == nullptr) return;
  const JobEntry& entry = Entry(*job);
  if (fact.failed.generation != entry.fenced ||
      (job->stage != JobStage::kAssigned && job->stage != JobStage::kRunning && job->stage != JobStage::kPreparing)) {
    CountStale("failed");
    return;
  }
  const std::string evidence = fmt::format("rank {} on {} says: {}", process->rank.value, process->server.value,
                                           fact.failed.message);
  if (Finishing(*job)) {
    Kill(*process, entry.spec.termination_grace);  // it missed the end of the last barrier; nothing is left to do
    return;
  }
  if (fact.failed.code == StatusCode::kDataLoss) {
    if (job->stage != JobStage::kAssigned) return;
    DistrustMemory(*job, evidence);
    return;
  }
  // A complaint is no proof. It makes us look at once, and acts only if nothing better comes.
  if (entry.assignment && fact.failed.suspect.value >= 0 &&
      static_cast<size_t>(fact.failed.suspect.value) < entry.assignment->ranks.size()) {
    const RankAssignment& suspect = entry.assignment->ranks[static_cast<size_t>(fact.failed.suspect.value)];
    if (ServerRow* other = FindServer(suspect.server); other != nullptr && !other->dead) {
      other->evidence_at = std::min(other->evidence_at, now_.instant);
      StartProbing(*other);
    }
  }
  if (job->complaint_deadline == kNever) {
    // A link that stays broken must not use up the retries in a second: each time it is given longer.
    const Duration patience = std::max(policy_.probe_timeout, policy_.lease / 4) * (1 << std::min(job->retries, 5));
    job->complaint_deadline = now_.instant + (job->retries == 0 ? policy_.probe_timeout : patience);
    job->complaint = evidence;
    job->complaint_at = now_.instant;
  }
}

void ControllerCore::Impl::Handle(ServerRow& server, const MetricObserved& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  JobRow* job = FindJob(fact.job);
  if (process == nullptr || job == nullptr) return;
  if (job->metrics.size() < kMetricsKept || job->metrics.contains(fact.metric.name)) {
    job->metrics[fact.metric.name] = fact.metric.value;
  }
  Push(ForwardMetric{fact.job, process->rank, fact.metric.step, fact.metric.name, fact.metric.value});
}

void ControllerCore::Impl::Handle(ServerRow& server, const LinesPrinted& fact) {
  ProcessRow* process = OwnProcess(server, fact.job, fact.process);
  if (process == nullptr) return;
  for (const std::string& line : fact.lines) process->lines.push_back(line);
  while (process->lines.size() > kLinesKept) process->lines.pop_front();
  Push(ForwardLines{fact.job, process->rank, process->id, fact.lines});
}

void ControllerCore::Impl::Handle(ServerRow& server, const ProbeReturned& fact) {
  if (fact.nonce != server.probe_nonce) CountStale("probe");
}

void ControllerCore::Impl::Handle(ServerRow& server, const StorageTroubled& fact) {
  Note(NoticeLevel::kError, fact.reason, "Storage trouble on a server", server.inventory.server, nullptr,
       {{"message", fact.message}});
}

}  // namespace everstep
