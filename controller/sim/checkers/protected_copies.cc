// 9. A protected state survives the loss of any one domain: its copies are in two when the watermark rises, and what is at or
// above the watermark is given up by nobody but a fault.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class ProtectedCopies : public Checker {
 public:
  explicit ProtectedCopies(World& world) : Checker(world, "protected_copies") {}

  void OnEvent(const Event& event) override {
    if (const auto* connected = std::get_if<AgentConnected>(&event)) {
      const ServerInventory& inventory = connected->hello.inventory;
      for (const auto& [job, copy] : connected->hello.snapshots) Hold(job, copy, inventory.failure_domain);
    }
    const auto* fact = std::get_if<FactReceived>(&event);
    const auto* held = fact == nullptr ? nullptr : std::get_if<SnapshotHeld>(&fact->fact);
    if (held == nullptr) return;
    auto server = world().agents().find(held->snapshot.server);
    if (server != world().agents().end()) Hold(held->job, held->snapshot, server->second.inventory.failure_domain);
  }

  void OnCommandLeft(const ServerId&, const SendCommand& sent) override {
    const auto* raised = std::get_if<ProtectedStepRaised>(&sent.command);
    if (raised == nullptr) return;
    auto job = world().decided().jobs.find(raised->job);
    if (job == world().decided().jobs.end() || job->second.lineage.links().empty()) return;
    if (!apart(raised->job)) return;  // all of its servers share a domain: a copy inside it is the best there is
    for (int32_t shard = 0; shard < job->second.spec.pipeline_stages; ++shard) {
      bool safe = false;
      for (const auto& [key, domains] : held_) {
        const auto& [uid, state, index] = key;
        if (uid == raised->job && index.value == shard && state.step == raised->step) safe |= domains.size() >= 2;
      }
      if (!safe) {
        Violate(fmt::format("step {} is called protected, but shard {} was never held in two domains", raised->step.value, shard));
      }
    }
  }

  // What its agent has been told: below that a copy may go although the controller has just gone back further.
  void OnCommandObeyed(const AgentNode& agent, const CommandHeader&, const Command& command, const AgentEffects& effects) override {
    if (effects.empty()) return;
    if (const auto* raised = std::get_if<ProtectedStepRaised>(&command)) {
      Step& mark = told_[{agent.id, agent.life, raised->job}];
      mark = std::max(mark, raised->step);
    } else if (const auto* assign = std::get_if<AssignProcesses>(&command)) {
      Step& mark = told_[{agent.id, agent.life, assign->assignment.job}];
      mark = std::min(mark, assign->assignment.recovery_point.step);
    }
  }

  // The watermark is the controller's: what it has said, lowered by each recovery point below it.
  void OnControllerStepped(const Event&, const Effects& effects) override {
    for (const Effect& effect : effects) {
      const auto* send = std::get_if<SendCommand>(&effect.body);
      if (send == nullptr) continue;
      if (const auto* raised = std::get_if<ProtectedStepRaised>(&send->command)) {
        watermark_[raised->job] = std::max(watermark_[raised->job], raised->step);
      }
    }
  }
  void OnDecided(const Record& record, const LedgerState&) override {
    if (const auto* decided = std::get_if<RecoveryPointDecided>(&record)) {
      watermark_[decided->job] = std::min(watermark_[decided->job], decided->point.step);
    }
  }

  void OnCopyGone(const AgentNode& agent, const JobUid& job, const SnapshotInfo& copy, bool by_fault) override {
    if (by_fault || copy.tier == SnapshotTier::kStored) return;
    auto entry = world().decided().jobs.find(job);
    if (entry == world().decided().jobs.end() || entry->second.ended) return;
    auto mark = watermark_.find(job);
    Step watermark = mark == watermark_.end() ? Step(0) : mark->second;
    if (copy.tier == SnapshotTier::kStaged) watermark = std::max(watermark, told_[{agent.id, agent.life, job}]);
    if (copy.state.step >= watermark && copy.state.step.value > 0 && entry->second.lineage.OnChain(copy.state)) {
      Violate(fmt::format("{} gives up the {} copy of step {} on the chain; the watermark is {}", agent.id.value,
                          copy.tier == SnapshotTier::kPeer ? "peer" : "staged", copy.state.step.value, watermark.value));
    }
  }

 private:
  void Hold(const JobUid& job, const SnapshotInfo& copy, const std::string& domain) {
    if (copy.tier == SnapshotTier::kStored) return;
    held_[{job, copy.state, copy.shard}].insert(domain);
  }
  bool apart(const JobUid& job) const {
    const LedgerState& ledger = world().decided();
    const JobEntry& entry = ledger.jobs.at(job);
    std::set<std::string> domains;
    if (!entry.assignment) return false;
    for (const RankAssignment& r : entry.assignment->ranks) {
      auto server = ledger.servers.find(r.server);
      const bool lives = server != ledger.servers.end() && server->second.newest > server->second.dead_upto;
      if (lives && world().ranks().contains(r.process) && !world().ranks().at(r.process).reaped) domains.insert(server->second.failure_domain);
    }
    return domains.size() > 1;
  }
  std::map<std::tuple<JobUid, StateId, ShardIndex>, std::set<std::string>> held_;
  std::map<JobUid, Step> watermark_;
  std::map<std::tuple<ServerId, uint64_t, JobUid>, Step> told_;
};

}  // namespace

std::unique_ptr<Checker> MakeProtectedCopies(World& world) { return std::make_unique<ProtectedCopies>(world); }

}  // namespace everstep::sim
