// What can befall servers, processes, links and disks.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {

void World::KillRank(const JobUid& job, int32_t number) {
  if (RankNode* rank = Member(job, number)) KillProcess(rank->id);
}

void World::KillProcess(ProcessId id) {
  RankNode* rank = Find(id);
  if (rank == nullptr || !rank->alive) return;
  Fault("rank killed", fmt::format("{} (rank {}) is killed", Short(id), rank->rank));
  EndProcess(*rank, 9, 0);
}

void World::CrashProgram(ProcessId id, int exit_code) {
  RankNode* rank = Find(id);
  if (rank == nullptr || !rank->alive) return;
  Fault("program crashed", fmt::format("the program of {} ends with code {}", Short(id), exit_code));
  EndProcess(*rank, 0, exit_code);
}

void World::StopRank(ProcessId id) {
  RankNode* rank = Find(id);
  if (rank == nullptr || !rank->alive || rank->stopped) return;
  Fault("rank stopped", fmt::format("{} (rank {}) is stopped", Short(id), rank->rank));
  rank->stopped = true;
}

void World::WakeRank(ProcessId id) {
  RankNode* rank = Find(id);
  if (rank == nullptr || !rank->alive || !rank->stopped) return;
  Trace(Short(id) + " wakes");
  Resume(*rank);
}

void World::Resume(RankNode& rank) {
  if (!rank.alive || !rank.stopped) return;
  rank.stopped = false;
  for (auto& run : std::exchange(rank.deferred, {})) run();  // each plans itself anew, for this instant, in order
}

void World::MakeUnkillable(ProcessId id, bool unkillable) {
  RankNode* rank = Find(id);
  if (rank == nullptr || !rank->alive || rank->unkillable == unkillable) return;
  if (unkillable) {
    Fault("rank unkillable", Short(id) + " can't be killed");
    rank->unkillable = rank->stopped = true;
    return;
  }
  // It gets out of the kernel, and the signals that wait for it end it.
  Trace(Short(id) + " can be killed again");
  rank->unkillable = false;
  EndProcess(*rank, 9, 0);
}

void World::KillServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive) return;
  Fault("server killed", name + " dies");
  agent.alive = false;
  agent.dead_since = now_;
  ++agent.life;
  // Ranks die with their agent; nobody on this server is left to say so.
  for (ProcessId id : agent.processes) {
    RankNode& rank = ranks_.at(id);
    rank.reaped = true;
    rank.unkillable = false;
    if (!rank.alive) continue;
    rank.alive = false;
    LeaveMesh(rank, true);
  }
  agent.processes.clear();
  for (const auto& [job, copy] : agent.custody->Held()) {
    if (copy.tier == SnapshotTier::kStored) continue;
    const SnapshotInfo gone = copy;
    const JobUid uid = job;
    Tell([&](Checker& c) { c.OnCopyGone(agent, uid, gone, true); });
  }
  BreakStream(agent, false);
  agent.core.reset();
  agent.beating.reset();
  agent.staging.clear();
  agent.peers.clear();
  agent.deferred.clear();
  SettleWell(agent);
}

void World::StopServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive || agent.stopped) return;
  Fault("server stopped", name + " is stopped");
  agent.stopped = true;
  for (ProcessId id : agent.processes) ranks_.at(id).stopped = true;
  SettleWell(agent);
}

void World::WakeServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive || !agent.stopped) return;
  Trace(name + " wakes");
  agent.stopped = false;
  SettleWell(agent);
  const uint64_t life = agent.life;
  for (ProcessId id : std::set<ProcessId>(agent.processes)) {
    if (!ranks_.at(id).unkillable) Resume(ranks_.at(id));
  }
  // Everything that waited runs in its order, before anything newer.
  for (auto& run : std::exchange(agent.deferred, {})) OnServer(agent, life, std::move(run));
  if (!agent.alive || agent.life != life || agent.stopped) return;
  agent.armed = kNever;
  ArmAgent(agent);
}

void World::SlowServer(const std::string& name, int64_t factor) {
  AgentNode& agent = Agent(name);
  if (factor > 1) Fault("server slow", fmt::format("{} computes {} times slower", name, factor));
  agent.slowness = factor;
}

void World::BreakDevice(const std::string& name, DeviceIndex device, bool broken) {
  AgentNode& agent = Agent(name);
  if (!agent.alive) return;
  if (!broken) {
    agent.broken_devices.erase(device);
    return;
  }
  Fault("device lost", fmt::format("device {} of {} breaks", device.value, name));
  agent.broken_devices.insert(device);
  for (ProcessId id : std::set<ProcessId>(agent.processes)) {
    RankNode& rank = ranks_.at(id);
    if (rank.device == device && !rank.unkillable) EndProcess(rank, 9, 0);
  }
}

void World::Link(const std::string& name, const ServerLinks& links) {
  AgentNode& agent = Agent(name);
  const ServerLinks before = std::exchange(agent.links, links);
  SettleWell(agent);
  if (links.any_cut() || links.slow > Duration(0)) {
    std::string what;
    if (links.up_cut && links.down_cut) what += " stream";
    if (links.up_cut && !links.down_cut) what += " stream-up";
    if (links.down_cut && !links.up_cut) what += " stream-down";
    if (links.datagrams_cut) what += " datagrams";
    if (links.peers_cut) what += " peers";
    if (links.slow > Duration(0)) what += " slow";
    Fault("link:" + what, name + " is cut:" + what);
  } else {
    Trace(name + " is connected again");
  }
  if (links.stream_cut() && !before.stream_cut() && agent.session) {
    // TCP notices a cut only later; here both ends see it within the keep-alive's time.
    const SessionId session = *agent.session;
    After(Between(Milliseconds(200), Seconds(3)), [this, id = agent.id, session] {
      AgentNode& node = agents_.at(id);
      if (node.session == session) BreakStream(node, true);
    });
  }
  if (links.peers_cut && !before.peers_cut) {
    for (ProcessId id : agent.processes) {
      if (Mesh* mesh = FindMesh(ranks_.at(id))) FailSplit(*mesh);
    }
  }
}

void World::Cut(const std::string& name, bool cut) {
  ServerLinks links = Agent(name).links;
  links.up_cut = links.down_cut = links.datagrams_cut = cut;
  Link(name, links);
}

void World::ResetStream(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive || !agent.session) return;
  Fault("stream reset", "the stream of " + name + " is reset");
  BreakStream(agent, true);
}

void World::CrashAgentIn(const std::string& name, int64_t effects) { Agent(name).crash_in = effects; }
void World::StopAgentIn(const std::string& name, int64_t effects) { Agent(name).stop_in = effects; }
void World::CrashControllerIn(int64_t effects) { controller_crash_in_ = effects; }

void World::DiskOf(const std::string& name, bool full, bool failing, Duration slow) {
  AgentNode& agent = Agent(name);
  if (full || failing || slow > Duration(0)) {
    Fault("store disk", fmt::format("the disk of {} {}", name, full ? "is full" : failing ? "fails" : "is slow"));
  }
  agent.disk.full = full;
  agent.disk.failing = failing;
  agent.disk.slow = slow;
}

void World::CorruptStore(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (agent.disk.chunks.empty()) return;
  Fault("store corrupt", "a chunk of " + name + " is damaged");
  Content& content = agent.disk.chunks.rbegin()->second;
  if (content.empty()) content.push_back(0);
  content.back() ^= 1u << 20;
}

void World::HealAll() {
  Trace("** everything is healed");
  disk_.failing = false;
  disk_.slow = Duration(0);
  controller_crash_in_.reset();
  WakeController();
  StartController();
  for (auto& [id, agent] : agents_) {
    agent.crash_in.reset();
    agent.stop_in.reset();
    agent.disk.full = agent.disk.failing = false;
    agent.disk.slow = Duration(0);
    agent.slowness = 1;
    agent.broken_devices.clear();
    if (agent.links.any_cut() || agent.links.slow > Duration(0)) Link(id.value, {});
    WakeServer(id.value);
    for (ProcessId process : std::set<ProcessId>(agent.processes)) {
      if (ranks_.at(process).unkillable) MakeUnkillable(process, false);
      WakeRank(process);
    }
    StartServer(id.value);
    auto server = decided_.servers.find(id);
    if (server != decided_.servers.end() && server->second.draining) Drain(id.value, false);
  }
  Tell([](Checker& c) { c.OnHealed(); });
}

}  // namespace everstep::sim
