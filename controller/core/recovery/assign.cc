// Assign, connect, restore, resume: the second half of a recovery, once every process of the plan waits in Join
// (docs/recovery.md).
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"

namespace everstep {

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
      if (Draining(process->server) || (process->excluded && !Mutated(Mutation::kKeepExcluded))) Kill(*process, entry.spec.termination_grace);
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
    if (process.ready != entry.fenced && Mutated(Mutation::kResumeEarly)) continue;
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

}  // namespace everstep
