#include "controller/sim/fault_script.h"

#include <algorithm>

namespace everstep::sim {
namespace {

constexpr const char* kMoments[] = {"computing", "reducing", "reduced", "voting", "applying", "applied", "connecting",
                                    "connected", "receiving", "serving", "received", "resumed"};
constexpr size_t kBurstMax = 11;  // servers lost at one instant in the worst minute of the recorded preemptions

}  // namespace

FaultScript::FaultScript(World& world, const RunOptions& options, std::vector<ScriptedJob>& jobs)
    : world_(world), options_(options), jobs_(jobs), prng_(world.fault_prng()) {
  for (const auto& [id, agent] : world.agents()) names_.push_back(id.value);
  world_.on_moment = [this](const std::string& what, const RankNode& rank) {
    if (moment_ != what) return;
    if (moment_strikes_ > 1 && prng_.Chance(1, 3)) return;  // some are spared
    if (--moment_strikes_ <= 0) moment_.clear();
    const ProcessId id = rank.id;
    if (moment_stops_) {
      world_.StopRank(id);
      Later(Lasting(), [this, id] { world_.WakeRank(id); });
    } else {
      world_.KillProcess(id);
    }
  };
}

Duration FaultScript::Between(Duration low, Duration high) {
  return high <= low ? low : Duration(prng_.Between(low.count(), high.count()));
}

Duration FaultScript::Lasting() {
  const Duration lease = options_.world.policy.lease;
  switch (prng_.UpTo(2)) {
    case 0: return Between(Milliseconds(1), lease / 2);
    case 1: return Between(lease / 2, 2 * lease);
    default: return Between(2 * lease, 8 * lease + Seconds(options_.profile == Profile::kLarge ? 20 : 1));
  }
}

void FaultScript::Later(Duration after, std::function<void()> run) {
  due_.push_back({world_.now() + after, ++order_, std::move(run)});
}

void FaultScript::RunTo(Instant at) {
  while (true) {
    auto next = std::min_element(due_.begin(), due_.end(), [](const Due& a, const Due& b) {
      return std::tie(a.at, a.order) < std::tie(b.at, b.order);
    });
    if (next == due_.end() || next->at > at) break;
    const Due due = std::move(*next);
    due_.erase(next);
    if (due.at > world_.now()) world_.RunFor(due.at - world_.now());
    due.run();
  }
  if (at > world_.now()) world_.RunFor(at - world_.now());
}

std::string FaultScript::AnyServer() { return names_[prng_.UpTo(names_.size() - 1)]; }

std::vector<std::string> FaultScript::SomeServers(size_t count) {
  std::vector<std::string> pool = names_, chosen;
  while (!pool.empty() && chosen.size() < count) {
    const size_t i = prng_.UpTo(pool.size() - 1);
    chosen.push_back(pool[i]);
    pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return chosen;
}

RankNode* FaultScript::AnyRank() {
  if (jobs_.empty()) return nullptr;
  std::vector<RankNode*> live;
  for (RankNode* rank : world_.Ranks(jobs_[prng_.UpTo(jobs_.size() - 1)].uid)) {
    if (rank->alive) live.push_back(rank);
  }
  return live.empty() ? nullptr : live[prng_.UpTo(live.size() - 1)];
}

// At most half of the servers lie dead at a time, but for the faults that are about losing most.
bool FaultScript::MayKill() const {
  size_t dead = 0;
  for (const auto& [id, agent] : world_.agents()) dead += agent.alive ? 0 : 1;
  return dead * 2 < names_.size();
}

void FaultScript::Lose(const std::string& server, bool power) {
  if (power) world_.Cut(server, true);
  world_.KillServer(server);
}

void FaultScript::Return(const std::string& server) {
  world_.Link(server, {});
  world_.StartServer(server);
}

void FaultScript::Run() {
  const Instant end = world_.now() + options_.lasting;
  while (true) {
    const Instant next = world_.now() + Between(options_.fault_min, options_.fault_max);
    if (next >= end) break;
    RunTo(next);
    int kind = static_cast<int>(prng_.UpTo(kKinds - 1));
    for (int tries = 0; tries < 64 && (options_.kinds >> kind & 1u) == 0; ++tries) {
      kind = static_cast<int>(prng_.UpTo(kKinds - 1));
    }
    if (options_.focus && prng_.Chance(3, 5)) kind = 10;
    Strike(kind);
    if (options_.fixed_length && std::all_of(jobs_.begin(), jobs_.end(), [&](const ScriptedJob& j) { return world_.EndOf(j.uid).has_value(); })) {
      break;
    }
  }
  if (!options_.fixed_length) RunTo(end);
  world_.on_moment = nullptr;
  due_.clear();
}

void FaultScript::Strike(int kind) {
  if (kind < 13) {
    StrikeServer(kind);
  } else if (kind < 19) {
    StrikeController(kind);
  } else if (kind < 25) {
    StrikeMany(kind);
  } else {
    StrikeJob(kind);
  }
}

void FaultScript::StrikeServer(int kind) {
  const std::string server = AnyServer();
  RankNode* rank = AnyRank();
  const ProcessId id = rank == nullptr ? ProcessId(0) : rank->id;
  switch (kind) {
    case 0:
      world_.KillProcess(id);
      return;
    case 1:
      if (!MayKill()) return;
      world_.KillServer(server);
      Later(Lasting(), [this, server] { world_.StartServer(server); });
      return;
    case 2:  // the agent restarts at once, as a new incarnation
      world_.KillServer(server);
      Later(Between(Milliseconds(1), Milliseconds(300)), [this, server] { world_.StartServer(server); });
      return;
    case 3:
      world_.StopServer(server);
      Later(Lasting(), [this, server] { world_.WakeServer(server); });
      return;
    case 4:
      world_.StopRank(id);
      Later(Lasting(), [this, id] { world_.WakeRank(id); });
      return;
    case 5:
      world_.Cut(server, true);
      Later(Lasting(), [this, server] { world_.Link(server, {}); });
      return;
    case 6: {  // the channels fail apart
      ServerLinks links;
      switch (prng_.UpTo(4)) {
        case 0: links.up_cut = true; break;
        case 1: links.down_cut = true; break;
        case 2: links.datagrams_cut = true; break;
        case 3: links.up_cut = links.down_cut = true; break;
        default: links.slow = Between(Milliseconds(5), Milliseconds(400)); break;
      }
      world_.Link(server, links);
      Later(Lasting(), [this, server] { world_.Link(server, {}); });
      return;
    }
    case 7: {  // from the other servers only
      ServerLinks links;
      links.peers_cut = true;
      world_.Link(server, links);
      Later(std::min(Lasting(), Seconds(2)), [this, server] { world_.Link(server, {}); });
      return;
    }
    case 8:
      world_.ResetStream(server);
      return;
    case 9:
      if (!MayKill()) return;
      if (prng_.Chance(1, 2)) {
        world_.CrashAgentIn(server, prng_.Between(1, 12));
        Later(Lasting() + Seconds(1), [this, server] { world_.StartServer(server); });
      } else {
        world_.StopAgentIn(server, prng_.Between(1, 12));
        Later(Lasting() + Milliseconds(200), [this, server] { world_.WakeServer(server); });
      }
      return;
    case 10:
      moment_ = kMoments[prng_.UpTo(std::size(kMoments) - 1)];
      moment_stops_ = prng_.Chance(1, 3);
      moment_strikes_ = options_.focus ? static_cast<int>(prng_.Between(1, 3)) : 1;
      return;
    case 11: {
      const DeviceIndex device(static_cast<int32_t>(prng_.UpTo(static_cast<uint64_t>(options_.devices - 1))));
      world_.BreakDevice(server, device, true);
      Later(Lasting(), [this, server, device] { world_.BreakDevice(server, device, false); });
      return;
    }
    default:
      world_.SlowServer(server, prng_.Between(2, 20));
      Later(Lasting(), [this, server] { world_.SlowServer(server, 1); });
      return;
  }
}

void FaultScript::StrikeController(int kind) {
  switch (kind) {
    case 13:
      world_.KillController();
      Later(Lasting(), [this] { world_.StartController(); });
      return;
    case 14:
      world_.StopController();
      Later(std::min(Lasting(), Seconds(5)), [this] { world_.WakeController(); });
      return;
    case 15:
      world_.CrashControllerIn(prng_.Between(1, 40));
      Later(Lasting() + Milliseconds(500), [this] { world_.StartController(); });
      return;
    case 16:
      world_.LedgerDisk(prng_.Chance(1, 3), Between(Milliseconds(1), Milliseconds(600)));
      Later(Lasting() + Milliseconds(100), [this] {
        world_.LedgerDisk(false, Duration(0));
        world_.StartController();
      });
      return;
    case 17:
      // Killed again while it takes over.
      world_.KillController();
      for (int i = 1; i <= 3; ++i) {
        Later(Milliseconds(400) * i, [this] { world_.StartController(); });
        Later(Milliseconds(400) * i + Between(Milliseconds(1), Milliseconds(300)), [this] { world_.KillController(); });
      }
      Later(Seconds(2), [this] { world_.StartController(); });
      return;
    case 18:
      if (prng_.Chance(2, 3)) return world_.RepeatOldLeader();
      [[fallthrough]];
    default:
      world_.JumpWallClock(Seconds(prng_.Between(-3600, 3600)));
      return;
  }
}

void FaultScript::StrikeMany(int kind) {
  const size_t half = names_.size() / 2 + 1;
  switch (kind) {
    case 19: {  // a rack
      if (options_.racks == 0 || !MayKill()) return;
      const std::string domain = world_.Agent(AnyServer()).inventory.failure_domain;
      std::vector<std::string> rack;
      for (const auto& [id, agent] : world_.agents()) {
        if (agent.inventory.failure_domain == domain) rack.push_back(id.value);
      }
      const bool power = prng_.Chance(1, 2);
      for (const std::string& server : rack) Lose(server, power);
      Later(Lasting(), [this, rack] {
        for (const std::string& server : rack) Return(server);
      });
      return;
    }
    case 20: {  // a burst
      if (!MayKill()) return;
      const std::vector<std::string> servers = SomeServers(prng_.Between(2, static_cast<int64_t>(std::min(kBurstMax, names_.size() / 2))));
      const bool power = prng_.Chance(1, 3);
      for (const std::string& server : servers) Lose(server, power);
      for (const std::string& server : servers) Later(Lasting(), [this, server] { Return(server); });
      return;
    }
    case 21: {  // swizzle: some stop one by one, and come back in another order
      std::vector<std::string> servers = SomeServers(std::min<size_t>(6, names_.size() / 2));
      Duration at{};
      for (const std::string& server : servers) {
        at += Between(Milliseconds(1), Milliseconds(200));
        Later(at, [this, server] { world_.KillServer(server); });
      }
      for (const std::string& server : SomeServers(names_.size())) {
        if (std::find(servers.begin(), servers.end(), server) == servers.end()) continue;
        at += Between(Milliseconds(1), Milliseconds(400));
        Later(at, [this, server] { world_.StartServer(server); });
      }
      return;
    }
    case 22: {  // most servers fall silent at once
      const std::vector<std::string> servers = SomeServers(prng_.Between(static_cast<int64_t>(half), static_cast<int64_t>(names_.size())));
      for (const std::string& server : servers) world_.Cut(server, true);
      Later(Lasting(), [this, servers] {
        for (const std::string& server : servers) world_.Link(server, {});
      });
      return;
    }
    case 23: {  // most servers are lost at once
      const std::vector<std::string> servers = SomeServers(prng_.Between(static_cast<int64_t>(half), static_cast<int64_t>(names_.size())));
      const bool power = prng_.Chance(1, 2);
      for (const std::string& server : servers) Lose(server, power);
      const Duration hold = options_.world.policy.mass_silence_hold;
      Later(Lasting() + Seconds(1) + (prng_.Chance(1, 3) ? 6 * hold : Duration(0)), [this, servers] {
        for (const std::string& server : servers) Return(server);
      });
      return;
    }
    default: {  // a job is cut off together with its servers
      if (jobs_.empty()) return;
      std::set<std::string> servers;
      for (RankNode* rank : world_.Ranks(jobs_[prng_.UpTo(jobs_.size() - 1)].uid)) servers.insert(rank->server.value);
      for (const std::string& server : servers) world_.Cut(server, true);
      Later(Lasting(), [this, servers] {
        for (const std::string& server : servers) world_.Link(server, {});
      });
      return;
    }
  }
}

void FaultScript::StrikeJob(int kind) {
  const std::string server = AnyServer();
  switch (kind) {
    case 25:
      world_.Drain(server, true);
      Later(Lasting() + Seconds(1), [this, server] { world_.Drain(server, false); });
      return;
    case 26: {
      const uint64_t what = prng_.UpTo(3);
      if (what == 3) return world_.CorruptStore(server);
      world_.DiskOf(server, what == 0, what == 1, what == 2 ? Between(Milliseconds(10), Seconds(2)) : Duration(0));
      Later(Lasting(), [this, server] { world_.DiskOf(server, false, false, Duration(0)); });
      return;
    }
    case 27: {
      RankNode* rank = AnyRank();
      if (rank == nullptr) return;
      const ProcessId id = rank->id;
      world_.MakeUnkillable(id, true);
      Later(Lasting(), [this, id] { world_.MakeUnkillable(id, false); });
      return;
    }
    default: {  // the job is cancelled, and its name is used again at once
      if (jobs_.empty() || options_.fixed_length || !world_.controller_up() || world_.controller_stopped()) return;
      ScriptedJob& job = jobs_[prng_.UpTo(jobs_.size() - 1)];
      world_.Cancel(job.uid);
      if (const std::optional<JobUid> again = world_.TrySubmit(job.spec, job.steps)) job.uid = *again;
      return;
    }
  }
}

}  // namespace everstep::sim
