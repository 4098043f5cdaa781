// Rank processes: a training program over the real SessionCore, with its staging slots as the library keeps them.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/describe.h"
#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

void World::Moment(const char* what, const RankNode& rank) {
  if (on_moment) on_moment(what, rank);
}

// ---- processes

void World::StartRank(AgentNode& agent, const StartProcess& start) {
  const SpawnProcess& spawn = start.spawn;
  const ServerId server = agent.id;
  const uint64_t life = agent.life;
  const ProcessId id = spawn.process;
  if (agent.broken_devices.contains(spawn.device)) {
    After(Microseconds(500), [this, server, life, id] {
      OnServer(agents_.at(server), life, [this, server, id] {
        FeedAgent(agents_.at(server), SpawnFailed{id, Reason::kNoCapacity, "the device is broken"});
      });
    });
    return;
  }
  Tell([&](Checker& c) { c.OnProcessStarting(agent, spawn); });
  if (ranks_.contains(id)) return;  // the checker has said so
  RankNode& rank = ranks_[id];
  rank.id = id;
  rank.job = spawn.job;
  rank.server = agent.id;
  rank.device = spawn.device;
  rank.pid = next_pid_++;
  rank.opaque = spawn.spec.opaque;
  session::SessionPolicy policy;
  policy.process = spawn.process;
  rank.core = std::make_unique<session::SessionCore>(policy);
  agent.processes.insert(id);
  Trace(fmt::format("{} starts {} on device {}", server.value, Short(id), spawn.device.value));
  After(Microseconds(500), [this, server, life, id] {
    OnServer(agents_.at(server), life, [this, server, id] {
      FeedAgent(agents_.at(server), ProcessSpawned{id, ranks_.at(id).pid});
    });
  });
  if (rank.opaque) {
    rank.rank = spawn.rank.value;
    rank.mesh_generation = spawn.generation;
    RunOpaque(rank);
    return;
  }
  OnRank(id, 0, Between(options_.start_min, options_.start_max), [this, server, life](RankNode& r) {
    AgentNode& node = agents_.at(server);
    if (!node.alive || node.life != life) return;
    r.connection = Connection(node.next_connection++);
    node.connections[r.connection.value] = r.id;
    const ProcessId pid = r.id;
    OnServer(node, life, [this, server, pid] {
      AgentNode& target = agents_.at(server);
      const RankNode& rr = ranks_.at(pid);
      FeedAgent(target, RankSocketOpened{rr.connection, rr.pid, rr.pid});
      RankHello hello;
      hello.process = pid;
      hello.pid = rr.pid;
      hello.mesh_address = fmt::format("{}:{}", server.value, rr.pid);
      FeedAgent(target, RankMessageArrived{rr.connection, hello});
    });
    Rejoin(r);
  });
}

// An unchanged script: it never joins; it steps alone, from its own checkpoint, and ends with code 0.
void World::RunOpaque(RankNode& rank) {
  const auto wanted = steps_wanted_.find(rank.job);
  const int64_t steps = wanted == steps_wanted_.end() ? 0 : wanted->second;
  OnRank(rank.id, 0, options_.start_max + options_.compute_max * std::max<int64_t>(1, steps), [this](RankNode& r) {
    EndProcess(r, 0, 0);
  });
}

void World::EndProcess(RankNode& rank, int signal, int exit_code) {
  if (!rank.alive) return;
  Trace(fmt::format("{} (rank {} on {}) ends: signal {} code {}", Short(rank.id), rank.rank, rank.server.value, signal,
                    exit_code));
  rank.alive = false;
  LeaveMesh(rank, true);
  const ServerId server = rank.server;
  const uint64_t life = agents_.at(server).life;
  const ProcessId id = rank.id;
  After(Between(Microseconds(200), options_.reap_max), [this, server, life, id, signal, exit_code] {
    OnServer(agents_.at(server), life, [this, server, id, signal, exit_code] {
      AgentNode& node = agents_.at(server);
      RankNode& r = ranks_.at(id);
      r.reaped = true;
      node.processes.erase(id);
      if (node.connections.erase(r.connection.value) > 0) FeedAgent(node, RankSocketClosed{r.connection});
      if (!node.alive) return;
      ProcessExitedObserved exited;
      exited.process = id;
      exited.signal = signal;
      exited.exit_code = exit_code;
      exited.progress = r.core->progress();
      exited.noticed = node.clock.Local(now_);
      FeedAgent(node, exited);
    });
  });
}

void World::OnRank(ProcessId id, uint64_t op, Duration delay, std::function<void(RankNode&)> run) {
  After(delay, [this, id, op, run = std::move(run)] {
    RankNode& rank = ranks_.at(id);
    if (!rank.alive || (op != 0 && rank.op != op)) return;
    if (rank.stopped) {
      rank.deferred.push_back([this, id, op, run] { OnRank(id, op, Duration(0), run); });
      return;
    }
    run(rank);
  });
}

uint64_t World::Wait(RankNode& rank, RankNode::Doing doing) {
  rank.doing = doing;
  return ++rank.op;
}

// ---- core

void World::FeedRank(RankNode& rank, const session::Event& event) {
  if (!rank.alive) return;
  std::vector<session::Effect> effects;
  const Clock& clock = agents_.at(rank.server).clock;
  rank.core->Step(event, clock.Local(now_), effects);
  Tell([&](Checker& c) { c.OnRankStepped(rank, event, effects); });
  for (const session::Effect& effect : effects) {
    if (!rank.alive) return;
    PerformRank(rank, effect);
  }
  const Instant deadline = rank.core->NextDeadline();
  if (deadline == kNever) return;
  OnRank(rank.id, 0, std::max(Duration(0), clock.World(deadline) - now_), [this](RankNode& r) {
    if (r.core->NextDeadline() <= agents_.at(r.server).clock.Local(now_)) FeedRank(r, session::DeadlinePassed{});
  });
}

void World::CallRank(RankNode& rank, RankNode::Call call, const session::Event& event) {
  rank.call = call;
  FeedRank(rank, event);
}

void World::Rejoin(RankNode& rank) { CallRank(rank, RankNode::Call::kJoin, session::JoinCalled{}); }

void World::TellAgent(RankNode& rank, const RankToAgent& message) {
  const ServerId server = rank.server;
  const uint64_t life = agents_.at(server).life;
  if (const auto* answer = std::get_if<CollectAnswer>(&message)) {
    rank.answered = {answer->generation, !rank.torn, rank.memory, rank.gradients};
    Tell([&](Checker& c) { c.OnCollectAnswered(rank, *answer); });
  }
  After(Microseconds(15), [this, server, life, id = rank.id, message] {
    OnServer(agents_.at(server), life, [this, server, id, message] {
      AgentNode& node = agents_.at(server);
      const Connection connection = ranks_.at(id).connection;
      if (node.connections.contains(connection.value)) FeedAgent(node, RankMessageArrived{connection, message});
    });
  });
}

void World::PerformRank(RankNode& rank, const session::Effect& effect) {
  const ProcessId id = rank.id;
  if (const auto* send = std::get_if<session::SendToAgent>(&effect)) {
    TellAgent(rank, send->message);
  } else if (const auto* answer = std::get_if<session::CallAnswered>(&effect)) {
    OnRank(id, 0, Microseconds(2), [this, a = *answer](RankNode& r) { Answered(r, a); });
  } else if (const auto* abort = std::get_if<session::AbortMesh>(&effect)) {
    Abort(rank, abort->generation);
  } else if (const auto* connect = std::get_if<session::ConnectMesh>(&effect)) {
    Connect(rank, *connect);
  } else if (const auto* keep = std::get_if<session::KeepSnapshots>(&effect)) {
    KeepSlots(rank, *keep);
  } else if (const auto* roll = std::get_if<session::RollForward>(&effect)) {
    rank.torn = true;
    Tell([&](Checker& c) { c.OnApplying(rank); });
    OnRank(id, 0, Between(Microseconds(100), options_.reduce_max), [this, g = roll->generation](RankNode& r) {
      if (r.gradients) r.memory.push_back(*r.gradients);
      r.gradients.reset();
      r.torn = false;
      r.drawn = static_cast<int64_t>(r.memory.size());
      FeedRank(r, session::RolledForward{g});
    });
  } else if (const auto* initialize = std::get_if<session::InitializeState>(&effect)) {
    rank.torn = true;
    OnRank(id, 0, Between(Microseconds(100), Milliseconds(1)), [this, g = initialize->generation](RankNode& r) {
      r.memory.clear();
      r.gradients.reset();
      r.torn = false;
      r.drawn = 0;
      FeedRank(r, session::RestoreDone{g, 0});
    });
  } else if (const auto* receive = std::get_if<session::ReceiveState>(&effect)) {
    rank.torn = true;
    rank.receiving = *receive;
    const uint64_t op = Wait(rank, RankNode::Doing::kReceiving);
    const Mesh* mesh = FindMesh(rank);
    if (mesh == nullptr || mesh->members.at(rank.rank).left) {
      OnRank(id, op, Microseconds(10), [this](RankNode& r) { FailWait(r, -1); });
      return;
    }
    Moment("receiving", rank);
    TryTransfers(rank.mesh_key);
  } else if (const auto* serve = std::get_if<session::ServeState>(&effect)) {
    rank.serving = *serve;
    rank.served.clear();
    Wait(rank, RankNode::Doing::kServing);
    Moment("serving", rank);
    TryTransfers(rank.mesh_key);
  } else if (const auto* copy = std::get_if<session::CopySnapshot>(&effect)) {
    rank.torn = true;
    OnRank(id, 0, Between(Microseconds(100), Milliseconds(3)), [this, g = copy->snapshot.generation](RankNode& r) {
      r.memory = r.provided;
      r.gradients.reset();
      r.torn = false;
      r.drawn = static_cast<int64_t>(r.memory.size());
      FeedRank(r, session::RestoreDone{g, r.memory.size()});
    });
  } else if (std::get_if<session::ExchangeDigests>(&effect)) {
    Wait(rank, RankNode::Doing::kDigesting);
    if (Mesh* mesh = FindMesh(rank)) mesh->members[rank.rank].digest = true;
    CheckDigests(rank.mesh_key);
  } else if (const auto* exit = std::get_if<session::ExitProcess>(&effect)) {
    Trace(Short(id) + " gives up: " + exit->message);
    EndProcess(rank, 0, 75);
  }
}

// ---- the program

void World::Answered(RankNode& rank, const session::CallAnswered& answer) {
  const RankNode::Call call = std::exchange(rank.call, RankNode::Call::kNone);
  const bool ok = answer.status.ok();
  // A step that was begun and does not count: the library puts back what the program registered.
  auto discard = [&] {
    if (options_.mistake != ShellMistake::kForgetDiscard) rank.drawn = rank.drawn_saved;
    Rejoin(rank);
  };
  if (!ok && answer.status.code() == StatusCode::kInvalidArgument) {
    Violate("program", "a call of a correct program is refused as wrong: " + answer.status.message());
  }
  switch (call) {
    case RankNode::Call::kNone:
      Violate("program", "an answer that nobody waits for");
      return;
    case RankNode::Call::kJoin:
      if (!ok) return;  // the job ends
      Tell([&](Checker& c) { c.OnResumed(rank); });
      Moment("resumed", rank);
      return NextStep(rank);
    case RankNode::Call::kBegin:
      if (!ok) return Rejoin(rank);
      return Compute(rank);
    case RankNode::Call::kGradients:
      if (!ok) return discard();
      Moment("reduced", rank);
      if (rank.alive) CallRank(rank, RankNode::Call::kVoteStart, session::VoteStarted{Step(rank.call_step)});
      return;
    case RankNode::Call::kVoteStart:
      if (!ok) return discard();
      return EnterVote(rank, answer);
    case RankNode::Call::kVoteFailed:
      return discard();
    case RankNode::Call::kVotePassed:
      if (!ok || answer.outcome != session::CallOutcome::kApply) return discard();
      return ApplyStep(rank);
    case RankNode::Call::kApplied:
      TakeSnapshot(rank);
      if (answer.outcome == session::CallOutcome::kSwitch) return Rejoin(rank);
      return NextStep(rank);
    case RankNode::Call::kFinish: {
      if (!ok) return Rejoin(rank);
      // A job that finishes while nobody hears of it is continued from an earlier step, and finishes again.
      if (Generation& in = finished_in_[rank.job]; in < rank.mesh_generation) {
        in = rank.mesh_generation;
        final_contents_[rank.job] = rank.memory;
      }
      Tell([&](Checker& c) { c.OnFinished(rank); });
      OnRank(rank.id, 0, Milliseconds(1), [this](RankNode& r) { EndProcess(r, 0, 0); });
      return;
    }
  }
}

void World::Compute(RankNode& rank) {
  const uint64_t op = Wait(rank, RankNode::Doing::kNothing);
  rank.drawn_saved = rank.drawn;
  ++rank.drawn;
  Moment("computing", rank);
  if (!rank.alive) return;
  if (auto fails = program_fails.find(rank.job); fails != program_fails.end() && fails->second.first == rank.call_step &&
                                                 rank.rank == 0) {
    return EndProcess(rank, 0, fails->second.second);
  }
  const Duration lasts = Between(options_.compute_min, options_.compute_max) * agents_.at(rank.server).slowness;
  OnRank(rank.id, op, lasts, [this](RankNode& r) {
    Mesh* mesh = FindMesh(r);
    if (mesh == nullptr || mesh->members.at(r.rank).left) {
      // The collective is refused: the program joins again.
      r.drawn = r.drawn_saved;
      return Rejoin(r);
    }
    Wait(r, RankNode::Doing::kReducing);
    mesh->members[r.rank].reduced = r.call_step;
    Moment("reducing", r);
    if (r.alive) CheckMesh(*mesh);
  });
}

void World::ApplyStep(RankNode& rank) {
  rank.torn = true;
  const uint64_t op = Wait(rank, RankNode::Doing::kNothing);
  Tell([&](Checker& c) { c.OnApplying(rank); });
  Moment("applying", rank);
  OnRank(rank.id, op, Between(Microseconds(50), options_.apply_max), [this](RankNode& r) {
    r.memory.push_back(r.core->progress().generation.value);
    r.gradients.reset();
    r.torn = false;
    CallRank(r, RankNode::Call::kApplied, session::Applied{Step(r.call_step)});
    Moment("applied", r);
  });
}

// The library's writer: three slots, of which the two newest and whatever is at or above the watermark stay.
void World::TakeSnapshot(RankNode& rank) {
  const int64_t step = rank.call_step;
  if (options_.snapshot_every == 0 || step % options_.snapshot_every != 0) return;
  int chosen = -1, newest = -1, second = -1, oldest = -1;
  for (int i = 0; i < 3; ++i) {
    const RankNode::Slot& slot = rank.slots[static_cast<size_t>(i)];
    if (!slot.valid) {
      chosen = i;
      break;
    }
    const auto below = [&](int other) { return other < 0 || rank.slots[static_cast<size_t>(other)].state < slot.state; };
    if (below(newest)) {
      second = std::exchange(newest, i);
    } else if (below(second)) {
      second = i;
    }
    if (oldest < 0 || slot.state < rank.slots[static_cast<size_t>(oldest)].state) oldest = i;
  }
  if (chosen < 0 && oldest != newest && oldest != second &&
      rank.slots[static_cast<size_t>(oldest)].state.step < rank.protected_step) {
    chosen = oldest;
  }
  if (chosen < 0) {
    ++rank.snapshots_skipped;
    marks_.insert("snapshot skipped: no slot is free");
    return;
  }
  SnapshotStaged staged;
  staged.state = rank.core->progress().applied;
  staged.shard = ShardIndex(rank.shard);
  staged.slot = static_cast<uint32_t>(chosen);
  staged.bytes = 1 + rank.memory.size();
  rank.slots[static_cast<size_t>(chosen)] = {staged.state, true};
  agents_.at(rank.server).staging[{rank.id, staged.slot}] = rank.memory;
  FeedRank(rank, session::SnapshotTaken{staged});
}

void World::KeepSlots(RankNode& rank, const session::KeepSnapshots& keep) {
  rank.protected_step = keep.protected_step;
  if (!keep.discard) return;
  for (RankNode::Slot& slot : rank.slots) {
    const StateId above = keep.discard_above;
    if (slot.state.step > above.step || (slot.state.step == above.step && slot.state != above)) slot.valid = false;
  }
}

void World::NextStep(RankNode& rank) {
  const int64_t step = static_cast<int64_t>(rank.memory.size()) + 1;
  rank.call_step = step;
  rank.gradients.reset();
  if (step > steps_wanted_[rank.job]) {
    Mesh* mesh = FindMesh(rank);
    if (mesh == nullptr || mesh->members.at(rank.rank).left) return Rejoin(rank);
    Wait(rank, RankNode::Doing::kFinishing);
    mesh->members[rank.rank].finished = 1;
    return CheckMesh(*mesh);
  }
  CallRank(rank, RankNode::Call::kBegin, session::StepBegun{Step(step)});
}

}  // namespace everstep::sim
