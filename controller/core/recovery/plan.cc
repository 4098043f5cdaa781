// Plan: which processes carry the next generation, amended while losses come in, until all of them wait in Join
// (docs/recovery.md).
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"
#include "proto/base/check.h"

namespace everstep {

namespace {
constexpr size_t kEvidenceMax = 2000;           // bytes
constexpr Duration kContention = Milliseconds(500);  // before the idle standby of a job with a higher claim is taken
}  // namespace

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
  request.world_wanted = WorldToPlan(job, static_cast<int32_t>(request.incumbents.size()));
  size_t claimed = 0;  // devices that jobs with a higher claim are about to need
  for (auto& [uid, other] : jobs_) {
    if (uid == job.uid || !HigherClaim(other, job)) continue;
    if (other.stage != JobStage::kRunning && other.stage != JobStage::kAdopting) request.rivals.push_back(Entry(other).spec.name);
    if (other.stage == JobStage::kWaiting || other.stage == JobStage::kPreparing) {
      claimed += static_cast<size_t>(MissingRanks(other));
    }
    claimed += static_cast<size_t>(std::max(0, Entry(other).spec.spares_reserved));
  }
  const auto ahead = static_cast<size_t>(RanksAhead(job));
  claimed += ahead;
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
      } else if (!warm_only && !occupant->member && !occupant->kill_sent) {
        const JobRow* owner = FindJob(occupant->job);
        // Until its Assign, a plan yields to a higher claim whose loss falls into the same window.
        if (occupant->planned && (owner == nullptr || owner->stage != JobStage::kGathering || Entry(*owner).spec.opaque ||
                                  !HigherClaim(job, *owner))) {
          continue;
        }
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
  // Losses within one window: what a job with a higher claim is about to need beyond the shared devices is taken from
  // this job's own standbys, which idle no longer than until its plan.
  for (size_t short_by = ahead > shared.size() ? ahead - shared.size() : 0; short_by > 0; --short_by) {
    auto standby = std::find_if(request.candidates.rbegin(), request.candidates.rend(),
                                [](const Candidate& c) { return c.process.value != 0; });
    if (standby == request.candidates.rend()) break;
    request.candidates.erase(std::next(standby).base());
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

// Ranks that jobs with a higher claim have just lost and not placed yet, beyond what their own standbys replace.
int32_t ControllerCore::Impl::RanksAhead(const JobRow& job) {
  int32_t ahead = 0;
  for (auto& [uid, other] : jobs_) {
    if (uid == job.uid || other.stage != JobStage::kCollecting || !HigherClaim(other, job)) continue;
    ahead += std::max(0, MissingRanks(other) - StandbysOf(other));
  }
  return ahead;
}

// A job with a lower claim that lacks ranks at this moment, too.
const JobRow* ControllerCore::Impl::LowerContender(const JobRow& job) {
  for (const JobRow* other : JobsByClaim()) {
    if (other->uid == job.uid || !HigherClaim(job, *other)) continue;
    if ((other->stage == JobStage::kCollecting || other->stage == JobStage::kWaiting) && MissingRanks(*other) > 0) return other;
  }
  return nullptr;
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
    if (!request.rivals.empty()) job.outranked_by = request.rivals.front();
    if (!job.outranked_by.empty()) {
      result.refusal += fmt::format("; the claim of job {} is higher (priority, then age)", job.outranked_by);
    }
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
  const auto world = static_cast<int32_t>(placement.ranks.size());
  if (job.world_target > 0 && entry.assignment && world < static_cast<int32_t>(entry.assignment->ranks.size())) {
    placement.reason = Reason::kJobShrunk;
    placement.message = fmt::format("Go on with {} of {} ranks: {}", world, entry.assignment->ranks.size(), job.message);
  }
  const bool takes = std::any_of(placement.ranks.begin(), placement.ranks.end(), [](const PlacedRank& r) {
    return !r.incumbent && r.kind != Candidate::Kind::kFreedInPlace;
  });
  if (const JobRow* contender = LowerContender(job); takes && contender != nullptr) {
    placement.message += fmt::format("; job {} lacks ranks, too, and its claim is lower (priority, then age)",
                                     Entry(*contender).spec.name);
  }
  for (ProcessRow* process : ProcessesOf(job.uid)) process->planned = false;
  PlanMade plan{job.uid, generation, {}, placement.reason, placement.message};
  std::vector<ProcessId> fresh;
  std::map<JobUid, ServerId> robbed;
  for (PlacedRank& placed : placement.ranks) {
    if (placed.process.value == 0) {
      if (ProcessRow* occupant = Occupant(placed.server, placed.device)) {
        if (occupant->planned) robbed[occupant->job] = placed.server;
        Kill(*occupant, Duration(0));
      }
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
  for (const auto& [uid, server] : robbed) {
    placement.message += fmt::format("; {} was meant for job {}, whose claim is lower (priority, then age)", server.value,
                                     ledger_.jobs.at(uid).spec.name);
  }
  plan.message = placement.message;
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
  for (const auto& [uid, server] : robbed) {
    if (JobRow* other = FindJob(uid); other != nullptr && other->stage == JobStage::kGathering) {
      other->outranked_by = entry.spec.name;
      Amend(*other, fmt::format("{} goes to job {}, whose claim is higher (priority, then age)", server.value,
                                entry.spec.name));
    }
  }
  CheckGathered(job);
}

void ControllerCore::Impl::SpawnPlanned(JobRow& job, ProcessRow& process) {
  // A device is not used again before its process is reaped.
  for (ProcessId id : server_processes_[process.server]) {
    const ProcessRow& other = processes_.at(id);
    if (Mutated(Mutation::kPromoteTwice) || Mutated(Mutation::kReuseDeviceEarly)) break;
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
  job.touched.insert(process.server);
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

}  // namespace everstep
