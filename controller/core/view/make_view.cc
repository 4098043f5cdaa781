#include <algorithm>

#include "controller/core/controller_impl.h"

namespace everstep {

JobState ControllerCore::Impl::StateOf(const JobRow& job) const {
  const JobEntry& entry = Entry(job);
  if (entry.ended) return entry.ended->outcome;
  const bool never = entry.resumed.value == 0;
  switch (job.stage) {
    case JobStage::kAdopting:
    case JobStage::kRunning:
    case JobStage::kPreparing: return never ? JobState::kStarting : JobState::kRunning;
    case JobStage::kWaiting: return never ? JobState::kPending : JobState::kWaitingForCapacity;
    case JobStage::kCollecting:
    case JobStage::kGathering:
    case JobStage::kAssigned: return never ? JobState::kStarting : JobState::kRecovering;
    case JobStage::kEnded: break;
  }
  return JobState::kFailed;
}

ClusterView ControllerCore::Impl::MakeView(Now now) const {
  ClusterView view;
  view.term = ledger_.term;
  view.adopting = adoption_deadline_ != kNever;
  view.frozen = frozen_;
  auto place = [&](const ProcessRow& process) {
    RankPlace p;
    p.job = process.job;
    auto entry = ledger_.jobs.find(process.job);
    if (entry != ledger_.jobs.end()) p.job_name = entry->second.spec.name;
    p.rank = process.member ? process.rank : Rank(-1);
    p.server = process.server;
    p.device = process.device;
    p.process = process.id;
    p.pid = process.pid;
    p.ready_standby = !process.member && process.joined;
    p.phase = process.progress.phase;
    p.vote_passed = process.progress.vote_passed;
    p.restored_from = process.restored_from;
    return p;
  };
  for (const auto& [id, server] : servers_) {
    ServerView s;
    s.server = id;
    s.state = StateOf(server);
    s.reason = server.reason;
    s.draining = Draining(id);
    s.incarnation = server.incarnation;
    s.inventory = server.inventory;
    s.registered = server.registered;
    s.heartbeat_age = std::max(Duration(0), now.instant - server.liveness.heard());
    std::set<DeviceIndex> used;
    auto it = server_processes_.find(id);
    if (it != server_processes_.end()) {
      for (ProcessId pid : it->second) {
        const ProcessRow& process = processes_.at(pid);
        if (process.exited) continue;
        used.insert(process.device);
        s.ranks.push_back(place(process));
      }
    }
    s.devices_free = static_cast<int32_t>(server.inventory.devices.size()) - static_cast<int32_t>(used.size());
    view.servers.push_back(std::move(s));
  }
  view.recoveries = ledger_.recoveries;
  std::vector<const JobRow*> rows;
  for (const auto& [uid, job] : jobs_) rows.push_back(&job);
  std::sort(rows.begin(), rows.end(), [&](const JobRow* a, const JobRow* b) { return Entry(*a).order < Entry(*b).order; });
  for (const JobRow* job : rows) {
    JobView j;
    j.entry = Entry(*job);
    j.state = StateOf(*job);
    j.phase = job->phase;
    j.reason = job->stage == JobStage::kEnded && j.entry.ended ? j.entry.ended->reason : job->reason;
    j.message = job->stage == JobStage::kEnded && j.entry.ended ? j.entry.ended->message : job->message;
    j.step = job->committed;
    j.protected_step = job->protected_step;
    j.one_domain = job->one_domain;
    if (j.entry.assignment) j.world_size = static_cast<int32_t>(j.entry.assignment->ranks.size());
    if (j.entry.spec.opaque && j.entry.plan) j.world_size = static_cast<int32_t>(j.entry.plan->slots.size());
    for (const ProcessRow* process : ProcessesOf(job->uid)) {
      view.lines.push_back({process->job, process->rank, process->id, {process->lines.begin(), process->lines.end()}});
      if (!process->exited) j.ranks.push_back(place(*process));
    }
    std::sort(j.ranks.begin(), j.ranks.end(), [](const RankPlace& a, const RankPlace& b) {
      return std::make_pair(static_cast<uint32_t>(a.rank.value), a.process) <
             std::make_pair(static_cast<uint32_t>(b.rank.value), b.process);
    });
    j.metrics.assign(job->metrics.begin(), job->metrics.end());
    for (const auto& [key, holders] : job->snapshots) {
      j.snapshots.insert(j.snapshots.end(), holders.begin(), holders.end());
    }
    if (job->open) {
      view.recoveries.push_back(*job->open);
      view.recoveries.back().phases.push_back({job->phase, job->phase_since - job->evidence_at,
                                               now.instant - job->phase_since, Duration(0)});
    }
    view.jobs.push_back(std::move(j));
  }
  view.events = events_;
  return view;
}

}  // namespace everstep
