#include "controller/sim/world.h"

#include <algorithm>

#include <fmt/format.h>

#include "proto/base/check.h"

namespace everstep::sim {

void Checker::Violate(const std::string& what) const { world_.Violate(name_, what); }

World::World(WorldOptions options)
    : options_(std::move(options)), prng_(options_.seed), fault_prng_(prng_.Fork()), network_(options_, prng_) {
  if (options_.drift_ppm_max > 0) controller_clock_.drift_ppm = prng_.Between(-options_.drift_ppm_max, options_.drift_ppm_max);
  checkers_ = MakeCheckers(*this);
  StartController();
}
World::~World() = default;

void World::Trace(const std::string& line) {
  // The time goes into the hash as a number: formatting it for each line costs more than all checkers together.
  uint64_t word = static_cast<uint64_t>(now_.time_since_epoch().count());
  for (int i = 0; i < 8; ++i, word >>= 8) hash_ = (hash_ ^ (word & 0xff)) * 1099511628211u;
  for (char c : line) hash_ = (hash_ ^ static_cast<uint8_t>(c)) * 1099511628211u;
  if (keep_trace_) trace_.push_back(fmt::format("{:10.3f} {}", ToMilliseconds(now_ - kWorldStart), line));
}

void World::Fault(const std::string& kind, const std::string& line) {
  ++faults_;
  ++fault_counts_[kind];
  last_fault_ = now_;
  Trace("** " + line);
  Tell([&](Checker& c) { c.OnFault(line); });
}

void World::Violate(const std::string& checker, const std::string& what) {
  Trace("VIOLATION " + checker + ": " + what);
  if (violations_.size() < 20) {
    violations_.push_back({checker, fmt::format("{:.3f} ms {}", ToMilliseconds(now_ - kWorldStart), what)});
  }
}

bool World::RunUntil(const std::function<bool()>& done, Duration limit) {
  const Instant end = now_ + limit;
  while (!done()) {
    if (heap_.next() > end) {
      now_ = end;
      return done();
    }
    auto [at, run] = heap_.Pop();
    now_ = at;
    ++events_run_;
    run();
  }
  return true;
}

void World::RunFor(Duration duration) {
  RunUntil([] { return false; }, duration);
}

void World::CheckEnd() {
  Tell([](Checker& c) { c.OnReplayed(); });
  Tell([](Checker& c) { c.OnEnd(); });
}

std::optional<JobUid> World::TrySubmit(JobSpec spec, int64_t steps) {
  const uint64_t call = next_call_++;
  FeedController(OperatorCalled{CallId(call), RequestId(fmt::format("r{}", call)), "sim", false, SubmitJob{std::move(spec)}});
  RunUntil([&] { return replies_.contains(call) || !core_; }, Seconds(10));
  if (!replies_.contains(call)) return std::nullopt;
  if (!replies_[call].first.ok()) {
    Trace("submit refused: " + replies_[call].first.message());
    return std::nullopt;
  }
  const JobUid uid = replies_[call].second;
  steps_wanted_[uid] = steps;
  return uid;
}

JobUid World::Submit(JobSpec spec, int64_t steps) {
  const std::optional<JobUid> uid = TrySubmit(std::move(spec), steps);
  EVERSTEP_CHECK(uid.has_value());
  return *uid;
}

void World::Cancel(const JobUid& job) {
  FeedController(OperatorCalled{CallId(next_call_++), RequestId(), "sim", false, CancelJob{job.value}});
}

// ---- looking

std::optional<JobView> World::ViewOf(const JobUid& job) const {
  if (!core_) return std::nullopt;
  for (JobView& view : View().jobs) {
    if (view.entry.uid == job) return view;
  }
  return std::nullopt;
}

std::optional<JobEnded> World::EndOf(const JobUid& job) const {
  auto it = durable_.jobs.find(job);
  if (it == durable_.jobs.end()) return std::nullopt;
  return it->second.ended;
}

bool World::Succeeded(const JobUid& job) const {
  const std::optional<JobEnded> end = EndOf(job);
  return end && end->outcome == JobState::kSucceeded;
}

AgentNode& World::Agent(const std::string& name) {
  auto it = agents_.find(ServerId(name));
  EVERSTEP_CHECK(it != agents_.end());
  return it->second;
}

RankNode* World::Find(ProcessId id) {
  auto it = ranks_.find(id);
  return it == ranks_.end() ? nullptr : &it->second;
}

std::vector<RankNode*> World::Ranks(const JobUid& job) {
  std::vector<RankNode*> ranks;
  for (auto& [id, agent] : agents_) {
    for (ProcessId process : agent.processes) {
      RankNode& rank = ranks_.at(process);
      if (rank.job == job) ranks.push_back(&rank);
    }
  }
  return ranks;
}

RankNode* World::Member(const JobUid& job, int32_t number) {
  RankNode* found = nullptr;
  for (RankNode* rank : Ranks(job)) {
    if (rank->alive && rank->rank == number && (!found || found->mesh_generation < rank->mesh_generation)) found = rank;
  }
  return found;
}

Content World::ChainContent(const JobUid& job, int64_t step) const {
  Content content;
  auto it = durable_.jobs.find(job);
  if (it == durable_.jobs.end() || it->second.lineage.links().empty()) return Content(static_cast<size_t>(step), 0);
  const std::vector<ChainLink>& links = it->second.lineage.links();
  size_t link = 0;
  for (int64_t s = 1; s <= step; ++s) {
    while (link + 1 < links.size() && links[link + 1].start.value < s) ++link;
    content.push_back(links[link].start.value < s ? links[link].generation.value : 0);
  }
  return content;
}

int64_t World::steps_passed(const JobUid& job) const {
  auto it = steps_passed_.find(job);
  return it == steps_passed_.end() ? 0 : it->second;
}

}  // namespace everstep::sim
