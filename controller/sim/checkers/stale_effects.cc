// 6. Nothing that comes from a lower term, a dead incarnation or a generation left behind changes any state, at each hop.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class StaleEffects : public Checker {
 public:
  explicit StaleEffects(World& world) : Checker(world, "stale_effects") {}

  void OnCommandObeyed(const AgentNode& agent, const CommandHeader& header, const Command& command,
                       const AgentEffects& effects) override {
    Seen& seen = agents_[{agent.id, agent.life}];
    const bool stale = header.term < seen.term || (seen.session == agent.session && header.sequence <= seen.sequence);
    if (stale) {
      for (const AgentEffect& effect : effects) {
        if (std::holds_alternative<SendToRank>(effect) || std::holds_alternative<StartProcess>(effect) ||
            std::holds_alternative<SendFact>(effect) || std::holds_alternative<StartHeartbeats>(effect) ||
            std::holds_alternative<DropKept>(effect) || std::holds_alternative<CopyForKeeping>(effect)) {
          Violate(fmt::format("{} obeys a stale command: {}", agent.id.value, Describe(command)));
          return;
        }
      }
      return;
    }
    seen.term = std::max(seen.term, header.term);
    seen.session = agent.session;
    seen.sequence = header.sequence;
  }

  void OnEvent(const Event& event) override {
    stale_ = false;
    const LedgerState& ledger = world().decided();
    if (const auto* beat = std::get_if<HeartbeatReceived>(&event)) {
      auto server = ledger.servers.find(beat->heartbeat.server);
      stale_ = server == ledger.servers.end() || beat->heartbeat.incarnation != server->second.newest ||
               server->second.newest <= server->second.dead_upto;
    } else if (const auto* fact = std::get_if<FactReceived>(&event)) {
      stale_ = std::none_of(sessions_.begin(), sessions_.end(), [&](const auto& s) { return s.second == fact->session; });
    }
  }
  void OnControllerStepped(const Event& event, const Effects& effects) override {
    for (const Effect& effect : effects) {
      if (const auto* send = std::get_if<SendCommand>(&effect.body); send && std::holds_alternative<Welcome>(send->command)) {
        if (const auto* connected = std::get_if<AgentConnected>(&event)) {
          sessions_[connected->hello.inventory.server] = connected->session;
        }
      }
      if (const auto* close = std::get_if<CloseSession>(&effect.body)) {
        std::erase_if(sessions_, [&](const auto& s) { return s.second == close->session; });
      }
    }
    if (const auto* gone = std::get_if<AgentDisconnected>(&event)) {
      std::erase_if(sessions_, [&](const auto& s) { return s.second == gone->session; });
    }
    if (!stale_ || world().timers_due()) return;
    for (const Effect& effect : effects) {
      // A takeover is overdue since the controller started; any event makes it look.
      const auto* append = std::get_if<AppendRecord>(&effect.body);
      const auto* fenced = append == nullptr ? nullptr : std::get_if<GenerationFenced>(&append->record);
      if (fenced != nullptr && fenced->reason == Reason::kTakeover) return;
      if (append != nullptr || std::holds_alternative<SendCommand>(effect.body)) {
        Violate("a heartbeat or fact of a dead incarnation or an old stream changes the controller's state");
        return;
      }
    }
  }
  void OnControllerStarted() override {
    sessions_.clear();
    stale_ = false;
  }

  void OnRankStepped(const RankNode& rank, const session::Event& event, const std::vector<session::Effect>& effects) override {
    Generation generation = rank.answered.generation;
    if (const auto* fence = std::get_if<FenceRank>(&event)) generation = fence->generation;
    if (const auto* assign = std::get_if<AssignRank>(&event)) generation = assign->assignment.generation;
    if (const auto* resume = std::get_if<ResumeRank>(&event)) generation = resume->generation;
    if (generation < rank.answered.generation && !effects.empty()) {
      Violate(fmt::format("{} obeys generation {} after it answered Collect({})", Short(rank.id), generation.value,
                          rank.answered.generation.value));
    }
  }

 private:
  struct Seen { Term term; std::optional<SessionId> session; CommandSequence sequence; };
  std::map<std::pair<ServerId, uint64_t>, Seen> agents_;
  std::map<ServerId, SessionId> sessions_;
  bool stale_ = false;
};

}  // namespace

std::unique_ptr<Checker> MakeStaleEffects(World& world) { return std::make_unique<StaleEffects>(world); }

}  // namespace everstep::sim
