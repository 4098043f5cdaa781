#include <algorithm>

#include "controller/core/ledger/record.h"
#include "proto/base/check.h"

namespace everstep {
namespace {

constexpr size_t kRecoveriesKept = 200;
constexpr size_t kFailuresKept = 16;
constexpr size_t kDrainRequestsKept = 16;

class Applier {
 public:
  explicit Applier(LedgerState& state) : state_(state) {}

  void operator()(const TermStarted& r) { state_.term = std::max(state_.term, r.term); }

  void operator()(const ServerRegistered& r) {
    ServerEntry& entry = state_.servers[r.server];
    if (r.incarnation <= entry.newest) return;
    // A new incarnation is the death of all older ones.
    entry.dead_upto = entry.newest;
    entry.newest = r.incarnation;
    entry.start_nonce = r.start_nonce;
    entry.failure_domain = r.failure_domain;
  }

  void operator()(const ServerDied& r) {
    auto it = state_.servers.find(r.server);
    if (it == state_.servers.end()) return;
    it->second.dead_upto = std::max(it->second.dead_upto, r.incarnation);
  }

  void operator()(const ServerDrainSet& r) {
    ServerEntry& entry = state_.servers[r.server];
    entry.draining = r.draining;
    if (r.request.empty()) return;
    entry.drain_requests.push_back(r.request);
    if (entry.drain_requests.size() > kDrainRequestsKept) entry.drain_requests.pop_front();
  }

  void operator()(const JobSubmitted& r) {
    JobEntry& job = state_.jobs[r.job];
    job.uid = r.job;
    job.spec = r.spec;
    job.submitted = r.submitted;
    job.order = state_.next_job_order++;
    if (!r.request.empty()) state_.requests[r.request] = r.job;
  }

  void operator()(const GenerationFenced& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || r.generation <= job->fenced) return;
    job->fenced = r.generation;
    job->recovery = r.recovery;
    job->fence_reason = r.reason;
    job->fence_planned = r.planned;
    job->plan.reset();  // what it reserved is free again
    state_.next_recovery = std::max(state_.next_recovery, r.recovery.value + 1);
  }

  void operator()(const RecoveryPointDecided& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || r.generation != job->fenced || r.generation <= job->lineage.newest()) return;
    job->lineage.Append({r.generation, r.point.step});
    job->recovery_point = r.point;
  }

  void operator()(const PlanMade& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || r.generation != job->fenced) return;
    job->plan = r;
  }

  void operator()(const AssignmentMade& r) {
    JobEntry* job = Find(r.assignment.job);
    if (job == nullptr || r.assignment.generation != job->fenced) return;
    job->assignment = r.assignment;
  }

  void operator()(const GenerationResumed& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || r.generation != job->fenced) return;
    job->resumed = r.generation;
  }

  void operator()(const FinishReached& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || r.generation != job->resumed) return;
    job->finish_reached = r.generation;
  }

  void operator()(const FailureCounted& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr) return;
    ++job->failures;
    job->recent_failures.push_back({r.step, r.rank, r.server, r.exit_code, r.signal});
    if (job->recent_failures.size() > kFailuresKept) {
      job->recent_failures.erase(job->recent_failures.begin());
    }
  }

  void operator()(const RecoveryEnded& r) {
    state_.recoveries.push_back(r.recovery);
    if (state_.recoveries.size() > kRecoveriesKept) state_.recoveries.pop_front();
  }

  void operator()(const ManifestCommitted& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr) return;
    job->manifests.push_back(r.manifest);
  }

  void operator()(const ManifestDropped& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr) return;
    std::erase_if(job->manifests, [&](const Manifest& m) { return m.state == r.state; });
  }

  void operator()(const JobEnded& r) {
    JobEntry* job = Find(r.job);
    if (job == nullptr || job->ended) return;  // terminal states are durable
    job->ended = r;
    job->plan.reset();
  }

  void operator()(const JobForgotten& r) {
    state_.jobs.erase(r.job);
    std::erase_if(state_.requests, [&](const auto& entry) { return entry.second == r.job; });
  }

 private:
  JobEntry* Find(const JobUid& uid) {
    auto it = state_.jobs.find(uid);
    return it == state_.jobs.end() ? nullptr : &it->second;
  }

  LedgerState& state_;
};

}  // namespace

void Apply(LedgerState& state, LedgerSequence sequence, const Record& record) {
  EVERSTEP_CHECK(sequence.value == state.applied.value + 1);
  state.applied = sequence;
  std::visit(Applier(state), record);
}

namespace {
bool SameEnd(const std::optional<JobEnded>& a, const std::optional<JobEnded>& b) {
  if (a.has_value() != b.has_value()) return false;
  if (!a) return true;
  return a->job == b->job && a->outcome == b->outcome && a->reason == b->reason && a->exit_code == b->exit_code &&
         a->message == b->message && a->last_lines == b->last_lines && a->ended == b->ended;
}
bool SamePlan(const std::optional<PlanMade>& a, const std::optional<PlanMade>& b) {
  if (a.has_value() != b.has_value()) return false;
  if (!a) return true;
  return a->job == b->job && a->generation == b->generation && a->slots == b->slots && a->reason == b->reason &&
         a->message == b->message;
}
}  // namespace

bool JobEntry::operator==(const JobEntry& o) const {
  return uid == o.uid && spec == o.spec && order == o.order && submitted == o.submitted && fenced == o.fenced &&
         recovery == o.recovery && fence_reason == o.fence_reason && fence_planned == o.fence_planned &&
         resumed == o.resumed && finish_reached == o.finish_reached && lineage == o.lineage && recovery_point == o.recovery_point && SamePlan(plan, o.plan) &&
         assignment == o.assignment && manifests == o.manifests && failures == o.failures &&
         recent_failures == o.recent_failures && SameEnd(ended, o.ended);
}

}  // namespace everstep
