// A controller that starts over a ledger with running jobs: it waits for agents, and adopts a generation that all its
// members report, without touching it (docs/protocol.md section 7). Anything else gets a higher generation.
#include "controller/core/controller_impl.h"

#include "proto/base/mutation.h"

namespace everstep {

void ControllerCore::Impl::BeginAdoption(JobRow& job) {
  const JobEntry& entry = Entry(job);
  job.stage = JobStage::kAdopting;
  job.stage_since = now_.instant;
  job.reason = Reason::kTakeover;
  job.committed = entry.recovery_point.step;
  auto believe = [&](ProcessId id, const ServerId& server, DeviceIndex device) -> ProcessRow& {
    ProcessRow& process = processes_[id];
    process.id = id;
    process.job = job.uid;
    process.server = server;
    process.device = device;
    process.spawn_sent = process.started = true;
    auto known = ledger_.servers.find(server);
    if (known != ledger_.servers.end()) {
      process.incarnation = known->second.newest;
      process.exited = known->second.newest <= known->second.dead_upto;
    }
    job_processes_[job.uid].insert(id);
    server_processes_[server].insert(id);
    return process;
  };
  if (entry.spec.opaque) {
    if (entry.plan) {
      for (const PlannedSlot& slot : entry.plan->slots) {
        ProcessRow& process = believe(slot.process, slot.server, slot.device);
        process.member = entry.resumed == entry.fenced;
        process.rank = slot.rank;
        process.shard = ShardIndex(0);
        process.assigned = entry.resumed;
      }
    }
    return;
  }
  if (entry.assignment) {
    for (const RankAssignment& r : entry.assignment->ranks) {
      ProcessRow& process = believe(r.process, r.server, r.device);
      process.member = process.joined = true;
      process.rank = r.rank;
      process.shard = r.shard();
      process.assigned = entry.assignment->generation;
      process.mesh_address = r.mesh_address;
      if (process.exited) RememberLost(job, process);
    }
  }
}

void ControllerCore::Impl::CheckAdoption(JobRow& job, bool final) {
  if (job.stage != JobStage::kAdopting) return;
  const JobEntry& entry = Entry(job);
  if (entry.finish_reached.value != 0 && entry.finish_reached == entry.fenced) {
    // Every step is done. Members that are gone are finished; whoever missed the end of the last barrier may go.
    SetStage(job, JobStage::kRunning, kNever);
    for (ProcessRow* process : ProcessesOf(job.uid)) {
      if (process->reported && process->progress.phase == RankPhase::kJoining) Kill(*process, entry.spec.termination_grace);
    }
    FinishIfAllFinished(job);
    return;
  }
  size_t members = 0;
  bool all = true, waiting = false;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (!process->member || process->finished) continue;
    ++members;
    if (process->reported && !process->exited) {
      all &= process->assigned == entry.fenced;
      continue;
    }
    all = false;
    const ServerRow* server = FindServer(process->server);
    if (!process->exited && server != nullptr && !server->dead && (!server->session || process->missing_deadline != kNever)) {
      waiting = true;
    }
  }
  const bool whole = (entry.resumed == entry.fenced || Mutated(Mutation::kAdoptUnfinished)) && entry.resumed.value != 0 && members > 0;
  if (whole && all && job.generation_floor <= entry.fenced) {
    SetStage(job, JobStage::kRunning, kNever);
    job.vote_at = now_.instant;
    job.reason = Reason::kAdopted;
    job.message = "Every member reported the generation of the ledger";
    if (!entry.spec.opaque) {
      std::set<ServerId> servers;
      for (const RankAssignment& r : entry.assignment->ranks) servers.insert(r.server);
      for (const ServerId& server : servers) SendTo(server, ResumeProcesses{job.uid, entry.resumed, job.protected_step});
      if (static_cast<int32_t>(entry.assignment->ranks.size()) < WorldWanted(entry)) {
        job.regrow_at = now_.instant + policy_.regrow_delay;
      }
    }
    Note(NoticeLevel::kInfo, Reason::kAdopted, "Generation adopted", {}, &job,
         {{"generation", std::to_string(entry.resumed.value)}, {"members", std::to_string(members)}});
    return;
  }
  if (waiting && !final) return;
  StartRecovery(job, Reason::kTakeover,
                entry.resumed == entry.fenced ? "a restarted controller did not find every member"
                                              : "a restarted controller found an unfinished recovery",
                now_.instant - job.stage_since, false);
}

}  // namespace everstep
