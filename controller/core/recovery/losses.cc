// A process is gone: what that means for its job. Evidence becomes a recovery, an amended plan, a finished job or an
// end with a reason.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"

namespace everstep {

namespace {
constexpr int32_t kUserExitLast = 63;
}  // namespace

// How far a dead member came, read from its page after its death, proves votes (docs/protocol.md section 1).
void ControllerCore::Impl::RememberProof(JobRow& job, const ProcessRow& process) {
  if (Mutated(Mutation::kIgnoreProofOfDead)) return;
  const Progress& page = process.progress;
  auto add = [&](StateId id) { AddProof(job.proofs, id, Entry(job).lineage); };
  if (page.memory_valid || page.phase == RankPhase::kApplying) add(page.applied);
  if (page.phase == RankPhase::kApplying) add({page.applied.step.Next(), page.generation});
  if (page.vote_passed.value > 0) add({page.vote_passed, page.generation});
}

void ControllerCore::Impl::RememberLost(JobRow& job, const ProcessRow& process) {
  LostRank lost{process.rank, process.server, process.device, "", ""};
  if (const ServerRow* server = FindServer(process.server)) {
    lost.failure_domain = server->inventory.failure_domain;
    for (const Device& device : server->inventory.devices) {
      if (device.index == process.device) lost.device_model = device.model;
    }
  }
  std::erase_if(job.lost, [&](const LostRank& other) { return other.rank == lost.rank; });
  job.lost.push_back(std::move(lost));
}

// Counts a failure of the program itself; true when it ended the job. The same failure twice at one step, or too many
// failures, is not failed over.
bool ControllerCore::Impl::CountFailure(JobRow& job, const ProcessRow& process, const ProcessExited& fact) {
  if (job.failure_counted) return false;  // one failure per generation: the others are its cascade
  const JobEntry& entry = Entry(job);
  // A program that never came to Join fails at the step it would have started from.
  const everstep::Step step = process.member && !entry.spec.opaque ? fact.progress.applied.step : entry.recovery_point.step;
  const bool crashed = fact.signal == 0 || fact.signal == 6 || fact.signal == 11 || fact.signal == 8 ||
                       fact.signal == 4 || fact.signal == 7;
  if (!crashed) return false;  // killed from outside: the platform's doing
  job.failure_counted = true;
  bool again = false, elsewhere = false;
  for (const FailureEntry& old : entry.recent_failures) {
    if (old.step == step && old.exit_code == fact.exit_code && old.signal == fact.signal) {
      again = true;
      elsewhere |= old.server != process.server || old.rank != process.rank;
    }
  }
  Append(FailureCounted{job.uid, step, process.rank, process.server, fact.exit_code, fact.signal});
  const int32_t code = fact.signal == 0 && fact.exit_code > 0 && fact.exit_code <= kUserExitLast
                           ? fact.exit_code
                           : static_cast<int32_t>(JobExit::kUserSignal);
  const std::string how = fact.signal != 0 ? fmt::format("signal {}", fact.signal)
                                           : fmt::format("exit code {}", fact.exit_code);
  const std::string who = process.rank.value >= 0 ? fmt::format("rank {}", process.rank.value) : "a process";
  if (again && (fact.signal == 0 || elsewhere)) {
    EndJob(job, JobState::kFailed, fact.signal == 0 ? Reason::kUserError : Reason::kSameFailureTwice, code,
           fmt::format("{} on {} ended with {} at step {}, as before at the same step", who, process.server.value, how,
                       step.value));
    return true;
  }
  if (Entry(job).failures > entry.spec.restarts_max) {
    EndJob(job, JobState::kFailed, Reason::kRestartsExhausted, code,
           fmt::format("{} failures are more than restarts_max: {}; the newest: {} on {} ended with {}",
                       Entry(job).failures, entry.spec.restarts_max, who, process.server.value, how));
    return true;
  }
  return false;
}

bool ControllerCore::Impl::Finishing(const JobRow& job) const {
  const JobEntry& entry = Entry(job);
  return job.stage == JobStage::kRunning && entry.finish_reached.value != 0 && entry.finish_reached == entry.fenced;
}

// Ranks come to their end together (Finish has a barrier): once one is through, every step is done, and whoever is lost
// from then on takes nothing with it. True when that ended the job.
bool ControllerCore::Impl::FinishIfAllFinished(JobRow& job) {
  const JobEntry& entry = Entry(job);
  // The newest generation that stepped or was about to: a fence that rose since changes nothing for a program that is done.
  const Generation newest = !entry.spec.opaque && entry.assignment ? entry.assignment->generation : entry.resumed;
  size_t members = 0, finished = 0, gone = 0;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (!process->member || process->assigned != newest) continue;
    ++members;
    finished += process->finished ? 1 : 0;
    gone += process->exited ? 1 : 0;
  }
  if (finished > 0 && !Finishing(job) && !entry.spec.opaque && newest == entry.fenced) {
    Append(FinishReached{job.uid, entry.fenced});
  }
  if (finished == 0 && !Finishing(job)) return false;
  if (gone < members || (entry.spec.opaque && finished < members)) return false;
  // What the leader printed last is the job's result to whoever lost the stream meanwhile.
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (process->member && process->rank == Rank(0) && process->assigned == Entry(job).fenced) {
      job.last_lines.assign(process->lines.begin(), process->lines.end());
    }
  }
  EndJob(job, JobState::kSucceeded, Reason::kJobFinished, 0,
         finished == members ? fmt::format("All {} ranks finished", members)
                             : fmt::format("{} of {} ranks ended by themselves, the others after the last step", finished,
                                           members));
  return true;
}

void ControllerCore::Impl::LoseTogether(std::map<JobUid, std::vector<Loss>> losses) {
  for (auto& [uid, list] : losses) {
    if (hold_losses_) {
      std::vector<Loss>& held = losses_held_[uid];
      held.insert(held.end(), std::make_move_iterator(list.begin()), std::make_move_iterator(list.end()));
    } else if (JobRow* job = FindJob(uid)) {
      LoseProcesses(*job, std::move(list));
    }
  }
}

// Processes of one job that are gone, found out together (one server's, or one exit). Their rows say exited already.
void ControllerCore::Impl::LoseProcesses(JobRow& job, std::vector<Loss> losses) {
  if (job.stage == JobStage::kEnded) return;
  dirty_ = true;
  if (FinishIfAllFinished(job) || Finishing(job)) return;
  bool member_lost = false, incumbent_lost = false, planned_lost = false;
  const Loss* first = nullptr;
  const JobEntry& entry = Entry(job);
  for (const Loss& loss : losses) {
    ProcessRow& process = *loss.process;
    if (process.finished && process.member) continue;
    if (process.member && !process.excluded) {
      RememberProof(job, process);
      if (process.assigned.value != 0 && process.rank.value >= 0) RememberLost(job, process);
    }
    const bool role = process.member && process.assigned == entry.fenced && !process.excluded;
    // Before Assign of the fenced generation, its members are those that Collect waits for or counted in.
    const bool expected = job.expected.contains(process.id) && !process.excluded;
    member_lost |= role;
    incumbent_lost |= expected;
    planned_lost |= process.planned;
    if (first == nullptr && (role || expected || process.planned)) first = &loss;
    if (!process.member && !process.kill_sent) {
      ++job.standby_failures;
      job.standby_after.reset();
      const int shift = std::min(job.standby_failures, 6);
      job.standby_at = now_.instant + (job.standby_failures > 1 ? Milliseconds(250) * (1 << shift) : Duration(0));
    }
  }
  if (first == nullptr) return;
  switch (job.stage) {
    case JobStage::kRunning:
      if (member_lost) StartRecovery(job, first->reason, first->evidence, first->noticed_ago, false);
      return;
    case JobStage::kAssigned:
      // After Assign is durable every loss starts a higher generation (docs/protocol.md section 6).
      if (member_lost && Mutated(Mutation::kAmendAfterAssign)) return Amend(job, first->evidence);
      if (member_lost) StartRecovery(job, first->reason, first->evidence, first->noticed_ago, false);
      return;
    case JobStage::kPreparing:
      // A failure cancels a switch that has not happened.
      if (incumbent_lost || member_lost) StartRecovery(job, first->reason, first->evidence, first->noticed_ago, false);
      return;
    case JobStage::kCollecting:
      if (job.open && incumbent_lost) job.open->evidence += "; " + first->evidence;
      CheckCollected(job);
      return;
    case JobStage::kWaiting:
    case JobStage::kGathering:
      if (entry.spec.opaque && planned_lost) {
        // What runs already was started for the old plan: its place in the world is in its environment.
        StartRecovery(job, first->reason, first->evidence, first->noticed_ago, false);
      } else if (incumbent_lost || planned_lost) {
        Amend(job, first->evidence);
      }
      return;
    case JobStage::kAdopting:
      CheckAdoption(job, false);
      return;
    case JobStage::kEnded:
      return;
  }
}

}  // namespace everstep
