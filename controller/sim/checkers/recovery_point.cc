// 4. The recovery point equals that of an oracle that sees true memories and copies, of those that could be heard of in
// time: never past it, never needlessly before, never older than the newest checkpoint that can be restored.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class RecoveryPointOracle : public Checker {
 public:
  explicit RecoveryPointOracle(World& world) : Checker(world, "recovery_point") {}

  void OnControllerStarted() override {
    answers_.clear();
    copies_.clear();
    proofs_.clear();
    sessions_.clear();
    facts_seen_.clear();
    nonces_.clear();
    distrust_.clear();
  }

  void OnEvent(const Event& event) override {
    if (const auto* connected = std::get_if<AgentConnected>(&event)) Hear(*connected);
    if (const auto* fact = std::get_if<FactReceived>(&event)) Hear(*fact);
    if (const auto* gone = std::get_if<AgentDisconnected>(&event)) {
      std::erase_if(sessions_, [&](const auto& s) { return s.second == gone->session; });
    }
  }

  // Copies that the controller tells their holders to drop are no source any more.
  void OnControllerStepped(const Event&, const Effects& effects) override {
    for (const Effect& effect : effects) {
      const auto* send = std::get_if<SendCommand>(&effect.body);
      const auto* drop = send == nullptr ? nullptr : std::get_if<DropSnapshots>(&send->command);
      if (drop == nullptr) continue;
      for (const SnapshotInfo& s : drop->snapshots) copies_.erase({drop->job, s.state, s.shard, s.server, s.tier});
    }
  }

  void OnDecided(const Record& record, const LedgerState& before) override {
    if (const auto* died = std::get_if<ServerDied>(&record)) {
      ForgetServer(died->server, died->reason == Reason::kServerRestarted);
    } else if (const auto* fenced = std::get_if<GenerationFenced>(&record)) {
      distrust_[fenced->job] = fenced->reason == Reason::kDigestMismatch;
    } else if (const auto* resumed = std::get_if<GenerationResumed>(&record)) {
      proofs_.erase(resumed->job);
    } else if (const auto* ended = std::get_if<JobEnded>(&record)) {
      proofs_.erase(ended->job);
    } else if (const auto* decided = std::get_if<RecoveryPointDecided>(&record)) {
      Check(*decided, before.jobs.at(decided->job));
    }
  }

 private:
  using Copy = std::tuple<JobUid, StateId, ShardIndex, ServerId, SnapshotTier>;

  void Hear(const AgentConnected& connected) {
    const AgentHello& hello = connected.hello;
    const ServerId& id = hello.inventory.server;
    auto entry = world().decided().servers.find(id);
    if (entry != world().decided().servers.end() && hello.incarnation.value != 0 &&
        hello.incarnation <= entry->second.dead_upto) {
      return;  // refused
    }
    // A name that a connected agent has is refused to another, until its stream is known to be gone.
    const bool dead = entry != world().decided().servers.end() && entry->second.newest <= entry->second.dead_upto;
    if (!dead && sessions_.contains(id) && nonces_[id] != hello.start_nonce) return;
    if (nonces_[id] != hello.start_nonce) facts_seen_.erase(id);
    nonces_[id] = hello.start_nonce;
    sessions_[id] = connected.session;
    std::erase_if(copies_, [&](const Copy& c) { return std::get<3>(c) == id; });
    for (const auto& [job, snapshot] : hello.snapshots) Hold(id, job, snapshot);
    for (const ProcessStatus& status : hello.processes) {
      if (status.collected) Answer(status.process, status.promised);
    }
  }
  void Hear(const FactReceived& event) {
    const ServerId* server = nullptr;
    for (const auto& [id, s] : sessions_) {
      if (s == event.session) server = &id;
    }
    if (server == nullptr || event.sequence <= facts_seen_[*server]) return;
    const ServerId from = *server;
    facts_seen_[from] = event.sequence;
    const Fact& fact = event.fact;
    if (const auto* collected = std::get_if<ProcessCollected>(&fact)) {
      Answer(collected->process, collected->answer.generation);
    } else if (const auto* exited = std::get_if<ProcessExited>(&fact)) {
      Prove(exited->job, exited->progress);
      answers_.erase(exited->process);
    } else if (const auto* held = std::get_if<SnapshotHeld>(&fact)) {
      Hold(from, held->job, held->snapshot);
    } else if (const auto* lost = std::get_if<SnapshotLost>(&fact)) {
      copies_.erase({lost->job, lost->snapshot.state, lost->snapshot.shard, from, lost->snapshot.tier});
    }
  }
  void Answer(ProcessId process, Generation generation) {
    const RankNode* rank = const_cast<World&>(world()).Find(process);
    if (rank == nullptr || rank->answered.generation != generation) return;
    answers_[process] = rank->answered;
  }
  void Hold(const ServerId& server, const JobUid& job, const SnapshotInfo& snapshot) {
    auto entry = world().decided().jobs.find(job);
    if (entry == world().decided().jobs.end() || entry->second.ended) return;
    if (!entry->second.lineage.OnChain(snapshot.state)) return;
    copies_.insert({job, snapshot.state, snapshot.shard, server, snapshot.tier});
  }
  void Prove(const JobUid& job, const Progress& page) {
    if (page.memory_valid || page.phase == RankPhase::kApplying) proofs_[job].push_back(page.applied);
    if (page.phase == RankPhase::kApplying) proofs_[job].push_back({page.applied.step.Next(), page.generation});
    if (page.vote_passed.value > 0) proofs_[job].push_back({page.vote_passed, page.generation});
  }
  void ForgetServer(const ServerId& server, bool restarted) {
    if (!restarted) {  // else its hello was heard already, and says what the new incarnation holds
      sessions_.erase(server);
      std::erase_if(copies_, [&](const Copy& c) { return std::get<3>(c) == server; });
    }
    std::erase_if(answers_, [&](const auto& entry) {
      const RankNode* rank = const_cast<World&>(world()).Find(entry.first);
      return rank != nullptr && rank->server == server;
    });
  }

  void Check(const RecoveryPointDecided& decided, const JobEntry& job) {
    if (job.spec.opaque || distrust_[decided.job]) return;
    const Lineage& chain = job.lineage;
    auto content = [&](int64_t step) {
      Content c;
      for (int64_t s = 1; s <= step; ++s) c.push_back(chain.AtStep(Step(s)).generation.value);
      return c;
    };
    // The newest step that anything heard of proves.
    int64_t proved = chain.links().empty() ? 0 : chain.links().back().start.value;
    auto prove = [&](StateId id) {
      if (chain.OnChain(id)) proved = std::max(proved, id.step.value);
    };
    for (StateId id : proofs_[decided.job]) prove(id);
    for (const Manifest& manifest : job.manifests) prove(manifest.state);
    std::vector<std::pair<int32_t, const RankNode::Answer*>> survivors;
    for (const auto& [process, answer] : answers_) {
      const RankNode* rank = const_cast<World&>(world()).Find(process);
      if (rank == nullptr || rank->job != decided.job || answer.generation != decided.generation) continue;
      survivors.emplace_back(rank->shard, &answer);
      if (answer.valid && !answer.memory.empty()) {
        prove({Step(static_cast<int64_t>(answer.memory.size())), Generation(answer.memory.back())});
      }
    }
    for (const Copy& copy : copies_) {
      if (std::get<0>(copy) == decided.job) prove(std::get<1>(copy));
    }
    int64_t best = 0;
    for (int64_t t = 1; t <= proved; ++t) {
      const StateId state = chain.links().empty() ? StateId{} : chain.AtStep(Step(t));
      const Content want = content(t);
      bool all = true;
      for (int32_t shard = 0; shard < job.spec.pipeline_stages && all; ++shard) {
        bool source = std::any_of(copies_.begin(), copies_.end(), [&](const Copy& c) {
          return std::get<0>(c) == decided.job && std::get<1>(c) == state && std::get<2>(c).value == shard;
        });
        for (const auto& [held, answer] : survivors) {
          if (held != shard || !answer->valid || source) continue;
          source = answer->memory == want;
          if (!source && answer->gradients == state.generation.value && answer->memory.size() + 1 == want.size()) {
            source = std::equal(answer->memory.begin(), answer->memory.end(), want.begin());
          }
        }
        all &= source;
      }
      if (all) best = t;
    }
    if (decided.point.step.value != best) {
      std::string holders;
      for (const Copy& c : copies_) {
        if (std::get<0>(c) != decided.job || std::get<1>(c).step.value != best) continue;
        holders += fmt::format(" {}:{}", std::get<3>(c).value, std::get<2>(c).value);
      }
      Violate(fmt::format("generation {} starts at step {}, the oracle says {} (proved {}, survivors {}, copies{})",
                          decided.generation.value, decided.point.step.value, best, proved, survivors.size(), holders));
    } else if (best > 0 && decided.point != chain.AtStep(Step(best))) {
      Violate("the recovery point names another history than the chain");
    }
  }

  std::map<ProcessId, RankNode::Answer> answers_;
  std::set<Copy> copies_;
  std::map<JobUid, std::vector<StateId>> proofs_;
  std::map<ServerId, SessionId> sessions_;
  std::map<JobUid, bool> distrust_;
  std::map<ServerId, FactSequence> facts_seen_;
  std::map<ServerId, uint64_t> nonces_;
};

}  // namespace

std::unique_ptr<Checker> MakeRecoveryPointOracle(World& world) { return std::make_unique<RecoveryPointOracle>(world); }

}  // namespace everstep::sim
