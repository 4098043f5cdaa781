// Random conversations: agents fail, return and contradict themselves in any order; the harness checks its invariants
// after every step, and once everybody behaves again every job must run (or have ended with a reason). To replay one
// seed: EVERSTEP_SEED=7 controller_conversations_test --gtest_filter='RandomConversations*'.
#include <cstdlib>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "proto/base/prng.h"
#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

class Chaos {
 public:
  explicit Chaos(uint64_t seed) : prng_(seed), c_(ShortPolicy(), seed) {
    servers_ = static_cast<int>(prng_.Between(3, 7));
    int devices = static_cast<int>(prng_.Between(1, 2));
    c_.AddServers(servers_, devices);
    devices *= servers_;
    const int count = static_cast<int>(prng_.Between(1, 2));
    for (int i = 0; i < count; ++i) {
      JobSpec spec = Spec(fmt::format("job{}", i), static_cast<int>(prng_.Between(1, 3)));
      spec.opaque = prng_.Chance(1, 5);
      if (!spec.opaque && prng_.Chance(1, 3)) {
        spec.pipeline_stages = 2;
        spec.servers_wanted = 2 * static_cast<int>(prng_.Between(1, 2));
      }
      spec.standbys_wanted = static_cast<int>(prng_.Between(0, 2));
      spec.persist_interval_steps = prng_.Chance(1, 2) ? 2 : 0;
      spec.priority = static_cast<int>(prng_.Between(0, 1));
      if (spec.servers_wanted > devices) continue;
      devices -= spec.servers_wanted;
      jobs_.push_back(c_.Run(spec));
    }
  }

  void Run(int actions) {
    for (int i = 0; i < actions && !::testing::Test::HasFailure(); ++i) Act();
    if (!::testing::Test::HasFailure()) Heal();
    if (::testing::Test::HasFailure()) {
      const auto& trace = c_.trace();
      for (size_t i = trace.size() > 80 ? trace.size() - 80 : 0; i < trace.size(); ++i) said_.push_back(trace[i]);
      for (const ServerView& server : c_.core().MakeView({c_.now(), {}}).servers) {
        std::string line = "at the end: " + server.server.value;
        for (const RankPlace& p : server.ranks) line += fmt::format(" [{} rank {}]", p.job_name, p.rank.value);
        said_.push_back(std::move(line));
      }
    }
  }

  const std::vector<std::string>& said() const { return said_; }

 private:
  static Policy ShortPolicy() {
    Policy policy;
    policy.process_start_timeout = Seconds(5);
    policy.recovery_budget = Seconds(8);
    return policy;
  }

  std::string AnyServer() { return fmt::format("s{}", prng_.Between(1, servers_)); }

  bool Stepping(const JobUid& job) {
    const JobEntry& entry = c_.Entry(job);
    if (entry.ended || entry.spec.opaque || !entry.assignment || entry.resumed != entry.assignment->generation) return false;
    const auto members = c_.Members(job);
    if (members.size() != entry.assignment->ranks.size()) return false;
    for (const auto& m : members) {
      // Whoever has answered a higher Collect contributes to no vote.
      if (m.process->resumed != entry.resumed || m.process->promised > entry.resumed || !c_.Agent(m.server).hears) return false;
    }
    return true;
  }

  void StepAll() {
    for (const JobUid& job : jobs_) {
      if (!Stepping(job)) continue;
      const auto members = c_.Members(job);
      const int64_t step = members[0].process->applied.step.value + 1;
      said_.push_back(fmt::format("step {} of {}", step, c_.Entry(job).spec.name));
      if (c_.Entry(job).fenced > c_.Entry(job).resumed && c_.Entry(job).fence_planned && prng_.Chance(1, 2)) {
        c_.LeaveAtBoundary(job, step);
        continue;
      }
      c_.StepTo(job, step);
      if (!prng_.Chance(1, 2)) continue;
      for (const auto& m : c_.Members(job)) {
        c_.Hold(m.server, job, m.process->applied, m.process->shard.value, SnapshotTier::kStaged);
      }
    }
  }

  // A rank dies at a chosen moment of its step.
  void KillSome() {
    if (jobs_.empty()) return;
    const JobUid& job = jobs_[prng_.UpTo(jobs_.size() - 1)];
    auto members = c_.Members(job);
    if (members.empty()) return;
    const auto& victim = members[prng_.UpTo(members.size() - 1)];
    if (!c_.Agent(victim.server).hears) return;
    if (Stepping(job)) {
      const bool complete = prng_.Chance(1, 2), passed = complete && prng_.Chance(1, 2);
      for (auto& m : members) {
        if (complete) m.process->gradients = m.process->resumed;
      }
      if (passed) {  // the vote passed, and the victim alone has seen it and applied
        victim.process->applied = {victim.process->applied.step.Next(), victim.process->resumed};
        victim.process->vote_passed = victim.process->applied.step;
        victim.process->gradients = Generation(0);
      }
    }
    said_.push_back(fmt::format("rank {} of {} dies", victim.process->rank.value, c_.Entry(job).spec.name));
    c_.Exit(victim.id, 0, 9);
  }

  void Act() {
    const std::string s = AnyServer();
    FakeAgent& agent = c_.Agent(s);
    switch (prng_.UpTo(15)) {
      case 0:
      case 1:
      case 2:
      case 3: StepAll(); break;
      case 4:
      case 5: KillSome(); break;
      case 6:
        said_.push_back(s + " stream");
        if (agent.session && agent.hears) c_.Disconnect(s);
        else if (!agent.session && agent.hears) Return(s);
        break;
      case 7:
        said_.push_back(s + " host refuses");
        agent.probe = ProbeOutcome::kRefused;
        agent.beats = false;
        if (agent.session) c_.Disconnect(s);
        break;
      case 8:
        said_.push_back(s + " agent restarts");
        if (agent.hears) c_.RestartAgent(s);
        agent.probe = ProbeOutcome::kConnected;
        agent.beats = true;
        break;
      case 9:
        said_.push_back(s + (agent.hears ? " stops" : " wakes"));
        if (agent.hears) c_.FreezeServer(s);
        else c_.Wake(s);
        break;
      case 10:
        said_.push_back("controller restarts");
        c_.RestartController();
        for (int i = 1; i <= servers_; ++i) {
          if (prng_.Chance(3, 4) && c_.Agent(fmt::format("s{}", i)).hears) Return(fmt::format("s{}", i));
        }
        break;
      case 11:
        said_.push_back("drain " + s);
        c_.Drain(s, prng_.Chance(1, 2));
        break;
      case 12:
        said_.push_back("switches of " + s);
        agent.collects = prng_.Chance(2, 3);
        agent.joins = prng_.Chance(2, 3);
        agent.connects = prng_.Chance(2, 3);
        agent.readies = prng_.Chance(2, 3);
        agent.reaps = prng_.Chance(2, 3);
        agent.copies = prng_.Chance(2, 3);
        break;
      default: {
        const Duration by = Milliseconds(prng_.Between(1, 2500));
        said_.push_back(fmt::format("{} ms pass", by.count() / 1000000));
        c_.Advance(by);
      }
    }
  }

  void Return(const std::string& s) {
    FakeAgent& agent = c_.Agent(s);
    agent.beats = true;
    agent.probe = ProbeOutcome::kConnected;
    if (agent.session) return;
    if (agent.refused) c_.RestartAgent(s);
    else c_.Connect(s);
    if (c_.Agent(s).refused) c_.RestartAgent(s);
  }

  void Heal() {
    said_.push_back("everybody behaves");
    for (int round = 0; round < 40 && !::testing::Test::HasFailure(); ++round) {
      for (int i = 1; i <= servers_; ++i) {
        const std::string s = fmt::format("s{}", i);
        FakeAgent& agent = c_.Agent(s);
        agent.collects = agent.joins = agent.connects = agent.readies = agent.reaps = agent.copies = true;
        if (!agent.hears) c_.Wake(s);
        Return(s);
        c_.Drain(s, false);
        for (const auto& [id, p] : std::map<ProcessId, FakeProcess>(agent.processes)) {
          if (p.kill_ordered && agent.processes.contains(id)) c_.Exit(id, 0, 9);
        }
      }
      c_.Advance(Seconds(3));
      StepAll();
    }
    for (const JobUid& job : jobs_) {
      const JobEntry& entry = c_.Entry(job);
      if (entry.ended) {
        EXPECT_NE(entry.ended->reason, Reason::kNone);
        continue;
      }
      EXPECT_EQ(c_.State(job), JobState::kRunning) << entry.spec.name << ": " << c_.View(job).message;
      if (entry.spec.opaque) continue;
      EXPECT_EQ(entry.resumed, entry.assignment->generation) << entry.spec.name;
      const auto members = c_.Members(job);
      EXPECT_EQ(members.size(), entry.assignment->ranks.size());
      // With several jobs the devices that are left may be kept warm for another one.
      if (jobs_.size() == 1) {
        EXPECT_EQ(static_cast<int32_t>(members.size()), entry.spec.servers_wanted) << "it grew back";
      }
      for (const auto& m : members) {
        EXPECT_TRUE(m.process->memory_valid);
        EXPECT_EQ(m.process->applied, members[0].process->applied);
        EXPECT_TRUE(entry.lineage.OnChain(m.process->applied));
      }
    }
  }

  Prng prng_;
  FakeCluster c_;
  int servers_ = 0;
  std::vector<JobUid> jobs_;
  std::vector<std::string> said_;
};

TEST(RandomConversations, HoldTheInvariantsAndEndWell) {
  uint64_t first = 1, last = 400;
  if (const char* seed = std::getenv("EVERSTEP_SEED")) first = last = std::strtoull(seed, nullptr, 10);
  for (uint64_t seed = first; seed <= last; ++seed) {
    Chaos chaos(seed);
    chaos.Run(60);
    if (!::testing::Test::HasFailure()) continue;
    std::string said;
    for (const std::string& line : chaos.said()) said += line + "\n";
    FAIL() << "EVERSTEP_SEED=" << seed << "\n" << said;
  }
}

}  // namespace
}  // namespace everstep::testing
