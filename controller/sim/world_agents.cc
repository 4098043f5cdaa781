// Servers: agents on their cores, streams, datagrams and the processes' sockets.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/describe.h"
#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

void World::AddServer(const std::string& name, int devices, const std::string& domain) {
  AgentNode& agent = agents_[ServerId(name)];
  agent.id = ServerId(name);
  agent.inventory.server = agent.id;
  agent.inventory.failure_domain = domain.empty() ? name : domain;
  agent.inventory.host = name;
  agent.inventory.probe_address = name + ":1";
  agent.inventory.transfer_address = name + ":2";
  if (options_.drift_ppm_max > 0) agent.clock.drift_ppm = prng_.Between(-options_.drift_ppm_max, options_.drift_ppm_max);
  for (int i = 0; i < devices; ++i) {
    agent.inventory.devices.push_back({DeviceIndex(i), DeviceKind::kCpuSlot, "cpu", 1u << 30, 1.0});
  }
  StartServer(name);
}

void World::StartServer(const std::string& name) {
  AgentNode& agent = Agent(name);
  if (agent.alive) return;
  agent.alive = true;
  agent.dead_since = kNever;
  agent.stopped = false;
  agent.slowness = 1;
  ++agent.life;
  agent.core = std::make_unique<AgentCore>(agent.inventory, AgentPolicy{}, prng_.Next());
  agent.custody = std::make_unique<checkpoint::SnapshotCustody>(agent.id, checkpoint::SnapshotCustody::Limits{});
  for (const auto& [key, stored] : agent.disk.copies) agent.custody->StoredFound(key.first, stored.info);
  agent.session.reset();
  agent.down_pending = false;
  agent.beating.reset();
  agent.beats = 0;
  agent.armed = kNever;
  agent.connections.clear();
  agent.staging.clear();
  agent.peers.clear();
  agent.descriptors.clear();
  agent.broken_devices.clear();
  agent.crash_in.reset();
  agent.stop_in.reset();
  agent.deferred.clear();
  Trace(name + " starts");
  LinkUp(agent, network_.Link());
}

// Whether everything between this server and the controller has worked, and since when.
void World::SettleWell(AgentNode& agent) {
  const bool well = agent.alive && !agent.stopped && !agent.links.stream_cut() &&
                    agent.links.slow == Duration(0) && agent.session && core_ && !controller_stopped_;
  if (!well) {
    agent.well_since = kNever;
  } else if (agent.well_since == kNever || agent.well_since == Instant{}) {
    agent.well_since = now_;
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
      if (std::exchange(target.down_pending, false)) FeedAgent(target, ControllerLinkDown{"reset"});
      if (!target.alive || target.session) return;
      if (!core_ || target.links.stream_cut()) {
        LinkUp(target, Milliseconds(100));
        return;
      }
      target.session = SessionId(next_session_++);
      sessions_[*target.session] = id;
      SettleWell(target);
      FeedAgent(target, ControllerLinkUp{});
    });
  });
}

void World::BreakStream(AgentNode& agent, bool tell_agent) {
  if (!agent.session) return;
  const SessionId session = *agent.session;
  agent.session.reset();
  SettleWell(agent);
  const uint64_t controller = controller_life_;
  sessions_.erase(session);
  // Behind a cut nobody hears the end of the stream; the keep-alive finds it out.
  const Duration notice = agent.links.stream_cut() ? Between(Milliseconds(200), Seconds(3)) : network_.Link();
  After(notice, [this, controller, session] {
    if (controller == controller_life_) FeedController(AgentDisconnected{session});
  });
  if (tell_agent) {
    TellDown(agent);
    LinkUp(agent, Milliseconds(50));
  }
}

void World::TellDown(AgentNode& agent) {
  agent.down_pending = true;
  OnServer(agent, agent.life, [this, node = &agent] {
    if (std::exchange(node->down_pending, false)) FeedAgent(*node, ControllerLinkDown{"reset"});
  });
}

void World::ToController(AgentNode& agent, SessionId session, std::function<void()> deliver) {
  if (agent.links.up_cut) return;
  const Instant at = std::max(now_ + network_.Link() + agent.links.slow, to_controller_at_[session]);
  to_controller_at_[session] = at;
  const uint64_t controller = controller_life_;
  At(at, [this, controller, session, deliver = std::move(deliver)] {
    if (controller == controller_life_ && sessions_.contains(session)) deliver();
  });
}

void World::FeedAgent(AgentNode& agent, const AgentEvent& event) {
  if (!agent.alive) return;
  const uint64_t life = agent.life;
  PerformAgent(agent, agent.core->Step(event, agent.clock.Local(now_)));
  if (agent.alive && agent.life == life) ArmAgent(agent);
}

void World::ArmAgent(AgentNode& agent) {
  const Instant deadline = agent.clock.World(agent.core->NextDeadline());
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

void World::Beat(AgentNode& agent, uint64_t life) {
  if (!agent.alive || agent.life != life || !agent.beating) return;
  ++heartbeats_;
  if (!agent.stopped) {
    HeartbeatReceived beat;
    beat.heartbeat.server = agent.id;
    beat.heartbeat.incarnation = agent.core->incarnation();
    beat.heartbeat.sequence = ++agent.beats;
    beat.heartbeat.loop_counter = agent.beats;
    beat.heartbeat.acted = agent.core->acted();
    for (ProcessId process : agent.processes) {
      const RankNode& rank = ranks_.at(process);
      if (!rank.alive || rank.opaque) continue;
      const Progress& p = rank.core->progress();
      beat.heartbeat.votes.push_back({rank.id, p.generation, p.vote_passed, p.phase});
    }
    for (Duration delay : network_.Datagram(agent.links)) {
      After(delay, [this, beat] { FeedController(beat); });
    }
  }
  After(agent.beating->heartbeat_interval, [this, node = &agent, life] { Beat(*node, life); });
}

void World::SayHelloFrom(AgentNode& agent, const SayHello& effect) {
  if (!agent.session) return;
  AgentHello hello = effect.hello;
  for (ProcessStatus& status : hello.processes) {
    const RankNode* rank = Find(status.process);
    if (rank != nullptr && !rank->opaque) status.progress = rank->core->progress();
  }
  hello.snapshots = agent.custody->Held();
  const SessionId session = *agent.session;
  ToController(agent, session, [this, session, hello = std::move(hello)] {
    std::string line = fmt::format("{} > hello incarnation {}", hello.inventory.server.value, hello.incarnation.value);
    for (const ProcessStatus& s : hello.processes) {
      line += fmt::format(" {} promised {} assigned {}", Short(s.process), s.promised.value, s.assigned.value);
    }
    Trace(line);
    FeedController(AgentConnected{session, hello});
  });
}

void World::SendToRankFrom(AgentNode& agent, const SendToRank& send) {
  auto it = agent.connections.find(send.connection.value);
  if (it == agent.connections.end()) return;
  Content provided;
  if (send.descriptor.value != 0) {
    provided = agent.descriptors[send.descriptor.value];
    agent.descriptors.erase(send.descriptor.value);
  }
  OnRank(it->second, 0, Microseconds(20), [this, message = send.message, provided](RankNode& r) {
    if (std::holds_alternative<SnapshotProvided>(message)) r.provided = provided;
    FeedRank(r, std::visit([](const auto& m) { return session::Event(m); }, message));
  });
  if (options_.command_double_percent == 0 || !prng_.Chance(options_.command_double_percent, 100)) return;
  if (!std::holds_alternative<FenceRank>(send.message) && !std::holds_alternative<AssignRank>(send.message) &&
      !std::holds_alternative<ResumeRank>(send.message) && !std::holds_alternative<PrepareSwitch>(send.message)) {
    return;
  }
  OnRank(it->second, 0, Between(Microseconds(20), Seconds(1)), [this, message = send.message](RankNode& r) {
    FeedRank(r, std::visit([](const auto& m) { return session::Event(m); }, message));
  });
}

void World::PerformAgent(AgentNode& agent, AgentEffects effects, size_t first) {
  const uint64_t life = agent.life;
  const ServerId id = agent.id;
  for (size_t i = first; i < effects.size(); ++i) {
    AgentEffect& effect = effects[i];
    if (!agent.alive || agent.life != life) return;
    // Faults that strike between two effects.
    if (agent.crash_in && --*agent.crash_in <= 0) {
      KillServer(id.value);
      return;
    }
    if (agent.stop_in && --*agent.stop_in <= 0) {
      agent.stop_in.reset();
      StopServer(id.value);
    }
    if (agent.stopped) {
      agent.deferred.push_back([this, id, effects = std::move(effects), i] { PerformAgent(agents_.at(id), effects, i); });
      return;
    }
    if (auto* hello = std::get_if<SayHello>(&effect)) {
      SayHelloFrom(agent, *hello);
    } else if (auto* fact = std::get_if<SendFact>(&effect)) {
      if (!agent.session) continue;
      const SessionId session = *agent.session;
      ToController(agent, session, [this, id, session, f = *fact] {
        Trace(fmt::format("{} > {} {}", id.value, f.sequence.value, Describe(f.fact)));
        FeedController(FactReceived{session, f.sequence, f.fact});
      });
    } else if (auto* close = std::get_if<CloseControllerLink>(&effect)) {
      const bool reopen = close->reopen;
      BreakStream(agent, false);
      if (reopen) LinkUp(agent, Milliseconds(20));
    } else if (std::get_if<OpenControllerLink>(&effect)) {
      if (!agent.session) LinkUp(agent, Milliseconds(1));
    } else if (auto* beats = std::get_if<StartHeartbeats>(&effect)) {
      const bool running = agent.beating.has_value();
      agent.beating = beats->welcome;
      if (!running) {
        After(Between(Duration(0), agent.beating->heartbeat_interval), [this, node = &agent, life] { Beat(*node, life); });
      }
    } else if (std::get_if<StopHeartbeats>(&effect)) {
      agent.beating.reset();
    } else if (auto* send = std::get_if<SendToRank>(&effect)) {
      SendToRankFrom(agent, *send);
    } else if (auto* connection = std::get_if<CloseConnection>(&effect)) {
      agent.connections.erase(connection->connection.value);
    } else if (auto* start = std::get_if<StartProcess>(&effect)) {
      StartRank(agent, *start);
    } else if (auto* signal = std::get_if<SignalProcess>(&effect)) {
      const ProcessId process = signal->process;
      const int number = signal->signal;
      After(Between(Microseconds(50), options_.reap_max), [this, process, number] {
        RankNode* rank = Find(process);
        if (rank != nullptr && !rank->unkillable) EndProcess(*rank, number, 0);
      });
    } else if (auto* staged = std::get_if<KeepStaged>(&effect)) {
      StageOf(agent, *staged);
    } else if (auto* copy = std::get_if<CopyForKeeping>(&effect)) {
      PerformCustody(agent, agent.custody->Copy(copy->command));
    } else if (auto* load = std::get_if<LoadSnapshot>(&effect)) {
      LoadOn(agent, *load);
    } else if (auto* drop = std::get_if<DropKept>(&effect)) {
      PerformCustody(agent, agent.custody->Drop(drop->command));
    } else if (auto* raise = std::get_if<RaiseProtected>(&effect)) {
      PerformCustody(agent, agent.custody->ProtectedRaised(raise->job, raise->step));
    } else if (auto* assigned = std::get_if<NoteAssigned>(&effect)) {
      PerformCustody(agent, agent.custody->Assigned(assigned->job, assigned->generation, assigned->start));
    } else if (auto* gone = std::get_if<NoteProcessGone>(&effect)) {
      PerformCustody(agent, agent.custody->ProcessGone(gone->job, gone->process));
    } else if (auto* release = std::get_if<ReleaseSnapshots>(&effect)) {
      PerformCustody(agent, agent.custody->Release(release->job, true));
    } else if (auto* token = std::get_if<DropDescriptor>(&effect)) {
      agent.descriptors.erase(token->descriptor.value);
    } else if (std::get_if<ExitAgent>(&effect)) {
      KillServer(id.value);
      return;
    } else if (auto* notice = std::get_if<AgentNotice>(&effect)) {
      marks_.insert(notice->message);
      Trace(fmt::format("{} notes {} ({})", id.value, notice->message, ReasonName(notice->reason)));
    }
  }
}

}  // namespace everstep::sim
