// Level-driven upkeep: waiting jobs are planned again, standbys are kept warm, widths restored, draining servers
// emptied. Runs after a step that changed something; looks at state only, never at what happened.
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"

namespace everstep {

int32_t ControllerCore::Impl::WorldWanted(const JobEntry& entry) const {
  const int32_t world = entry.spec.servers_wanted * entry.spec.ranks_per_server;
  return std::max(entry.spec.pipeline_stages, world / entry.spec.pipeline_stages * entry.spec.pipeline_stages);
}

int32_t ControllerCore::Impl::WorldMin(const JobEntry& entry) const {
  return std::max(entry.spec.pipeline_stages, entry.spec.servers_min * entry.spec.ranks_per_server);
}

// As wide as the job may become with what nobody else wants; each replica needs a micro-batch.
int32_t ControllerCore::Impl::WorldMax(const JobEntry& entry) const {
  const int32_t stages = entry.spec.pipeline_stages;
  int32_t world = entry.spec.servers_max * entry.spec.ranks_per_server / stages * stages;
  if (entry.spec.micro_batch_count > 0) world = std::min(world, entry.spec.micro_batch_count * stages);
  return std::max(world, WorldWanted(entry));
}

// The width to plan for when `staying` processes go on: no loss takes a spare for ranks beyond the wanted ones.
int32_t ControllerCore::Impl::WorldToPlan(const JobRow& job, int32_t staying) const {
  const JobEntry& entry = Entry(job);
  if (job.world_target > 0) return job.world_target;
  const int32_t stages = entry.spec.pipeline_stages;
  return std::clamp(staying / stages * stages, WorldWanted(entry), WorldMax(entry));
}

bool ControllerCore::Impl::HigherClaim(const JobRow& a, const JobRow& b) const {
  const JobEntry& x = Entry(a);
  const JobEntry& y = Entry(b);
  if (x.ended || y.ended) return false;
  if (x.spec.priority != y.spec.priority) return x.spec.priority > y.spec.priority;
  return x.order < y.order;
}

std::vector<JobRow*> ControllerCore::Impl::JobsByClaim() {
  std::vector<JobRow*> rows;
  for (auto& [uid, job] : jobs_) {
    if (job.stage != JobStage::kEnded) rows.push_back(&job);
  }
  std::sort(rows.begin(), rows.end(), [this](const JobRow* a, const JobRow* b) { return HigherClaim(*a, *b); });
  return rows;
}

int32_t ControllerCore::Impl::MissingRanks(const JobRow& job) const {
  int32_t live = 0;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->member && !process->exited && !process->excluded && !process->kill_sent) ++live;
  }
  return std::max(0, WorldWanted(Entry(job)) - live);
}

// Who sits on a device: a process that lives there, else one that is being killed.
ProcessRow* ControllerCore::Impl::Occupant(const ServerId& server, DeviceIndex device) {
  auto it = server_processes_.find(server);
  if (it == server_processes_.end()) return nullptr;
  ProcessRow* dying = nullptr;
  for (ProcessId id : it->second) {
    ProcessRow& process = processes_.at(id);
    if (process.exited || process.device != device) continue;
    if (process.planned && Mutated(Mutation::kPromoteTwice)) continue;
    if (!process.kill_sent) return &process;
    dying = &process;
  }
  return dying;
}

void ControllerCore::Impl::Reconcile() {
  dirty_ = false;
  // Rows of the dead are kept while a recovery may still want them; then they go.
  std::vector<ProcessId> gone;
  for (auto& [id, process] : processes_) {
    JobRow* job = FindJob(process.job);
    if (!process.exited) {
      if (!process.spawn_sent && !process.started && !process.kill_sent && job != nullptr &&
          job->stage != JobStage::kEnded) {
        SpawnPlanned(*job, process);
      }
      continue;
    }
    const bool settled = job == nullptr || job->stage == JobStage::kEnded ||
                         (job->stage == JobStage::kRunning && process.assigned != Entry(*job).fenced);
    if (settled && !process.planned) gone.push_back(id);
  }
  for (ProcessId id : gone) {
    const ProcessRow& process = processes_.at(id);
    job_processes_[process.job].erase(id);
    server_processes_[process.server].erase(id);
    processes_.erase(id);
  }
  for (JobRow* job : JobsByClaim()) {
    if (job->stage == JobStage::kWaiting) TryPlan(*job);
    // What it waits for may have been reported by an agent that registered again.
    if (job->stage == JobStage::kGathering) CheckGathered(*job);
  }
  for (JobRow* job : JobsByClaim()) {
    if (job->stage != JobStage::kRunning || Finishing(*job)) continue;
    ReconcileDrain(*job);
    if (job->stage == JobStage::kRunning) GiveBack(*job);
    if (job->stage == JobStage::kRunning) ReconcileWidth(*job);
    if (job->stage == JobStage::kRunning) ReconcileStandbys(*job);
  }
}

namespace {

struct StandbyCount {
  int32_t ready = 0;
  int32_t starting = 0;
};

}  // namespace

static StandbyCount CountStandbys(const std::vector<ProcessRow*>& processes,
                                  const std::function<bool(const ServerId&)>& usable) {
  StandbyCount count;
  for (const ProcessRow* process : processes) {
    if (process->member || process->exited || process->kill_sent || !usable(process->server)) continue;
    ++(process->joined ? count.ready : count.starting);
  }
  return count;
}

void ControllerCore::Impl::ReconcileStandbys(JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque || now_.instant < job.standby_at) return;
  int32_t leaving = 0;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->member && !process->exited && Draining(process->server)) ++leaving;
  }
  const int32_t missing = MissingRanks(job);
  // Ranks come before standbys: whoever runs at full width leaves free devices to a job that does not.
  if (missing == 0 && leaving == 0 && AnotherLacksRanks(job)) return;
  const int32_t growth = missing + leaving == 0 ? GrowthPossible(job) : 0;
  const int32_t wanted = entry.spec.standbys_wanted + missing + leaving + growth;
  const StandbyCount count = CountStandbys(ProcessesOf(job.uid), [this](const ServerId& id) {
    const ServerRow* server = FindServer(id);
    return server != nullptr && Usable(*server);
  });
  for (int32_t have = count.ready + count.starting; have < wanted; ++have) {
    if (SpawnStandby(job, true) != nullptr) continue;
    if (!job.avoided.empty() && count.ready + count.starting == 0) {
      // Better a server that failed before than none; standby_at paces the attempts.
      job.avoided.clear();
      if (SpawnStandby(job, true) != nullptr) continue;
    }
    if (missing > 0 && count.ready + count.starting == 0) TakeBackStandby(job);
    return;
  }
}

// Warm or starting ones on servers that could take a rank.
int32_t ControllerCore::Impl::StandbysOf(const JobRow& job) {
  const StandbyCount count = CountStandbys(ProcessesOf(job.uid), [this](const ServerId& id) {
    const ServerRow* server = FindServer(id);
    return server != nullptr && Usable(*server);
  });
  return count.ready + count.starting;
}

// What a job wants and has not got: ranks, and standbys once it runs.
int32_t ControllerCore::Impl::DevicesLacking(const JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.ended || Finishing(job)) return 0;
  if (job.stage == JobStage::kWaiting) return MissingRanks(job);
  if (job.stage != JobStage::kRunning) return 0;  // it is being placed
  if (entry.spec.opaque) return MissingRanks(job);
  return std::max(0, MissingRanks(job) + entry.spec.standbys_wanted - StandbysOf(job));
}

// Devices that a job could use and nobody sits on, or only somebody who is on its way out.
int32_t ControllerCore::Impl::DevicesFreeFor(const JobRow& job) {
  int32_t free = 0;
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    for (const Device& device : server.inventory.devices) {
      const ProcessRow* occupant = Occupant(id, device.index);
      if (occupant == nullptr || occupant->kill_sent) ++free;
    }
  }
  return free;
}

// Devices that all other jobs together lack, beyond those that are free.
int32_t ControllerCore::Impl::NeededByOthers(const JobRow& job, std::string* who) {
  int32_t lacking = 0, free = 0;
  for (JobRow* other : JobsByClaim()) {
    const int32_t lacks = other->uid == job.uid ? 0 : DevicesLacking(*other);
    if (lacks == 0) continue;
    if (lacking == 0) {
      free = DevicesFreeFor(*other);
      *who = Entry(*other).spec.name;
    }
    lacking += lacks;
  }
  return std::max(0, lacking - free);
}

// Ranks by which a job may grow beyond what it wants: only with devices that are left when every job, itself included,
// has what it wants and its standbys, and none of the reserved ones.
int32_t ControllerCore::Impl::GrowthPossible(const JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque || !entry.assignment || job.stage != JobStage::kRunning) return 0;
  const auto world = static_cast<int32_t>(entry.assignment->ranks.size());
  if (world < WorldWanted(entry) || world >= WorldMax(entry)) return 0;
  int32_t reserved = 0;
  for (auto& [uid, other] : jobs_) {
    if (other.stage == JobStage::kEnded) continue;
    reserved += Entry(other).spec.spares_reserved;
    if (uid == job.uid) continue;
    if (other.stage != JobStage::kRunning || DevicesLacking(other) > 0) return 0;
  }
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->member && (process->exited || Draining(process->server))) return 0;
  }
  int32_t left = StandbysOf(job) - entry.spec.standbys_wanted - reserved;
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    for (const Device& device : server.inventory.devices) left += Occupant(id, device.index) == nullptr ? 1 : 0;
  }
  const int32_t stages = entry.spec.pipeline_stages;
  return std::clamp(left, 0, WorldMax(entry) - world) / stages * stages;
}

// Another job lacks what this one has beyond its wish: surplus standbys go at once, extra ranks at a step boundary.
void ControllerCore::Impl::GiveBack(JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque || !entry.assignment) return;
  const auto world = static_cast<int32_t>(entry.assignment->ranks.size());
  const int32_t extra = world - WorldWanted(entry);
  int32_t surplus = StandbysOf(job) - entry.spec.standbys_wanted - MissingRanks(job);
  if (extra <= 0 && surplus <= 0) return;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->member && !process->exited && Draining(process->server)) --surplus;  // one moves there
  }
  std::string who;
  int32_t needed = NeededByOthers(job, &who);
  const std::vector<ProcessRow*> processes = ProcessesOf(job.uid);
  for (auto it = processes.rbegin(); it != processes.rend() && needed > 0 && surplus > 0; ++it) {
    ProcessRow& process = **it;
    if (process.member || process.exited || process.kill_sent || process.planned) continue;
    Kill(process, Duration(0));
    --surplus;
    --needed;
  }
  if (extra <= 0 || needed <= 0) return;
  const int32_t stages = entry.spec.pipeline_stages;
  const int32_t target = std::max(WorldWanted(entry), (world - needed) / stages * stages);
  job.world_target = target;
  StartRecovery(job, Reason::kJobShrunk, fmt::format("job {} lacks {} devices; {} of {} ranks are beyond the wanted {}", who,
                                                     needed, extra, world, WorldWanted(entry)), Duration(0), true);
}

bool ControllerCore::Impl::AnotherLacksRanks(const JobRow& job) const {
  return std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& other) {
    const JobRow& o = other.second;
    return o.uid != job.uid && o.stage == JobStage::kRunning && !Entry(o).spec.opaque && !Finishing(o) &&
           MissingRanks(o) > 0;
  });
}

// A spare that idles as the standby of a job at full width is taken back for one that lacks ranks.
void ControllerCore::Impl::TakeBackStandby(const JobRow& job) {
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    for (const Device& device : server.inventory.devices) {
      ProcessRow* occupant = Occupant(id, device.index);
      if (occupant == nullptr || occupant->job == job.uid || occupant->member || occupant->planned) continue;
      const JobRow* owner = FindJob(occupant->job);
      if (occupant->kill_sent) return;  // one is on its way out already
      if (owner == nullptr || owner->stage != JobStage::kRunning || MissingRanks(*owner) > 0) continue;
      // One that waits to take over from a draining server is no idle one, unless this job's claim is higher.
      const std::vector<ProcessRow*> others = ProcessesOf(owner->uid);
      const bool leaves = std::any_of(others.begin(), others.end(), [this](const ProcessRow* p) {
        return p->member && !p->exited && Draining(p->server);
      });
      if (leaves && HigherClaim(*owner, job)) continue;
      Kill(*occupant, Duration(0));
      return;
    }
  }
}

bool ControllerCore::Impl::Avoids(const JobRow& job, const ServerId& server) const {
  return job.banned.contains(server) || job.avoided.contains(server);
}

// A standby that never reaches Join would count as coming for ever: drains and growth would wait for it.
void ControllerCore::Impl::CheckStandbys(JobRow& job) {
  job.standby_check = kNever;
  if (job.stage == JobStage::kEnded) return;
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->exited || process->joined || process->kill_sent || process->member || process->planned) continue;
    if (now_.instant < process->join_deadline) {
      job.standby_check = std::min(job.standby_check, process->join_deadline);
      continue;
    }
    Note(NoticeLevel::kError, Reason::kPhaseDeadline, "Standby did not reach Join", process->server, &job);
    Kill(*process, Duration(0));
    job.avoided.insert(process->server);
    ++job.standby_failures;
    job.standby_at = now_.instant + Milliseconds(250) * (1 << std::min(job.standby_failures, 6));
    dirty_ = true;
  }
}

// On a free device of a usable server, best one that has no rank of this job, so that one loss takes only one of them.
ProcessRow* ControllerCore::Impl::SpawnStandby(JobRow& job, bool avoid_members) {
  const ServerRow* best = nullptr;
  DeviceIndex best_device;
  bool best_shares = false;
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    bool shares = false;
    for (ProcessId pid : server_processes_[id]) {
      const ProcessRow& process = processes_.at(pid);
      shares |= process.job == job.uid && process.member && !process.exited;
    }
    if (best != nullptr && !(avoid_members && best_shares && !shares)) continue;
    for (const Device& device : server.inventory.devices) {
      if (Occupant(id, device.index) != nullptr) continue;
      best = &server;
      best_device = device.index;
      best_shares = shares;
      break;
    }
  }
  if (best == nullptr) return nullptr;
  ProcessRow& process = NewProcess(job.uid, best->inventory.server, best_device);
  SpawnPlanned(job, process);
  return &process;
}

// Grows a job that runs below its wanted width, or below its greatest one while nobody else wants the devices, once
// warm processes wait for the whole growth.
void ControllerCore::Impl::ReconcileWidth(JobRow& job) {
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque || !entry.assignment) return;
  const auto world = static_cast<int32_t>(entry.assignment->ranks.size());
  const int32_t wanted = WorldWanted(entry);
  const int32_t growth = world >= wanted ? GrowthPossible(job) : 0;
  if (world >= wanted && growth == 0) {
    job.regrow_at = kNever;
    return;
  }
  const int32_t goal = world < wanted ? wanted : world + growth;
  const int32_t kept = world < wanted ? 0 : entry.spec.standbys_wanted;  // beyond the wish, standbys are not used up
  if (job.regrow_at == kNever) job.regrow_at = now_.instant + policy_.regrow_delay;
  if (now_.instant < job.regrow_at) return;
  const StandbyCount count = CountStandbys(ProcessesOf(job.uid), [this](const ServerId& id) {
    const ServerRow* server = FindServer(id);
    return server != nullptr && Usable(*server);
  });
  const int32_t stages = entry.spec.pipeline_stages;
  const int32_t target = std::min(goal, world + std::max(0, count.ready - kept)) / stages * stages;
  if (target > world && (target == goal || count.starting == 0)) {
    if (target > wanted) job.world_target = target;
    StartRecovery(job, Reason::kJobRegrown, fmt::format("{} warm processes wait; grow from {} to {} ranks", count.ready,
                                                        world, target), Duration(0), true);
    return;
  }
  job.regrow_at = kNever;
  if (count.ready + count.starting > 0) job.regrow_at = now_.instant + policy_.regrow_delay;
}

// Moves ranks off draining servers, at a step boundary, when there is a place for them.
void ControllerCore::Impl::ReconcileDrain(JobRow& job) {
  const JobEntry& entry = Entry(job);
  int32_t leaving = 0;
  for (ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->exited || !Draining(process->server)) continue;
    if (process->member) {
      ++leaving;
    } else if (!process->kill_sent) {
      Kill(*process, entry.spec.termination_grace);
    }
  }
  if (leaving == 0) {
    job.drain_noted = false;
    job.drain_at = kNever;
    return;
  }
  if (job.drain_at != kNever) return;
  bool free_device = false;
  for (auto& [id, server] : servers_) {
    if (!Usable(server) || Avoids(job, id)) continue;
    for (const Device& device : server.inventory.devices) free_device |= Occupant(id, device.index) == nullptr;
  }
  const StandbyCount count = CountStandbys(ProcessesOf(job.uid), [this](const ServerId& id) {
    const ServerRow* server = FindServer(id);
    return server != nullptr && Usable(*server);
  });
  const std::string evidence = fmt::format("{} ranks leave draining servers", leaving);
  if (entry.spec.opaque) {
    if (free_device) StartRecovery(job, Reason::kServerDrained, evidence, Duration(0), true);
    return;
  }
  if (count.ready >= leaving) {
    StartRecovery(job, Reason::kServerDrained, evidence, Duration(0), true);
    return;
  }
  if (free_device || count.starting > 0) return;  // ReconcileStandbys starts or has started what is missing
  const auto world = static_cast<int32_t>(entry.assignment ? entry.assignment->ranks.size() : 0);
  const int32_t stages = entry.spec.pipeline_stages;
  const int32_t rest = (world - leaving + count.ready) / stages * stages;
  if (rest >= WorldMin(entry)) {
    StartRecovery(job, Reason::kServerDrained, evidence + "; no spare is left, so the job shrinks", Duration(0), true);
    return;
  }
  if (!job.drain_noted) {
    job.drain_noted = true;
    Note(NoticeLevel::kError, Reason::kNoCapacity, "Drain waits for a spare", {}, &job,
         {{"leaving", std::to_string(leaving)}});
  }
}

}  // namespace everstep
