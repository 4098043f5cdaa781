// Servers of the world: agents on their cores, streams, datagrams, processes, snapshot copies, and what can befall them.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

namespace {
Digest128 DigestOf(const Content& content) {
  Digest128 digest{content.size(), 1469598103934665603u};
  for (uint64_t g : content) {
    digest[1] ^= g;
    digest[1] *= 1099511628211u;
  }
  return digest;
}
}  // namespace

AgentNode& World::Agent(const std::string& name) {
  auto it = agents_.find(ServerId(name));
  EVERSTEP_CHECK(it != agents_.end());
  return it->second;
}

void World::AddServer(const std::string& name, int devices, const std::string& domain) {
  AgentNode& agent = agents_[ServerId(name)];
  agent.id = ServerId(name);
  agent.inventory.server = agent.id;
  agent.inventory.failure_domain = domain.empty() ? name : domain;
  agent.inventory.host = name;
  agent.inventory.probe_address = name + ":1";
  agent.inventory.transfer_address = name + ":2";
  for (int i = 0; i < devices; ++i) {
    agent.inventory.devices.push_back({DeviceIndex(i), DeviceKind::kCpuSlot, "cpu", 1u << 30, 1.0});
  }
  StartServer(name);
}

void World::StartServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (agent.alive) return;
  agent.alive = true;
  agent.stopped = false;
  ++agent.life;
  agent.core = std::make_unique<AgentCore>(agent.inventory, AgentPolicy{}, prng_.Next());
  agent.session.reset();
  agent.beating.reset();
  agent.beats = 0;
  agent.armed = kNever;
  agent.connections.clear();
  agent.copies.clear();
  agent.descriptors.clear();
  agent.deferred.clear();
  Trace(name + " starts");
  LinkUp(agent, Link());
}

void World::KillServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive) return;
  Trace(name + " dies");
  agent.alive = false;
  ++agent.life;
  // Ranks die with their agent; nobody on this server is left to say so.
  for (auto& [id, rank] : ranks_) {
    if (rank.server != agent.id || !rank.alive) continue;
    rank.alive = false;
    ++rank.epoch;
    LeaveMesh(rank, true);
  }
  if (agent.session) BreakStream(agent, false);
  agent.core.reset();
  agent.beating.reset();
  agent.copies.clear();
  agent.deferred.clear();
}

void World::StopServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive) return;
  Trace(name + " is stopped");
  agent.stopped = true;
  for (auto& [id, rank] : ranks_) {
    if (rank.server == agent.id && rank.alive) rank.stopped = true;
  }
}

void World::WakeServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (!agent.alive || !agent.stopped) return;
  Trace(name + " wakes");
  agent.stopped = false;
  const uint64_t life = agent.life;
  // Everything that waited runs in its order, a little apart.
  Duration later{};
  for (auto& run : std::exchange(agent.deferred, {})) {
    later += Between(Duration(0), Microseconds(50));
    After(later, [this, id = agent.id, life, run = std::move(run)] { OnServer(agents_.at(id), life, run); });
  }
  for (auto& [id, rank] : ranks_) {
    if (rank.server != agent.id || !rank.alive) continue;
    rank.stopped = false;
    for (auto& run : std::exchange(rank.deferred, {})) {
      later += Between(Duration(0), Microseconds(50));
      After(later, std::move(run));
    }
  }
  agent.armed = kNever;
  ArmAgent(agent);
}

void World::CutServer(const std::string& name, bool cut) {
  AgentNode& agent = Agent(name);
  if (agent.cut == cut) return;
  Trace(fmt::format("{} {}", name, cut ? "is cut off" : "is connected again"));
  agent.cut = cut;
  if (agent.session) {
    // TCP notices a cut only later; here both ends see it within the keep-alive's time.
    const SessionId session = *agent.session;
    After(Between(Milliseconds(200), Seconds(3)), [this, id = agent.id, session] {
      AgentNode& node = agents_.at(id);
      if (node.session == session) BreakStream(node, true);
    });
  }
}

// Runs on the server unless it died meanwhile; waits while it is stopped.
void World::OnServer(AgentNode& agent, uint64_t life, std::function<void()> run) {
  if (!agent.alive || agent.life != life) return;
  if (agent.stopped) {
    agent.deferred.push_back(std::move(run));
    return;
  }
  run();
}

void World::LinkUp(AgentNode& agent, Duration delay) {
  const uint64_t life = agent.life;
  const ServerId id = agent.id;
  After(delay, [this, id, life] {
    AgentNode& node = agents_.at(id);
    OnServer(node, life, [this, id, life] {
      AgentNode& target = agents_.at(id);
      if (target.session) return;
      if (!core_ || target.cut) {
        LinkUp(target, Milliseconds(100));
        return;
      }
      target.session = SessionId(next_session_++);
      sessions_[*target.session] = id;
      FeedAgent(target, ControllerLinkUp{});
    });
  });
}

void World::BreakStream(AgentNode& agent, bool tell_agent) {
  const SessionId session = *agent.session;
  agent.session.reset();
  const uint64_t controller = controller_life_;
  const ServerId id = agent.id;
  sessions_.erase(session);
  After(Link(), [this, controller, session] {
    if (controller == controller_life_) FeedController(AgentDisconnected{session});
  });
  if (tell_agent) {
    OnServer(agent, agent.life, [this, id] { FeedAgent(agents_.at(id), ControllerLinkDown{"reset"}); });
    LinkUp(agent, Milliseconds(50));
  }
}

void World::ToController(AgentNode& agent, SessionId session, std::function<void()> deliver) {
  if (agent.cut) return;
  const Instant at = std::max(now_ + Link(), to_controller_at_[session]);
  to_controller_at_[session] = at;
  const uint64_t controller = controller_life_;
  At(at, [this, controller, session, deliver = std::move(deliver)] {
    if (controller == controller_life_ && sessions_.contains(session)) deliver();
  });
}

void World::FeedAgent(AgentNode& agent, const AgentEvent& event) {
  if (!agent.alive) return;
  PerformAgent(agent, agent.core->Step(event, now_));
  if (agent.alive) ArmAgent(agent);
}

void World::ArmAgent(AgentNode& agent) {
  const Instant deadline = agent.core->NextDeadline();
  if (deadline == kNever || deadline >= agent.armed) return;
  agent.armed = std::max(deadline, now_);
  const Instant armed = agent.armed;
  const uint64_t life = agent.life;
  const ServerId id = agent.id;
  At(armed, [this, id, life, armed] {
    AgentNode& node = agents_.at(id);
    OnServer(node, life, [this, id, armed] {
      AgentNode& target = agents_.at(id);
      if (target.armed != armed) return;
      target.armed = kNever;
      FeedAgent(target, AgentTimeAdvanced{});
    });
  });
}

void World::Beat(const ServerId& id, uint64_t life) {
  AgentNode& agent = agents_.at(id);
  if (!agent.alive || agent.life != life || !agent.beating) return;
  if (!agent.stopped) {
    Heartbeat beat;
    beat.server = id;
    beat.incarnation = agent.core->incarnation();
    beat.sequence = ++agent.beats;
    beat.loop_counter = agent.beats;
    beat.acted = agent.core->acted();
    for (const ProcessStatus& status : agent.core->ListProcesses()) {
      const RankNode* rank = Find(status.process);
      if (rank == nullptr || !rank->alive) continue;
      const Progress& p = rank->core->progress();
      beat.votes.push_back({rank->id, p.generation, p.vote_passed, p.phase});
    }
    if (!agent.cut && !prng_.Chance(options_.datagram_loss_percent, 100)) {
      After(Link(), [this, beat] { FeedController(HeartbeatReceived{beat}); });
    }
  }
  After(agent.beating->heartbeat_interval, [this, id, life] { Beat(id, life); });
}

void World::PerformAgent(AgentNode& agent, AgentEffects effects) {
  const uint64_t life = agent.life;
  const ServerId id = agent.id;
  for (AgentEffect& effect : effects) {
    if (!agent.alive || agent.life != life) return;
    if (auto* hello = std::get_if<SayHello>(&effect)) {
      if (!agent.session) continue;
      for (ProcessStatus& status : hello->hello.processes) {
        if (const RankNode* rank = Find(status.process)) status.progress = rank->core->progress();
      }
      for (const auto& [key, content] : agent.copies) {
        const auto& [job, tier, state, shard] = key;
        hello->hello.snapshots.push_back({job, {state, shard, tier, id, 1 + content.size(), DigestOf(content)}});
      }
      const SessionId session = *agent.session;
      ToController(agent, session, [this, session, h = hello->hello] {
        Trace(fmt::format("{} says hello", h.inventory.server.value));
        FeedController(AgentConnected{session, h});
      });
    } else if (auto* fact = std::get_if<SendFact>(&effect)) {
      if (!agent.session) continue;
      const SessionId session = *agent.session;
      ToController(agent, session, [this, session, f = *fact] {
        Trace(fmt::format("controller gets fact {} {}", f.sequence.value, f.fact.index()));
        FeedController(FactReceived{session, f.sequence, f.fact});
      });
    } else if (std::get_if<CloseControllerLink>(&effect)) {
      if (agent.session) {
        const SessionId session = *agent.session;
        agent.session.reset();
        sessions_.erase(session);
        const uint64_t controller = controller_life_;
        After(Link(), [this, controller, session] {
          if (controller == controller_life_) FeedController(AgentDisconnected{session});
        });
      }
      if (std::get<CloseControllerLink>(effect).reopen) LinkUp(agent, Milliseconds(20));
    } else if (std::get_if<OpenControllerLink>(&effect)) {
      if (!agent.session) LinkUp(agent, Milliseconds(1));
    } else if (auto* beats = std::get_if<StartHeartbeats>(&effect)) {
      const bool running = agent.beating.has_value();
      agent.beating = beats->welcome;
      if (!running) After(Between(Duration(0), agent.beating->heartbeat_interval), [this, id, life] { Beat(id, life); });
    } else if (std::get_if<StopHeartbeats>(&effect)) {
      agent.beating.reset();
    } else if (auto* send = std::get_if<SendToRank>(&effect)) {
      auto it = agent.connections.find(send->connection.value);
      if (it == agent.connections.end()) continue;
      Content provided;
      if (send->descriptor.value != 0) {
        provided = agent.descriptors[send->descriptor.value];
        agent.descriptors.erase(send->descriptor.value);
      }
      const ProcessId process = it->second;
      OnRank(process, 0, Microseconds(20), [this, message = send->message, provided](RankNode& r) {
        if (std::holds_alternative<SnapshotProvided>(message)) r.provided = provided;
        FeedRank(r, std::visit([](const auto& m) { return session::Event(m); }, message));
      });
    } else if (std::get_if<CloseConnection>(&effect)) {
      agent.connections.erase(std::get<CloseConnection>(effect).connection.value);
    } else if (auto* start = std::get_if<StartProcess>(&effect)) {
      StartRank(agent, *start);
    } else if (auto* signal = std::get_if<SignalProcess>(&effect)) {
      const ProcessId process = signal->process;
      const int number = signal->signal;
      After(Between(Microseconds(50), Milliseconds(20)), [this, process, number] {
        RankNode* rank = Find(process);
        if (rank != nullptr && rank->alive) KillProcess(*rank, number, 0);
      });
    } else if (auto* staged = std::get_if<KeepStaged>(&effect)) {
      const KeepStaged v = *staged;
      const RankNode* rank = Find(v.process);
      if (rank == nullptr) continue;
      Content content = rank->memory;  // the slot holds what memory held when it was staged
      content.resize(static_cast<size_t>(std::min<int64_t>(v.staged.state.step.value, static_cast<int64_t>(content.size()))));
      After(Between(Microseconds(100), options_.snapshot_delay_max), [this, id, life, v, content] {
        OnServer(agents_.at(id), life, [this, id, v, content] {
          AgentNode& node = agents_.at(id);
          node.copies[{v.job, SnapshotTier::kStaged, v.staged.state, v.staged.shard}] = content;
          SnapshotInfo info{v.staged.state, v.staged.shard, SnapshotTier::kStaged, id, v.staged.bytes, DigestOf(content)};
          FeedAgent(node, KeeperReported{SnapshotHeld{v.job, info}});
        });
      });
    } else if (auto* copy = std::get_if<CopyForKeeping>(&effect)) {
      const CopySnapshot c = copy->command;
      After(Between(Microseconds(200), options_.snapshot_delay_max), [this, id, life, c] {
        OnServer(agents_.at(id), life, [this, id, c] {
          AgentNode& node = agents_.at(id);
          AgentNode& source = agents_.at(c.source.server);
          auto held = source.copies.find({c.job, c.source.tier, c.source.state, c.source.shard});
          SnapshotInfo info{c.source.state, c.source.shard, c.to, id, c.bytes, c.digest};
          if (!source.alive || source.stopped || held == source.copies.end()) {
            FeedAgent(node, KeeperReported{SnapshotLost{c.job, info, Reason::kSourceLost, "the source is gone"}});
            return;
          }
          node.copies[{c.job, c.to, c.source.state, c.source.shard}] = held->second;
          info.digest = DigestOf(held->second);
          FeedAgent(node, KeeperReported{SnapshotHeld{c.job, info}});
        });
      });
    } else if (auto* load = std::get_if<LoadSnapshot>(&effect)) {
      const LoadSnapshot l = *load;
      After(Between(Microseconds(200), options_.snapshot_delay_max), [this, id, life, l] {
        OnServer(agents_.at(id), life, [this, id, l] {
          AgentNode& node = agents_.at(id);
          const SnapshotSource& want = l.wanted.source;
          AgentNode& source = agents_.at(want.server);
          auto held = source.copies.find({l.job, want.tier, want.state, want.shard});
          if (!source.alive || source.stopped || held == source.copies.end()) {
            FeedAgent(node, SnapshotLoadFailed{l.process, {l.wanted.generation, StatusCode::kUnavailable, "gone"}});
            return;
          }
          const DescriptorToken token(node.next_descriptor++);
          node.descriptors[token.value] = held->second;
          SnapshotProvided answer;
          answer.generation = l.wanted.generation;
          answer.state = want.state;
          answer.digest = DigestOf(held->second);
          answer.from = want.server.value;
          FeedAgent(node, SnapshotLoaded{l.process, answer, token});
        });
      });
    } else if (auto* drop = std::get_if<DropKept>(&effect)) {
      for (const SnapshotInfo& s : drop->command.snapshots) {
        agent.copies.erase({drop->command.job, s.tier, s.state, s.shard});
      }
    } else if (auto* release = std::get_if<ReleaseSnapshots>(&effect)) {
      std::erase_if(agent.copies, [&](const auto& copy) {
        return std::get<0>(copy.first) == release->job && std::get<1>(copy.first) != SnapshotTier::kStored;
      });
    } else if (auto* token = std::get_if<DropDescriptor>(&effect)) {
      agent.descriptors.erase(token->descriptor.value);
    } else if (std::get_if<ExitAgent>(&effect)) {
      KillServer(id.value);
      return;
    } else if (auto* notice = std::get_if<AgentNotice>(&effect)) {
      Trace(fmt::format("{} notes {} {}", id.value, ReasonName(notice->reason), notice->message));
    }
  }
}

}  // namespace everstep::sim
