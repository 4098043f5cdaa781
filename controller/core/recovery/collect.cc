// Collect and its end: who answered, what they hold, and the recovery point that follows (docs/recovery.md).
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"

namespace everstep {

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
  if (job.phase == RecoveryPhase::kDecide) EnterPhase(job, RecoveryPhase::kFence);  // nobody had to be asked
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
  for (ProcessRow* process : excluded) {
    if (!Mutated(Mutation::kKeepExcluded)) Kill(*process, Duration(0));
  }
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

}  // namespace everstep
