// 12. When most servers fall silent within one lease nobody is declared dead by silence before the hold is over; and whoever
// is really dead is declared so within a bound, so the brake always releases.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class MassSilence : public Checker {
 public:
  explicit MassSilence(World& world) : Checker(world, "mass_silence") {}
  void OnControllerStarted() override {
    const Policy& policy = world().options().policy;
    heard_.clear();
    sequences_.clear();
    steady_since_ = started_ = world().now();
    for (const auto& [id, server] : world().decided().servers) heard_[id] = world().now() + policy.adoption_grace - policy.lease;
  }
  void OnEvent(const Event& event) override {
    if (const auto* beat = std::get_if<HeartbeatReceived>(&event)) {
      auto server = world().decided().servers.find(beat->heartbeat.server);
      if (server == world().decided().servers.end() || server->second.newest != beat->heartbeat.incarnation) return;
      uint64_t& sequence = sequences_[{beat->heartbeat.server, beat->heartbeat.incarnation}];
      if (beat->heartbeat.sequence <= sequence) return;
      sequence = beat->heartbeat.sequence;
      heard_[beat->heartbeat.server] = world().now();
    } else if (const auto* fact = std::get_if<FactReceived>(&event)) {
      if (auto it = sessions_.find(fact->session); it != sessions_.end()) heard_[it->second] = world().now();
    } else if (const auto* lagged = std::get_if<LoopLagged>(&event)) {
      steady_since_ = lagged_at_ = world().now();
      for (auto& [id, at] : heard_) at += lagged->lag;
    }
  }
  void OnControllerStepped(const Event& event, const Effects& effects) override {
    if (const auto* connected = std::get_if<AgentConnected>(&event)) {
      for (const Effect& effect : effects) {
        const auto* send = std::get_if<SendCommand>(&effect.body);
        if (send == nullptr || send->session != connected->session || !std::holds_alternative<Welcome>(send->command)) continue;
        heard_[connected->hello.inventory.server] = world().now();
        sessions_[connected->session] = connected->hello.inventory.server;
      }
    }
    // Now and then: is a server dead for longer than any rule allows without anybody having said so?
    const Policy& policy = world().options().policy;
    if (world().now() < next_look_) return;
    next_look_ = world().now() + policy.lease;
    const Duration bound = 2 * policy.lease + policy.probe_timeout + 2 * policy.mass_silence_hold + policy.adoption_grace + Seconds(6);
    for (const auto& [id, agent] : world().agents()) {
      if (agent.alive || agent.dead_since == kNever) continue;
      if (world().now() - std::max(agent.dead_since, steady_since_) < bound) continue;
      auto server = world().decided().servers.find(id);
      if (server == world().decided().servers.end() || server->second.newest <= server->second.dead_upto) continue;
      if (said_.insert({id, agent.life}).second) {
        Violate(fmt::format("{} is dead for {:.1f} s and nobody says so", id.value, ToSeconds(world().now() - agent.dead_since)));
      }
    }
  }
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* died = std::get_if<ServerDied>(&record);
    if (died == nullptr || died->reason != Reason::kServerSilent) return;
    const Policy& policy = world().options().policy;
    // After the loop was late, and while a controller waits for first reports, its own reckoning of leases counts.
    if (world().now() - lagged_at_ < 2 * policy.lease + policy.mass_silence_hold) return;
    if (world().now() - started_ < policy.adoption_grace + policy.lease) return;
    size_t alive = 0, silent = 0;
    std::string mutes;
    for (const auto& [id, server] : before.servers) {
      if (server.newest <= server.dead_upto) continue;
      ++alive;
      mutes += fmt::format(" {} {:.2f}", id.value, ToSeconds(world().now() - heard_[id]));
      if (world().now() - heard_[id] > policy.lease * 11 / 20) ++silent;
    }
    if (alive < 5 || silent < std::max<size_t>(3, (alive + 1) / 2)) return;
    const Duration mute = world().now() - heard_[died->server];
    if (mute < (policy.lease + policy.mass_silence_hold) * 9 / 10) {
      Violate(fmt::format("{} is declared dead after {:.2f} s of silence although {} of {} servers are silent:{}",
                          died->server.value, ToSeconds(mute), silent, alive, mutes));
    }
  }

 private:
  std::map<ServerId, Instant> heard_;
  std::map<std::pair<ServerId, Incarnation>, uint64_t> sequences_;
  std::map<SessionId, ServerId> sessions_;
  std::set<std::pair<ServerId, uint64_t>> said_;
  Instant steady_since_{}, started_{}, lagged_at_{}, next_look_{};
};

}  // namespace

std::unique_ptr<Checker> MakeMassSilence(World& world) { return std::make_unique<MassSilence>(world); }

}  // namespace everstep::sim
