// The recovery of one job, phase by phase (docs/recovery.md): fence, collect, decide the recovery point, plan, gather
// processes, assign, connect, restore, resume. Each transition is persisted before anybody is told.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/check.h"
#include "proto/model/names.h"

namespace everstep {

namespace {
constexpr size_t kEvidenceMax = 2000;           // bytes
constexpr Duration kContention = Milliseconds(500);  // before the idle standby of a job with a higher claim is taken
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
  const Generation generation = std::max(entry.fenced, job.generation_floor).Next();
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
    job.open->started = now_.wall;
    job.evidence_at = now_.instant - noticed_ago;
    job.phase = RecoveryPhase::kDetect;
    job.phase_since = job.evidence_at;
  } else {
    ++job.open->generations_used;
    if (job.open->evidence.size() < kEvidenceMax) job.open->evidence += "; then " + evidence;
    if (!planned) job.open->planned = false;
  }
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
  EnterPhase(job, RecoveryPhase::kFence);
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

// ---- Collect

void ControllerCore::Impl::CheckCollected(JobRow& job) {
  if (job.stage != JobStage::kCollecting && job.stage != JobStage::kPreparing) return;
  const JobEntry& entry = Entry(job);
  for (ProcessId pid : job.expected) {
    const ProcessRow& process = processes_.at(pid);
    if (process.exited) continue;
    if (entry.spec.opaque || process.collected < entry.fenced) return;
  }
  Decide(job);
}

RecoveryInputs ControllerCore::Impl::GatherInputs(JobRow& job) {
  const JobEntry& entry = Entry(job);
  RecoveryInputs inputs;
  inputs.lineage = entry.lineage;
  inputs.shard_count = entry.spec.pipeline_stages;
  for (ProcessId pid : job.expected) {
    const ProcessRow& process = processes_.at(pid);
    if (process.exited || process.excluded || process.collected != entry.fenced) continue;
    RankReport report = process.report;
    if (!job.trust_memory) report.memory_valid = false;
    inputs.survivors.push_back({pid, process.shard, report});
  }
  for (const auto& [key, holders] : job.snapshots) {
    if (!holders.empty()) inputs.snapshots.push_back({key.second, key.first});
  }
  inputs.proofs = job.proofs;
  for (const Manifest& manifest : entry.manifests) inputs.proofs.push_back(manifest.state);
  return inputs;
}

namespace {

// The newest complete checkpoint on the chain, when it is newer than `step`.
const Manifest* NewerManifest(const JobEntry& entry, Step step) {
  const Manifest* newest = nullptr;
  for (const Manifest& manifest : entry.manifests) {
    if (manifest.state.step <= step || !entry.lineage.OnChain(manifest.state)) continue;
    if (newest == nullptr || manifest.state.step > newest->state.step) newest = &manifest;
  }
  return newest;
}

}  // namespace

// A point below a complete checkpoint: its holders are away, with their disks (all machines lost power, say). They get
// one recovery budget to come back, before the steps since an older state are given up.
bool ControllerCore::Impl::AwaitsCheckpoint(JobRow& job, StateId point) {
  const Manifest* manifest = NewerManifest(Entry(job), point.step);
  if (manifest == nullptr) return false;
  if (job.copies_until == kNever) {
    job.copies_until = now_.instant + policy_.recovery_budget;
    std::string holders;
    for (const SnapshotInfo& copy : manifest->shards) {
      if (holders.size() < 60) holders += (holders.empty() ? "" : ", ") + copy.server.value;
    }
    job.message = fmt::format("Waits for a copy of the checkpoint of step {}, which was on {}", manifest->state.step.value,
                              holders);
    Note(NoticeLevel::kError, Reason::kSourceLost, "Recovery waits for a checkpoint's holders", {}, &job,
         {{"step", std::to_string(manifest->state.step.value)}, {"holders", holders}});
  }
  if (now_.instant >= job.copies_until) return false;
  job.deadline = job.copies_until;
  return true;
}

// Collect is over: whoever is not in the decision set is no survivor, and the recovery point is fixed.
void ControllerCore::Impl::Decide(JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (AwaitsCheckpoint(job, DecideRecoveryPoint(GatherInputs(job)))) return;
  EnterPhase(job, RecoveryPhase::kPlan);
  std::vector<ProcessRow*> excluded;
  for (ProcessId pid : job.expected) {
    ProcessRow& process = processes_.at(pid);
    if (process.exited || process.collected == entry.fenced) continue;
    excluded.push_back(&process);
    process.excluded = true;
    RememberLost(job, process);
    Note(NoticeLevel::kError, Reason::kCollectDeadline, "Rank left out of the decision set", process.server, &job,
         {{"rank", std::to_string(process.rank.value)}});
  }
  job.inputs = GatherInputs(job);
  const StateId point = DecideRecoveryPoint(job.inputs);
  Append(RecoveryPointDecided{job.uid, entry.fenced, point});
  // Only now: a controller that dies before the point is durable leaves them to the next Collect.
  for (ProcessRow* process : excluded) Kill(*process, Duration(0));
  // The new link is on the chain now, too; what was decided was decided against the chain before it. The point is its own
  // proof from here on, whoever proved it may die.
  job.inputs.proofs.push_back(point);
  job.protected_step = std::min(job.protected_step, point.step);
  if (job.open) {
    // Against the farthest the job came, not against the point that a generation before this one chose.
    const int64_t reached = std::max(job.committed.value, job.open->recovery_point.step.value + job.open->steps_lost);
    job.open->recovery_point = point;
    if (!entry.spec.opaque) job.open->steps_lost = std::max<int64_t>(0, reached - point.step.value);
    if (job.open->steps_lost > 0) {
      Note(NoticeLevel::kError, Reason::kRolledBack, "Rolled back", {}, &job,
           {{"step", std::to_string(point.step.value)}, {"stepsLost", std::to_string(job.open->steps_lost)}});
    }
  }
  job.committed = entry.spec.opaque ? job.committed : point.step;
  TryPlan(job);
}

// ---- Plan

bool ControllerCore::Impl::EveryShardHasSource(JobRow& job) {
  const JobEntry& entry = Entry(job);
  RecoveryInputs inputs = job.inputs;
  std::erase_if(inputs.survivors, [&](const SurvivorReport& s) {
    const ProcessRow& process = processes_.at(s.process);
    return process.exited || process.excluded;
  });
  inputs.snapshots.clear();
  for (const auto& [key, holders] : job.snapshots) {
    if (!holders.empty()) inputs.snapshots.push_back({key.second, key.first});
  }
  for (int32_t s = 0; s < inputs.shard_count; ++s) {
    if (!HasSource(inputs, ShardIndex(s), entry.recovery_point.step)) return false;
  }
  return true;
}

// A loss before Assign is durable: the same generation with another plan, as long as its recovery point has sources.
void ControllerCore::Impl::Amend(JobRow& job, const std::string& evidence) {
  if (job.open && job.open->evidence.size() < kEvidenceMax) job.open->evidence += "; " + evidence;
  if (!EveryShardHasSource(job)) {
    StartRecovery(job, Reason::kSourceLost, evidence + ": a shard lost its last source", Duration(0), false);
    return;
  }
  TryPlan(job);
}

PlacementRequest ControllerCore::Impl::BuildRequest(JobRow& job, bool keep_draining, bool* foreign_of_higher) {
  const JobEntry& entry = Entry(job);
  PlacementRequest request;
  request.pipeline_stages = entry.spec.pipeline_stages;
  request.world_wanted = WorldWanted(entry);
  request.world_min = WorldMin(entry);
  request.lost = job.lost;
  std::map<ShardIndex, int> holders;  // incumbents with the recovery point, on servers that stay
  std::vector<Incumbent> leaving;
  for (const SurvivorReport& s : job.inputs.survivors) {
    const ProcessRow& process = processes_.at(s.process);
    if (process.exited || process.excluded || process.kill_sent) continue;
    const bool source = ActionFor(job.inputs, s.report, entry.recovery_point.step) != SurvivorAction::kFetch;
    const Incumbent incumbent{process.id, process.rank, process.server, process.device, process.shard, source};
    if (Draining(process.server) && !keep_draining) {
      leaving.push_back(incumbent);
      continue;
    }
    if (source) ++holders[process.shard];
    request.incumbents.push_back(incumbent);
  }
  // A draining rank that is the only holder of its shard stays: it could not serve from outside the new mesh.
  for (const Incumbent& incumbent : leaving) {
    const auto held = job.snapshots.find({entry.recovery_point, incumbent.shard});
    const bool stored = held != job.snapshots.end() && !held->second.empty();
    if (incumbent.source && holders[incumbent.shard] == 0 && !stored && entry.recovery_point.step.value > 0) {
      ++holders[incumbent.shard];
      request.incumbents.push_back(incumbent);
    } else {
      RememberLost(job, processes_.at(incumbent.process));
      request.lost = job.lost;
    }
  }
  size_t claimed = 0;  // devices that jobs with a higher claim are about to need
  for (auto& [uid, other] : jobs_) {
    if (uid == job.uid || !HigherClaim(other, job)) continue;
    if (other.stage != JobStage::kRunning && other.stage != JobStage::kAdopting) request.rivals.push_back(Entry(other).spec.name);
    if (other.stage == JobStage::kCollecting || other.stage == JobStage::kWaiting || other.stage == JobStage::kPreparing) {
      claimed += static_cast<size_t>(MissingRanks(other));
    }
    claimed += static_cast<size_t>(std::max(0, Entry(other).spec.spares_reserved));
  }
  *foreign_of_higher = false;
  // A planned switch pauses nobody: it uses what is warm.
  const bool warm_only = entry.fence_planned && !entry.spec.opaque && job.stage != JobStage::kWaiting;
  std::vector<Candidate> shared;
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    for (const Device& device : server.inventory.devices) {
      Candidate c;
      c.server = id;
      c.device = device.index;
      c.failure_domain = server.inventory.failure_domain;
      c.device_model = device.model;
      c.speed = device.speed;
      const ProcessRow* occupant = Occupant(id, device.index);
      if (occupant == nullptr) {
        if (warm_only) continue;
        const bool freed = std::any_of(job.lost.begin(), job.lost.end(), [&](const LostRank& l) {
          return l.server == id && l.device == device.index;
        });
        c.kind = freed ? Candidate::Kind::kFreedInPlace : Candidate::Kind::kFreeDevice;
        (freed ? request.candidates : shared).push_back(std::move(c));
      } else if (occupant->job == job.uid) {
        if (occupant->member || occupant->kill_sent || occupant->excluded) continue;
        if (warm_only && !occupant->joined) continue;
        c.kind = occupant->joined ? Candidate::Kind::kReadyStandby : Candidate::Kind::kStartingStandby;
        c.process = occupant->id;
        request.candidates.push_back(std::move(c));
      } else if (!warm_only && !occupant->member && !occupant->planned && !occupant->kill_sent) {
        const JobRow* owner = FindJob(occupant->job);
        if (owner != nullptr && HigherClaim(*owner, job)) {
          if (now_.instant - job.stage_since < kContention || owner->stage != JobStage::kRunning) {
            *foreign_of_higher = true;
            continue;
          }
        }
        c.kind = Candidate::Kind::kForeignStandby;
        shared.push_back(std::move(c));
      }
    }
  }
  // The rest of the shared spares may be used.
  std::stable_sort(shared.begin(), shared.end(), [](const Candidate& a, const Candidate& b) { return a.kind < b.kind; });
  if (claimed < shared.size()) {
    shared.resize(shared.size() - claimed);
  } else {
    shared.clear();
  }
  for (Candidate& c : shared) request.candidates.push_back(std::move(c));
  return request;
}

void ControllerCore::Impl::TryPlan(JobRow& job) {
  const JobEntry& entry = Entry(job);
  const Generation generation = entry.fenced;
  bool contended = false;
  PlacementRequest request = BuildRequest(job, false, &contended);
  PlacementResult result = Place(request);
  if (!result.placement) {
    // Rather than park the job, a draining server serves on; its ranks move when there is a place.
    request = BuildRequest(job, true, &contended);
    result = Place(request);
  }
  if (!result.placement && !job.avoided.empty()) {
    // Better a server that failed before than none: retries are bounded.
    job.avoided.clear();
    request = BuildRequest(job, true, &contended);
    result = Place(request);
  }
  const bool first_start = entry.resumed.value == 0;
  // A first start, or a plan that would shrink, waits a moment for servers that are just registering or being reaped.
  if (result.placement && static_cast<int32_t>(result.placement->ranks.size()) < request.world_wanted) {
    const Instant settle = (first_start ? job.submitted_at : job.stage_since) + policy_.join_settle;
    const bool wait = first_start ? now_.instant < settle : contended && now_.instant < job.stage_since + kContention;
    // After a restart the spares report a moment later than the members.
    const bool registering = !first_start && now_.instant < registered_by_ &&
                             std::any_of(servers_.begin(), servers_.end(), [](const auto& s) {
                               return !s.second.dead && !s.second.session;
                             });
    if (wait || registering) {
      if (job.stage != JobStage::kWaiting) SetStage(job, JobStage::kWaiting, kNever);
      job.deadline = registering ? registered_by_ : first_start ? settle : job.stage_since + kContention;
      job.reason = Reason::kWaitingForCapacity;
      return;
    }
  }
  if (!result.placement) {
    for (ProcessRow* process : ProcessesOf(job.uid)) process->planned = false;
    if (job.stage != JobStage::kWaiting || job.reason != Reason::kWaitingForCapacity || job.message != result.refusal) {
      Note(NoticeLevel::kError, Reason::kWaitingForCapacity, "Job waits for capacity", {}, &job,
           {{"message", result.refusal}});
      Push(Measured{Measured::What::kPlan, Reason::kNoCapacity, RecoveryPhase::kNone, "refused", 0});
    }
    if (job.stage != JobStage::kWaiting) SetStage(job, JobStage::kWaiting, kNever);
    job.deadline = contended ? job.stage_since + kContention : kNever;
    if (job.deadline != kNever && job.deadline <= now_.instant) job.deadline = kNever;
    job.reason = Reason::kWaitingForCapacity;
    job.message = result.refusal;
    if (job.open) {
      job.open->decision = Reason::kWaitingForCapacity;
      job.open->decision_message = result.refusal;
    }
    return;
  }
  Placement& placement = *result.placement;
  for (ProcessRow* process : ProcessesOf(job.uid)) process->planned = false;
  PlanMade plan{job.uid, generation, {}, placement.reason, placement.message};
  std::vector<ProcessId> fresh;
  for (PlacedRank& placed : placement.ranks) {
    if (placed.process.value == 0) {
      if (ProcessRow* occupant = Occupant(placed.server, placed.device)) Kill(*occupant, Duration(0));
      placed.process = NewProcess(job.uid, placed.server, placed.device).id;
      fresh.push_back(placed.process);
    }
    ProcessRow& process = processes_.at(placed.process);
    process.planned = true;
    process.rank = placed.rank;
    plan.slots.push_back({placed.rank, placed.server, placed.device, placed.process});
    if (placed.kind == Candidate::Kind::kReadyStandby && !placed.incumbent) {
      Push(Measured{Measured::What::kSparePromoted, placement.reason, RecoveryPhase::kNone, "", 0});
    }
  }
  if (job.open) {
    job.open->decision = placement.reason;
    job.open->decision_message = placement.message;
    job.open->alternatives = placement.alternatives;
  }
  job.reason = placement.reason;
  job.message = placement.message;
  Append(std::move(plan));
  Push(Measured{Measured::What::kPlan, placement.reason, RecoveryPhase::kNone, "made", 0});
  Note(NoticeLevel::kInfo, placement.reason, "Plan made", {}, &job,
       {{"generation", std::to_string(generation.value)}, {"plan", placement.message}});
  SetStage(job, JobStage::kGathering, now_.instant + policy_.process_start_timeout);
  job.failure_counted = false;
  for (ProcessId pid : fresh) SpawnPlanned(job, processes_.at(pid));
  CheckGathered(job);
}

void ControllerCore::Impl::SpawnPlanned(JobRow& job, ProcessRow& process) {
  // A device is not used again before its process is reaped.
  for (ProcessId id : server_processes_[process.server]) {
    const ProcessRow& other = processes_.at(id);
    if (other.id != process.id && !other.exited && other.device == process.device && (other.started || other.spawn_sent)) {
      return;
    }
  }
  const JobEntry& entry = Entry(job);
  SpawnProcess spawn;
  spawn.job = job.uid;
  spawn.process = process.id;
  spawn.device = process.device;
  spawn.standby = !process.planned;
  spawn.restart_count = entry.failures;
  spawn.generation = entry.fenced;
  spawn.spec = entry.spec;
  if (entry.spec.opaque && entry.plan) {
    spawn.rank = process.rank;
    spawn.world_size = static_cast<int32_t>(entry.plan->slots.size());
    for (const PlannedSlot& slot : entry.plan->slots) {
      if (slot.server == process.server) {
        if (slot.rank < process.rank) ++spawn.local_rank;
        ++spawn.local_world_size;
      }
      if (slot.rank.value == 0) {
        if (const ServerRow* master = FindServer(slot.server)) spawn.master_address = master->inventory.host;
      }
    }
    // A fresh port per generation, the same for all ranks of it.
    spawn.master_port = 20000 + static_cast<int32_t>((entry.order * 131 + entry.fenced.value * 7) % 12000);
  }
  process.spawn_sent = true;
  if (!entry.spec.opaque) {
    process.join_deadline = now_.instant + policy_.process_start_timeout;
    job.standby_check = std::min(job.standby_check, process.join_deadline);
  }
  SendTo(process.server, std::move(spawn));
}

void ControllerCore::Impl::CheckGathered(JobRow& job) {
  if (job.stage != JobStage::kGathering) return;
  const JobEntry& entry = Entry(job);
  EVERSTEP_CHECK(entry.plan && entry.plan->generation == entry.fenced);
  for (const PlannedSlot& slot : entry.plan->slots) {
    const ProcessRow& process = processes_.at(slot.process);
    if (process.exited) return;  // LoseProcesses amends
    if (entry.spec.opaque ? !process.started : !process.joined) return;
  }
  if (entry.spec.opaque) {
    ResumeOpaque(job);
  } else {
    MakeAssignment(job);
  }
}

// ---- Assign

void ControllerCore::Impl::MakeAssignment(JobRow& job) {
  const JobEntry& entry = Entry(job);
  const int32_t stages = entry.spec.pipeline_stages;
  Assignment a;
  a.job = job.uid;
  a.job_name = entry.spec.name;
  a.generation = entry.fenced;
  a.recovery_point = entry.recovery_point;
  for (uint8_t& byte : a.token) byte = static_cast<uint8_t>(prng_.UpTo(255));
  a.pp_size = stages;
  a.dp_size = static_cast<int32_t>(entry.plan->slots.size()) / stages;
  a.micro_batch_count = entry.spec.micro_batch_count;
  const std::vector<Share> shares = EqualShares(entry.spec.micro_batch_count, a.dp_size);
  std::map<ProcessId, const SurvivorReport*> reports;
  for (const SurvivorReport& s : job.inputs.survivors) reports[s.process] = &s;

  std::map<ServerId, int32_t> local;
  std::map<ShardIndex, std::vector<Rank>> sources;
  for (const PlannedSlot& slot : entry.plan->slots) {
    ProcessRow& process = processes_.at(slot.process);
    RankAssignment r;
    r.rank = slot.rank;
    r.server = slot.server;
    r.device = slot.device;
    r.process = slot.process;
    r.dp = slot.rank.value / stages;
    r.pp = slot.rank.value % stages;
    r.local_rank = local[slot.server]++;
    r.micro_batch_first = shares[static_cast<size_t>(r.dp)].first;
    r.micro_batch_count = shares[static_cast<size_t>(r.dp)].count;
    r.mesh_address = process.mesh_address;
    r.action = RestoreAction::kFetchFromRank;
    auto report = reports.find(slot.process);
    if (report != reports.end() && report->second->shard == r.shard()) {
      switch (ActionFor(job.inputs, report->second->report, entry.recovery_point.step)) {
        case SurvivorAction::kKeep: r.action = RestoreAction::kKeep; break;
        case SurvivorAction::kRollForward: r.action = RestoreAction::kRollForward; break;
        case SurvivorAction::kFetch: break;
      }
    }
    if (r.action != RestoreAction::kFetchFromRank) sources[r.shard()].push_back(r.rank);
    a.ranks.push_back(std::move(r));
  }
  std::map<Rank, int> load;
  for (RankAssignment& r : a.ranks) {
    if (r.action != RestoreAction::kFetchFromRank) continue;
    const std::vector<Rank>& candidates = sources[r.shard()];
    if (!candidates.empty()) {
      // The least loaded live replica, ties by rank.
      r.source_rank = *std::min_element(candidates.begin(), candidates.end(), [&](Rank x, Rank y) {
        return std::make_pair(load[x], x) < std::make_pair(load[y], y);
      });
      ++load[r.source_rank];
    } else if (entry.recovery_point.step.value == 0) {
      r.action = RestoreAction::kInitialize;
    } else {
      r.action = RestoreAction::kFetchFromSnapshot;
      auto held = job.snapshots.find({entry.recovery_point, r.shard()});
      if (held != job.snapshots.end()) {
        for (const SnapshotInfo& s : held->second) {
          const ServerRow* server = FindServer(s.server);
          if (server == nullptr || server->dead) continue;
          r.sources.push_back({s.server, s.tier, server->inventory.transfer_address, s.state, s.shard});
        }
      }
      std::stable_sort(r.sources.begin(), r.sources.end(), [&](const SnapshotSource& x, const SnapshotSource& y) {
        return std::make_pair(x.server != r.server, x.tier) < std::make_pair(y.server != r.server, y.tier);
      });
      if (r.sources.empty()) {
        StartRecovery(job, Reason::kSourceLost, fmt::format("shard {} lost its last source", r.pp), Duration(0), false);
        return;
      }
    }
  }
  std::set<ServerId> servers;
  for (const RankAssignment& r : a.ranks) {
    servers.insert(r.server);
    ProcessRow& process = processes_.at(r.process);
    process.member = true;
    process.excluded = false;
    process.assigned = a.generation;
    process.rank = r.rank;
    process.shard = r.shard();
    process.connected = process.ready = Generation(0);
    process.restored_from.clear();
    process.bytes_restored = 0;
  }
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->exited || process->assigned == a.generation) continue;
    if (process->member) {
      // Left over: it waits in Join like a standby, or leaves with its draining server.
      process->member = false;
      process->planned = false;
      process->rank = Rank(-1);
      if (Draining(process->server) || process->excluded) Kill(*process, entry.spec.termination_grace);
    }
  }
  job.expected.clear();
  EnterPhase(job, RecoveryPhase::kAssign);
  Append(AssignmentMade{a});
  for (const ServerId& server : servers) SendTo(server, AssignProcesses{a});
  SetStage(job, JobStage::kAssigned, now_.instant + policy_.assign_timeout());
}

void ControllerCore::Impl::ResumeOpaque(JobRow& job) {
  const JobEntry& entry = Entry(job);
  for (const PlannedSlot& slot : entry.plan->slots) {
    ProcessRow& process = processes_.at(slot.process);
    process.member = true;
    process.assigned = entry.fenced;
    process.rank = slot.rank;
    process.shard = ShardIndex(0);
    process.restored_from = "its own checkpoint";
  }
  job.expected.clear();
  EnterPhase(job, RecoveryPhase::kResume);
  Append(GenerationResumed{job.uid, entry.fenced});
  SetStage(job, JobStage::kRunning, kNever);
  CloseRecovery(job, "resumed");
}

// ---- Connect, Restore, Resume

void ControllerCore::Impl::CheckReady(JobRow& job) {
  const JobEntry& entry = Entry(job);
  std::map<ShardIndex, const ProcessRow*> first;
  for (const RankAssignment& r : entry.assignment->ranks) {
    const ProcessRow& process = processes_.at(r.process);
    if (process.ready != entry.fenced) return;
    auto [it, inserted] = first.emplace(r.shard(), &process);
    if (!inserted && it->second->digest != process.digest) {
      DistrustMemory(job, fmt::format("ranks {} and {} hold different states of shard {}", it->second->rank.value,
                                      process.rank.value, r.pp));
      return;
    }
  }
  EnterPhase(job, RecoveryPhase::kResume);
  Append(GenerationResumed{job.uid, entry.fenced});
  std::set<ServerId> servers;
  for (const RankAssignment& r : entry.assignment->ranks) servers.insert(r.server);
  for (const ServerId& server : servers) {
    SendTo(server, ResumeProcesses{job.uid, entry.fenced, job.protected_step});
  }
  job.trust_memory = true;
  job.vote_at = now_.instant;
  SetStage(job, JobStage::kRunning, kNever);
  CloseRecovery(job, "resumed");
}

// Replicas differ and nobody knows which is right: all of them restore from verified copies.
void ControllerCore::Impl::DistrustMemory(JobRow& job, const std::string& evidence) {
  job.trust_memory = false;
  if (++job.retries > kRetriesMax) {
    EndJob(job, JobState::kFailed, Reason::kDigestMismatch, static_cast<int32_t>(JobExit::kDataLoss), evidence);
    return;
  }
  StartRecovery(job, Reason::kDigestMismatch, evidence, Duration(0), false);
}

void ControllerCore::Impl::CloseRecovery(JobRow& job, const std::string& outcome) {
  EnterPhase(job, RecoveryPhase::kNone);
  job.proofs.clear();
  job.lost.clear();
  job.retries = 0;
  job.standby_failures = 0;
  job.avoided.clear();
  job.failure_counted = false;
  const JobEntry& entry = Entry(job);
  job.regrow_at = kNever;
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
  Append(RecoveryEnded{std::move(record)});
  job.open.reset();
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
      StartRecovery(job, Reason::kPeerComplaint, complaint, Duration(0), false);
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
  std::set<ServerId> servers;
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    servers.insert(process->server);
    process->kill_sent = true;
    process->planned = false;
    // Never told to start: nothing to reap.
    if (!process->spawn_sent && !process->reported) process->exited = true;
  }
  for (const ServerId& server : servers) SendTo(server, ReleaseJob{job.uid});
  Note(outcome == JobState::kFailed ? NoticeLevel::kError : NoticeLevel::kInfo, reason, "Job ended", {}, &job,
       {{"exitCode", std::to_string(exit_code)}, {"message", message}});
}

}  // namespace everstep
