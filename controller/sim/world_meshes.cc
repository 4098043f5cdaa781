// Meshes: where the ranks of one generation meet to reduce, vote, pass on state and compare digests. The effects of the
// collective library, without its bytes; aborts, broken links and stopped peers included.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

Mesh* World::FindMesh(const RankNode& rank) {
  auto it = meshes_.find(rank.mesh_key);
  return it == meshes_.end() ? nullptr : &it->second;
}

const Mesh* World::MeshOf(const RankNode& rank) const {
  auto it = meshes_.find(rank.mesh_key);
  return it == meshes_.end() ? nullptr : &it->second;
}

// A server is cut off from the others in the middle of a mesh.
bool World::Split(const Mesh& mesh) const {
  bool several = false, cut = false;
  const ServerId* first = nullptr;
  for (const auto& [number, m] : mesh.members) {
    if (first == nullptr) first = &m.server;
    several |= m.server != *first;
    cut |= agents_.at(m.server).links.peers_cut;
  }
  return several && cut;
}

// Whoever waits in a split mesh gets an error after a while, and suspects a rank behind the broken link.
void World::FailSplit(Mesh& mesh) {
  if (!Split(mesh)) return;
  int32_t suspect = -1, other = -1;
  for (const auto& [number, m] : mesh.members) {
    (agents_.at(m.server).links.peers_cut ? suspect : other) = number;
  }
  for (const auto& [number, m] : mesh.members) {
    if (m.left || m.process == 0) continue;
    RankNode& rank = ranks_.at(ProcessId(m.process));
    if (!rank.alive || rank.doing == RankNode::Doing::kNothing) continue;
    const int32_t who = agents_.at(m.server).links.peers_cut ? other : suspect;
    OnRank(rank.id, rank.op, Between(Milliseconds(20), Milliseconds(800)), [this, who](RankNode& r) { FailWait(r, who); });
  }
}

void World::Connect(RankNode& rank, const session::ConnectMesh& work) {
  const Assignment& a = work.assignment;
  // The first message on each connection carries job, generation and token: others never meet.
  rank.mesh_key = fmt::format("{}/{}/{:02x}", a.job.value, a.generation.value, fmt::join(a.token, ""));
  rank.mesh_generation = a.generation;
  rank.rank = work.rank.value;
  rank.shard = a.ranks[static_cast<size_t>(rank.rank)].shard().value;
  Mesh& mesh = meshes_[rank.mesh_key];
  if (mesh.size == 0) {
    mesh.job = a.job;
    mesh.generation = a.generation;
    mesh.assignment = a;
    mesh.size = a.ranks.size();
    mesh.restores = restores_;
    for (const RankAssignment& r : a.ranks) mesh.members[r.rank.value].server = r.server;
  }
  Tell([&](Checker& c) { c.OnMeshJoined(rank, mesh); });
  Mesh::Member& member = mesh.members[rank.rank];
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
  } else if (Split(mesh)) {
    if (arrived == mesh.size) FailSplit(mesh);
    OnRank(rank.id, op, Seconds(5), [this](RankNode& r) { FailWait(r, -1); });
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

void World::CheckMesh(Mesh& mesh) {
  int64_t reduced = INT64_MAX, voted = INT64_MAX, protected_min = INT64_MAX;
  bool all_finished = true;
  uint64_t pending = 0;
  if (Split(mesh)) return FailSplit(mesh);
  for (const auto& [number, m] : mesh.members) {
    if (m.left || !m.arrived) return;
    reduced = std::min(reduced, m.reduced);
    voted = std::min(voted, m.voted);
    pending = std::max(pending, m.pending);
    protected_min = std::min(protected_min, m.protected_step);
    all_finished &= m.finished != 0;
  }
  // A stale vote buffer: the ballot of the step before counts again.
  if (options_.mistake == ShellMistake::kStaleVoteBuffer) {
    int64_t highest = 0;
    for (const auto& [number, m] : mesh.members) highest = std::max(highest, m.voted);
    if (voted == highest - 1 && voted > 0) voted = highest;
  }
  if (voted > mesh.passed && voted != INT64_MAX && voted > 0) {
    mesh.passed = voted;
    ++steps_passed_[mesh.job];
    Tell([&](Checker& c) { c.OnVotePassed(mesh); });
  }
  for (auto& [number, m] : mesh.members) {
    RankNode& rank = ranks_.at(ProcessId(m.process));
    if (rank.doing == RankNode::Doing::kReducing && rank.call_step <= reduced) {
      OnRank(rank.id, rank.op, Between(Microseconds(50), options_.reduce_max), [this](RankNode& r) {
        if (r.doing != RankNode::Doing::kReducing) return;
        Wait(r, RankNode::Doing::kNothing);
        r.gradients = r.mesh_generation.value;
        CallRank(r, RankNode::Call::kGradients, session::GradientsCompleted{Step(r.call_step)});
      });
    } else if (rank.doing == RankNode::Doing::kVoting && rank.call_step <= voted && m.decided < rank.call_step) {
      m.decided = rank.call_step;
      session::VotePassed passed;
      passed.step = Step(rank.call_step);
      passed.generation = mesh.generation;
      passed.pending_generation_max = Generation(pending);
      passed.protected_step_min = Step(protected_min);
      OnRank(rank.id, rank.op, Between(Microseconds(50), options_.reduce_max), [this, passed](RankNode& r) {
        if (r.doing != RankNode::Doing::kVoting) return;
        Wait(r, RankNode::Doing::kNothing);
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
  Mesh* mesh = FindMesh(rank);
  if (mesh == nullptr || mesh->members.at(rank.rank).left) {
    // The flag is read again under the abort mutex before the ballot goes out.
    return CallRank(rank, RankNode::Call::kVoteFailed,
                    session::VoteFailed{Step(rank.call_step), Rank(-1), Aborted("aborted")});
  }
  Wait(rank, RankNode::Doing::kVoting);
  Mesh::Member& member = mesh->members[rank.rank];
  member.voted = rank.call_step;
  member.pending = ballot.pending_generation.value;
  member.protected_step = ballot.protected_step.value;
  member.complete_gradients = rank.gradients == mesh->generation.value;
  member.answered = rank.answered.generation;
  Tell([&](Checker& c) { c.OnBallot(rank, *mesh); });
  Moment("voting", rank);
  if (rank.alive) CheckMesh(*mesh);
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
  Mesh* mesh = FindMesh(rank);
  if (mesh == nullptr) return;
  auto it = mesh->members.find(rank.rank);
  if (it == mesh->members.end() || it->second.process != rank.id.value || it->second.left) return;
  it->second.left = true;
  const int32_t suspect = rank.rank;
  for (const auto& [number, m] : mesh->members) {
    if (m.left || m.process == 0) continue;
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
      rank.drawn = rank.drawn_saved;
      [[fallthrough]];
    case RankNode::Doing::kFinishing:
      if (suspect != -2) FeedRank(rank, session::CollectiveFailed{generation, who, status});
      return Rejoin(rank);
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
  if (Split(it->second)) return FailSplit(it->second);
  for (const auto& [number, m] : it->second.members) {
    if (m.process == 0 || m.left) continue;
    RankNode& source = ranks_.at(ProcessId(m.process));
    if (!source.alive || source.mesh_key != key || source.doing != RankNode::Doing::kServing) continue;
    for (Rank receiver : source.serving->chain) {
      auto member = it->second.members.find(receiver.value);
      if (member == it->second.members.end() || member->second.process == 0) continue;
      if (source.served.contains(receiver.value)) continue;
      RankNode& target = ranks_.at(ProcessId(member->second.process));
      if (!target.alive || target.mesh_key != key || target.doing != RankNode::Doing::kReceiving) continue;
      source.served.insert(receiver.value);
      const ProcessId source_id = source.id;
      const uint64_t source_op = source.op;
      const Content pinned = source.memory;
      OnRank(target.id, target.op, Between(Microseconds(500), Milliseconds(8)), [this, source_id, source_op, pinned](RankNode& r) {
        RankNode& from = ranks_.at(source_id);
        if (!from.alive || from.op != source_op) return FailWait(r, from.rank);
        Tell([&](Checker& c) { c.OnServed(from, pinned); });
        r.memory = pinned;
        r.gradients.reset();
        r.torn = false;
        r.drawn = static_cast<int64_t>(r.memory.size());
        r.receiving.reset();
        Wait(r, RankNode::Doing::kNothing);
        Moment("received", r);
        if (!r.alive) return;
        FeedRank(r, session::RestoreDone{r.mesh_generation, 8 * pinned.size()});
        Mesh* mesh = FindMesh(from);
        if (mesh == nullptr || !from.serving) return;
        const bool all = std::all_of(from.serving->chain.begin(), from.serving->chain.end(), [&](Rank other) {
          return from.served.contains(other.value) &&
                 ranks_.at(ProcessId(mesh->members.at(other.value).process)).doing != RankNode::Doing::kReceiving;
        });
        if (!all || from.doing != RankNode::Doing::kServing) return;
        from.serving.reset();
        Wait(from, RankNode::Doing::kNothing);
        OnRank(source_id, from.op, Microseconds(30), [this](RankNode& s) {
          FeedRank(s, session::ServeDone{s.mesh_generation});
        });
      });
    }
  }
}

void World::CheckDigests(const std::string& key) {
  auto it = meshes_.find(key);
  if (it == meshes_.end()) return;
  Mesh& mesh = it->second;
  if (Split(mesh)) return FailSplit(mesh);
  std::map<int32_t, Content> by_shard;
  bool agree = true;
  std::optional<size_t> length;
  for (const auto& [number, m] : mesh.members) {
    if (!m.digest || m.left || m.process == 0) return;
    const RankNode& rank = ranks_.at(ProcessId(m.process));
    auto [entry, inserted] = by_shard.emplace(rank.shard, rank.memory);
    if (!inserted && entry->second != rank.memory) agree = false;
    if (!length) length = rank.memory.size();
    agree &= *length == rank.memory.size();
  }
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
