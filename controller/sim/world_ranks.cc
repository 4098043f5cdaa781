// Rank programs of the world: a training loop over the real SessionCore, and the meshes in which their steps meet.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

namespace {

Digest128 DigestOf(const Content& content) {
  Digest128 digest{content.size() + 1, 1469598103934665603u};
  for (uint64_t g : content) {
    digest[1] ^= g;
    digest[1] *= 1099511628211u;
  }
  return digest;
}

std::string Text(const Content& content) { return fmt::format("[{}]", fmt::join(content, " ")); }

}  // namespace

RankNode* World::Find(ProcessId id) {
  auto it = ranks_.find(id);
  return it == ranks_.end() ? nullptr : &it->second;
}

std::vector<RankNode*> World::Ranks(const JobUid& job) {
  std::vector<RankNode*> ranks;
  for (auto& [id, rank] : ranks_) {
    if (rank.job == job) ranks.push_back(&rank);
  }
  return ranks;
}

RankNode* World::Member(const JobUid& job, int32_t number) {
  RankNode* found = nullptr;
  for (RankNode* rank : Ranks(job)) {
    if (rank->alive && rank->rank == number && (!found || found->mesh_generation < rank->mesh_generation)) found = rank;
  }
  return found;
}

void World::KillRank(const JobUid& job, int32_t number) {
  if (RankNode* rank = Member(job, number)) KillProcess(*rank, 9, 0);
}

void World::Moment(const std::string& what, const RankNode& rank) {
  if (on_moment) on_moment(what, &rank);
}

// ---- processes

void World::StartRank(AgentNode& agent, const StartProcess& start) {
  const SpawnProcess& spawn = start.spawn;
  for (const auto& [id, other] : ranks_) {
    if (other.alive && other.server == agent.id && other.device == spawn.device) {
      Violate(fmt::format("device {} of {} is used again before its process is reaped", spawn.device.value, agent.id.value));
    }
  }
  if (ranks_.contains(spawn.process)) Violate("a process was started twice");
  RankNode& rank = ranks_[spawn.process];
  rank.id = spawn.process;
  rank.job = spawn.job;
  rank.server = agent.id;
  rank.device = spawn.device;
  rank.pid = next_pid_++;
  session::SessionPolicy policy;
  policy.process = spawn.process;
  rank.core = std::make_unique<session::SessionCore>(policy);
  const ServerId server = agent.id;
  const uint64_t life = agent.life;
  const ProcessId id = rank.id;
  Trace(fmt::format("{} starts process {}", server.value, id.value & 0xffffffffff));
  After(Microseconds(500), [this, server, life, id] {
    OnServer(agents_.at(server), life, [this, server, id] {
      FeedAgent(agents_.at(server), ProcessSpawned{id, ranks_.at(id).pid});
    });
  });
  if (spawn.spec.opaque) return;
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
    CallRank(r, RankNode::Call::kJoin, session::JoinCalled{});
  });
}

void World::KillProcess(RankNode& rank, int signal, int exit_code) {
  if (!rank.alive) return;
  Trace(fmt::format("process {} (rank {} on {}) ends: signal {} code {}", rank.id.value & 0xffffffffff, rank.rank,
                    rank.server.value, signal, exit_code));
  rank.alive = false;
  LeaveMesh(rank, true);
  const ServerId server = rank.server;
  const uint64_t life = agents_.at(server).life;
  const ProcessId id = rank.id;
  After(Between(Microseconds(200), Milliseconds(12)), [this, server, life, id, signal, exit_code] {
    OnServer(agents_.at(server), life, [this, server, id, signal, exit_code] {
      AgentNode& node = agents_.at(server);
      const RankNode& r = ranks_.at(id);
      if (node.connections.erase(r.connection.value) > 0) FeedAgent(node, RankSocketClosed{r.connection});
      ProcessExitedObserved exited;
      exited.process = id;
      exited.signal = signal;
      exited.exit_code = exit_code;
      exited.progress = r.core->progress();
      exited.noticed = now_;
      FeedAgent(agents_.at(server), exited);
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
  rank.core->Step(event, now_, effects);
  for (const session::Effect& effect : effects) {
    if (!rank.alive) return;
    PerformRank(rank, effect);
  }
  const Instant deadline = rank.core->NextDeadline();
  if (deadline != kNever) {
    OnRank(rank.id, 0, deadline - now_, [this](RankNode& r) {
      if (r.core->NextDeadline() <= now_) FeedRank(r, session::DeadlinePassed{});
    });
  }
}

void World::CallRank(RankNode& rank, RankNode::Call call, const session::Event& event) {
  rank.call = call;
  FeedRank(rank, event);
}

void World::PerformRank(RankNode& rank, const session::Effect& effect) {
  const ProcessId id = rank.id;
  if (const auto* send = std::get_if<session::SendToAgent>(&effect)) {
    const ServerId server = rank.server;
    const uint64_t life = agents_.at(server).life;
    if (const auto* answer = std::get_if<CollectAnswer>(&send->message)) {
      // Truth against what is said.
      const RankReport& report = answer->report;
      if (rank.torn && report.memory_valid) Violate("torn memory is reported valid");
      if (report.memory_valid && (report.applied.step.value != static_cast<int64_t>(rank.memory.size()) ||
                                  (!rank.memory.empty() && report.applied.generation.value != rank.memory.back()))) {
        Violate(fmt::format("rank {} reports step {} and holds {}", rank.rank, report.applied.step.value, Text(rank.memory)));
      }
      if (report.gradients.value != 0 && rank.gradients != report.gradients.value) {
        Violate("gradients are reported that are not held");
      }
      Trace(fmt::format("process {} answers Collect({}) valid {} step {} gradients {} planned {}", id.value & 0xffffffffff,
                        answer->generation.value, report.memory_valid, report.applied.step.value,
                        report.gradients.value, answer->planned));
    }
    After(Microseconds(15), [this, server, life, id, message = send->message] {
      OnServer(agents_.at(server), life, [this, server, id, message] {
        AgentNode& node = agents_.at(server);
        const Connection connection = ranks_.at(id).connection;
        if (node.connections.contains(connection.value)) FeedAgent(node, RankMessageArrived{connection, message});
      });
    });
  } else if (const auto* answer = std::get_if<session::CallAnswered>(&effect)) {
    OnRank(id, 0, Microseconds(2), [this, a = *answer](RankNode& r) { Answered(r, a); });
  } else if (const auto* abort = std::get_if<session::AbortMesh>(&effect)) {
    Abort(rank, abort->generation);
  } else if (const auto* connect = std::get_if<session::ConnectMesh>(&effect)) {
    Connect(rank, *connect);
  } else if (const auto* roll = std::get_if<session::RollForward>(&effect)) {
    rank.torn = true;
    if (!rank.gradients) Violate("rolls forward without gradients");
    OnRank(id, 0, Between(Microseconds(100), Milliseconds(2)), [this, g = roll->generation](RankNode& r) {
      if (r.gradients) r.memory.push_back(*r.gradients);
      r.gradients.reset();
      r.torn = false;
      FeedRank(r, session::RolledForward{g});
    });
  } else if (const auto* initialize = std::get_if<session::InitializeState>(&effect)) {
    rank.torn = true;
    OnRank(id, 0, Between(Microseconds(100), Milliseconds(1)), [this, g = initialize->generation](RankNode& r) {
      r.memory.clear();
      r.gradients.reset();
      r.torn = false;
      FeedRank(r, session::RestoreDone{g, 0});
    });
  } else if (const auto* receive = std::get_if<session::ReceiveState>(&effect)) {
    rank.torn = true;
    rank.receiving = *receive;
    Wait(rank, RankNode::Doing::kReceiving);
    if (MeshOf(rank) == nullptr || MeshOf(rank)->members[rank.rank].left) return FailWait(rank, -1);
    TryTransfers(rank.mesh_key);
  } else if (const auto* serve = std::get_if<session::ServeState>(&effect)) {
    rank.serving = *serve;
    rank.served.clear();
    Wait(rank, RankNode::Doing::kServing);
    TryTransfers(rank.mesh_key);
  } else if (const auto* copy = std::get_if<session::CopySnapshot>(&effect)) {
    rank.torn = true;
    OnRank(id, 0, Between(Microseconds(100), Milliseconds(3)), [this, g = copy->snapshot.generation](RankNode& r) {
      r.memory = r.provided;
      r.gradients.reset();
      r.torn = false;
      FeedRank(r, session::RestoreDone{g, r.memory.size()});
    });
  } else if (std::get_if<session::ExchangeDigests>(&effect)) {
    Wait(rank, RankNode::Doing::kDigesting);
    if (Mesh* mesh = MeshOf(rank)) mesh->members[rank.rank].digest = true;
    CheckDigests(rank.mesh_key);
  } else if (const auto* exit = std::get_if<session::ExitProcess>(&effect)) {
    Trace("exit: " + exit->message);
    KillProcess(rank, 0, 75);
  }
}

void World::Answered(RankNode& rank, const session::CallAnswered& answer) {
  const RankNode::Call call = std::exchange(rank.call, RankNode::Call::kNone);
  const bool ok = answer.status.ok();
  auto rejoin = [&] { CallRank(rank, RankNode::Call::kJoin, session::JoinCalled{}); };
  if (!ok && answer.status.code() == StatusCode::kInvalidArgument) Violate("program error: " + answer.status.message());
  switch (call) {
    case RankNode::Call::kNone:
      Violate("an answer that nobody waits for");
      return;
    case RankNode::Call::kJoin: {
      if (!ok) return;  // the job ends
      const Generation generation = rank.core->progress().generation;
      const int64_t step = rank.core->progress().applied.step.value;
      // What resumes must be the chain's state, whole, on every rank.
      if (rank.torn || static_cast<int64_t>(rank.memory.size()) != step || rank.memory != Expected(rank.job, step)) {
        Violate(fmt::format("rank {} resumes in generation {} with {} where the chain has {}", rank.rank, generation.value,
                            Text(rank.memory), Text(Expected(rank.job, step))));
      }
      for (const RankNode* other : Ranks(rank.job)) {
        if (other != &rank && other->alive && other->rank == rank.rank && other->mesh_generation == generation &&
            !other->core->left()) {
          Violate(fmt::format("two live processes act for rank {} in generation {}", rank.rank, generation.value));
        }
      }
      Moment("resumed", rank);
      return NextStep(rank);
    }
    case RankNode::Call::kBegin:
      if (!ok) return rejoin();
      {
        const uint64_t op = Wait(rank, RankNode::Doing::kNothing);
        Moment("computing", rank);
        OnRank(rank.id, op, Between(options_.compute_min, options_.compute_max), [this](RankNode& r) {
          Mesh* mesh = MeshOf(r);
          if (mesh == nullptr || mesh->members[r.rank].left) {
            // The collective is refused: the program joins again.
            return CallRank(r, RankNode::Call::kJoin, session::JoinCalled{});
          }
          Wait(r, RankNode::Doing::kReducing);
          mesh->members[r.rank].reduced = r.call_step;
          Moment("reducing", r);
          CheckReductions(*mesh);
        });
      }
      return;
    case RankNode::Call::kGradients:
      if (!ok) return rejoin();
      Moment("reduced", rank);
      if (!rank.alive) return;
      return CallRank(rank, RankNode::Call::kVoteStart, session::VoteStarted{Step(rank.call_step)});
    case RankNode::Call::kVoteStart:
      if (!ok) return rejoin();
      return EnterVote(rank, answer);
    case RankNode::Call::kVoteFailed:
      return rejoin();
    case RankNode::Call::kVotePassed: {
      if (!ok || answer.outcome != session::CallOutcome::kApply) return rejoin();
      rank.torn = true;
      const uint64_t op = Wait(rank, RankNode::Doing::kNothing);
      Moment("applying", rank);
      OnRank(rank.id, op, Between(Microseconds(50), Milliseconds(1)), [this](RankNode& r) {
        const uint64_t generation = r.core->progress().generation.value;
        if (r.gradients != generation) Violate("applies gradients that are not complete");
        r.memory.push_back(generation);
        r.gradients.reset();
        r.torn = false;
        r.applied_log.emplace_back(r.call_step, generation);
        CallRank(r, RankNode::Call::kApplied, session::Applied{Step(r.call_step)});
        Moment("applied", r);
      });
      return;
    }
    case RankNode::Call::kApplied: {
      const int64_t step = rank.call_step;
      if (options_.snapshot_every > 0 && step % options_.snapshot_every == 0) {
        SnapshotStaged staged;
        staged.state = rank.core->progress().applied;
        staged.shard = ShardIndex(rank.core->has_assignment() && rank.rank >= 0
                                      ? rank.rank % std::max(1, rank.core->assignment().pp_size) : 0);
        staged.slot = static_cast<uint32_t>(step % 3);
        staged.bytes = 1 + rank.memory.size();
        if (rank.core->has_assignment()) FeedRank(rank, session::SnapshotTaken{staged});
      }
      if (answer.outcome == session::CallOutcome::kSwitch) return rejoin();
      return NextStep(rank);
    }
    case RankNode::Call::kFinish: {
      if (!ok) return rejoin();
      auto [it, inserted] = final_contents_.emplace(rank.job, rank.memory);
      if (!inserted && it->second != rank.memory) Violate("ranks finish with different states");
      if (rank.memory != Expected(rank.job, static_cast<int64_t>(rank.memory.size()))) {
        Violate("a rank finishes off the chain");
      }
      const ProcessId id = rank.id;
      OnRank(id, 0, Milliseconds(1), [this](RankNode& r) { KillProcess(r, 0, 0); });
      return;
    }
  }
}

void World::NextStep(RankNode& rank) {
  const int64_t step = static_cast<int64_t>(rank.memory.size()) + 1;
  rank.call_step = step;
  rank.gradients.reset();
  if (step > steps_wanted[rank.job]) {
    Mesh* mesh = MeshOf(rank);
    if (mesh == nullptr || mesh->members[rank.rank].left) {
      return CallRank(rank, RankNode::Call::kJoin, session::JoinCalled{});
    }
    Wait(rank, RankNode::Doing::kFinishing);
    mesh->members[rank.rank].finished = 1;
    return CheckReductions(*mesh);
  }
  CallRank(rank, RankNode::Call::kBegin, session::StepBegun{Step(step)});
}

// ---- meshes

Mesh* World::MeshOf(const RankNode& rank) {
  auto it = meshes_.find(rank.mesh_key);
  return it == meshes_.end() ? nullptr : &it->second;
}

void World::Connect(RankNode& rank, const session::ConnectMesh& work) {
  const Assignment& a = work.assignment;
  // The first message on each connection carries job, generation and token: others never meet.
  rank.mesh_key = fmt::format("{}/{}/{:02x}", a.job.value, a.generation.value, fmt::join(a.token, ""));
  rank.mesh_generation = a.generation;
  rank.rank = work.rank.value;
  Mesh& mesh = meshes_[rank.mesh_key];
  mesh.generation = a.generation;
  mesh.size = a.ranks.size();
  Mesh::Member& member = mesh.members[rank.rank];
  if (member.arrived && member.process != rank.id.value) Violate("two processes connect as one rank of a generation");
  member.process = rank.id.value;
  member.arrived = true;
  const uint64_t op = Wait(rank, RankNode::Doing::kConnecting);
  Moment("connecting", rank);
  if (!rank.alive) return;
  size_t arrived = 0;
  bool broken = false;
  for (const auto& [number, m] : mesh.members) {
    arrived += m.arrived ? 1 : 0;
    broken |= m.left;
  }
  if (broken) {
    OnRank(rank.id, op, Between(Milliseconds(1), Milliseconds(5)), [this](RankNode& r) { FailWait(r, -1); });
  } else if (arrived == mesh.size) {
    for (const auto& [number, m] : mesh.members) {
      RankNode& other = ranks_.at(ProcessId(m.process));
      OnRank(other.id, other.op, Between(Microseconds(200), Milliseconds(4)), [this](RankNode& r) {
        if (r.doing != RankNode::Doing::kConnecting) return;
        r.doing = RankNode::Doing::kNothing;
        Moment("connected", r);
        if (r.alive) FeedRank(r, session::MeshConnected{r.mesh_generation});
      });
    }
  } else {
    OnRank(rank.id, op, Seconds(5), [this](RankNode& r) { FailWait(r, -1); });  // the connect deadline
  }
}

void World::CheckReductions(Mesh& mesh) {
  int64_t reduced = INT64_MAX, voted = INT64_MAX;
  bool all_finished = true;
  uint64_t pending = 0;
  if (mesh.members.size() < mesh.size) return;
  for (const auto& [number, m] : mesh.members) {
    if (m.left) return;
    reduced = std::min(reduced, m.reduced);
    voted = std::min(voted, m.voted);
    pending = std::max(pending, m.pending);
    all_finished &= m.finished != 0;
  }
  for (auto& [number, m] : mesh.members) {
    RankNode& rank = ranks_.at(ProcessId(m.process));
    if (rank.doing == RankNode::Doing::kReducing && rank.call_step <= reduced) {
      OnRank(rank.id, rank.op, Between(Microseconds(50), Milliseconds(2)), [this](RankNode& r) {
        if (r.doing != RankNode::Doing::kReducing) return;
        Wait(r, RankNode::Doing::kNothing);
        r.gradients = r.mesh_generation.value;
        CallRank(r, RankNode::Call::kGradients, session::GradientsCompleted{Step(r.call_step)});
      });
    } else if (rank.doing == RankNode::Doing::kVoting && rank.call_step <= voted && m.decided < rank.call_step) {
      m.decided = rank.call_step;
      const uint64_t generation = mesh.generation.value;
      auto chain = durable_lineage_.find(rank.job);
      if (chain == durable_lineage_.end() || chain->second.newest() < mesh.generation) {
        Violate("a vote passed in a generation whose recovery point is not durable");
      }
      OnRank(rank.id, rank.op, Between(Microseconds(50), Milliseconds(2)), [this, generation, pending](RankNode& r) {
        if (r.doing != RankNode::Doing::kVoting) return;
        Wait(r, RankNode::Doing::kNothing);
        session::VotePassed passed;
        passed.step = Step(r.call_step);
        passed.generation = Generation(generation);
        passed.pending_generation_max = Generation(pending);
        CallRank(r, RankNode::Call::kVotePassed, passed);
      });
    } else if (rank.doing == RankNode::Doing::kFinishing && all_finished) {
      OnRank(rank.id, rank.op, Between(Microseconds(50), Milliseconds(1)), [this](RankNode& r) {
        if (r.doing != RankNode::Doing::kFinishing) return;
        Wait(r, RankNode::Doing::kNothing);
        CallRank(r, RankNode::Call::kFinish, session::FinishCalled{});
      });
    }
  }
}

void World::EnterVote(RankNode& rank, const session::CallAnswered& ballot) {
  Mesh* mesh = MeshOf(rank);
  if (mesh == nullptr || mesh->members[rank.rank].left || rank.core->left()) {
    // The flag is read again under the abort mutex before the ballot goes out.
    return CallRank(rank, RankNode::Call::kVoteFailed,
                    session::VoteFailed{Step(rank.call_step), Rank(-1), Aborted("aborted")});
  }
  if (rank.core->promised() > mesh->generation) Violate("a vote after its rank answered a higher Collect");
  if (rank.gradients != mesh->generation.value) Violate("a vote without complete gradients");
  Wait(rank, RankNode::Doing::kVoting);
  Mesh::Member& member = mesh->members[rank.rank];
  member.voted = rank.call_step;
  member.pending = ballot.pending_generation.value;
  Moment("voting", rank);
  if (rank.alive) CheckReductions(*mesh);
}

void World::Abort(RankNode& rank, Generation generation) {
  if (rank.mesh_generation == generation) {
    LeaveMesh(rank, false);
    // Whatever blocks in the mesh returns with an error first; then the abort is confirmed.
    if (rank.doing != RankNode::Doing::kNothing) {
      OnRank(rank.id, rank.op, Between(Microseconds(20), Milliseconds(1)), [this](RankNode& r) { FailWait(r, -2); });
    }
  }
  OnRank(rank.id, 0, Between(Milliseconds(1), Milliseconds(3)), [this, generation](RankNode& r) {
    FeedRank(r, session::AbortConfirmed{generation});
  });
}

void World::LeaveMesh(RankNode& rank, bool died) {
  Mesh* mesh = MeshOf(rank);
  if (mesh == nullptr) return;
  auto it = mesh->members.find(rank.rank);
  if (it == mesh->members.end() || it->second.process != rank.id.value || it->second.left) return;
  it->second.left = true;
  const int32_t suspect = rank.rank;
  for (const auto& [number, m] : mesh->members) {
    if (m.left) continue;
    RankNode& other = ranks_.at(ProcessId(m.process));
    if (other.doing == RankNode::Doing::kNothing) continue;
    OnRank(other.id, other.op, died ? Between(Milliseconds(1), Milliseconds(15)) : Between(Microseconds(50), Milliseconds(3)),
           [this, suspect](RankNode& r) { FailWait(r, suspect); });
  }
}

// What the rank waits for in the mesh ends with an error. suspect -2: its own abort.
void World::FailWait(RankNode& rank, int32_t suspect) {
  const RankNode::Doing doing = std::exchange(rank.doing, RankNode::Doing::kNothing);
  ++rank.op;
  const Status status = suspect == -2 ? Aborted("aborted") : Unavailable("the connection failed");
  const Rank who(std::max(-1, suspect));
  const Generation generation = rank.mesh_generation;
  switch (doing) {
    case RankNode::Doing::kNothing: return;
    case RankNode::Doing::kReducing:
    case RankNode::Doing::kFinishing:
      if (suspect != -2) FeedRank(rank, session::CollectiveFailed{generation, who, status});
      return CallRank(rank, RankNode::Call::kJoin, session::JoinCalled{});
    case RankNode::Doing::kVoting:
      return CallRank(rank, RankNode::Call::kVoteFailed, session::VoteFailed{Step(rank.call_step), who, status});
    case RankNode::Doing::kReceiving:
      rank.receiving.reset();
      break;
    case RankNode::Doing::kServing:
      rank.serving.reset();
      break;
    case RankNode::Doing::kConnecting:
    case RankNode::Doing::kDigesting: break;
  }
  FeedRank(rank, session::WorkFailed{generation, who, status});
}

void World::TryTransfers(const std::string& key) {
  auto it = meshes_.find(key);
  if (it == meshes_.end()) return;
  for (const auto& [number, m] : it->second.members) {
    RankNode& source = ranks_.at(ProcessId(m.process));
    if (!source.alive || source.mesh_key != key || source.doing != RankNode::Doing::kServing || m.left) continue;
    for (Rank receiver : source.serving->chain) {
      auto member = it->second.members.find(receiver.value);
      if (member == it->second.members.end() || source.served.contains(receiver.value)) continue;
      RankNode& target = ranks_.at(ProcessId(member->second.process));
      if (!target.alive || target.mesh_key != key || target.doing != RankNode::Doing::kReceiving) continue;
      source.served.insert(receiver.value);
      const ProcessId source_id = source.id;
      const uint64_t source_op = source.op;
      const Content pinned = source.memory;
      const bool last = source.served.size() == source.serving->chain.size();
      OnRank(target.id, target.op, Between(Microseconds(500), Milliseconds(8)),
             [this, source_id, source_op, pinned, last](RankNode& r) {
               RankNode& from = ranks_.at(source_id);
               if (!from.alive || from.op != source_op) return FailWait(r, from.rank);
               if (from.memory != pinned || from.torn) Violate("bytes are served after their source's state changed");
               r.memory = pinned;
               r.gradients.reset();
               r.torn = false;
               r.receiving.reset();
               Wait(r, RankNode::Doing::kNothing);
               Moment("received", r);
               if (!r.alive) return;
               FeedRank(r, session::RestoreDone{r.mesh_generation, 8 * pinned.size()});
               (void)last;
               bool all = true;
               for (Rank other : from.serving->chain) {
                 Mesh* mesh = MeshOf(from);
                 const RankNode& t = ranks_.at(ProcessId(mesh->members.at(other.value).process));
                 all &= t.doing != RankNode::Doing::kReceiving && from.served.contains(other.value);
               }
               if (all && from.doing == RankNode::Doing::kServing) {
                 from.serving.reset();
                 Wait(from, RankNode::Doing::kNothing);
                 OnRank(source_id, from.op, Microseconds(30), [this](RankNode& s) {
                   FeedRank(s, session::ServeDone{s.mesh_generation});
                 });
               }
             });
    }
  }
}

void World::CheckDigests(const std::string& key) {
  auto it = meshes_.find(key);
  if (it == meshes_.end()) return;
  Mesh& mesh = it->second;
  std::map<int32_t, Content> by_shard;
  bool agree = true;
  size_t length = 0;
  for (const auto& [number, m] : mesh.members) {
    if (!m.digest || m.left) return;
    const RankNode& rank = ranks_.at(ProcessId(m.process));
    const int32_t shard = number % std::max(1, rank.core->assignment().pp_size);
    auto [entry, inserted] = by_shard.emplace(shard, rank.memory);
    if (!inserted && entry->second != rank.memory) agree = false;
    if (length == 0) length = rank.memory.size();
    agree &= length == rank.memory.size();
  }
  if (mesh.members.size() < mesh.size) return;
  if (!agree) Violate("replicas differ at the digest check");
  for (const auto& [number, m] : mesh.members) {
    RankNode& rank = ranks_.at(ProcessId(m.process));
    OnRank(rank.id, rank.op, Between(Microseconds(50), Milliseconds(1)), [this, agree](RankNode& r) {
      if (r.doing != RankNode::Doing::kDigesting) return;
      Wait(r, RankNode::Doing::kNothing);
      if (agree) {
        FeedRank(r, session::DigestsAgreed{r.mesh_generation, DigestOf(r.memory)});
      } else {
        FeedRank(r, session::DigestsDiffer{r.mesh_generation, "contents differ"});
      }
    });
  }
}

}  // namespace everstep::sim
