// What the keeper of snapshots does on each server: the effects of the real custody core over simulated memory and disks,
// and the chunk names of the real registry, whose deletes may land late.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

using checkpoint::CustodyEffect;
using checkpoint::CustodyEffects;

bool World::Reaches(const AgentNode& from, const AgentNode& to) const {
  if (&from == &to) return true;
  return to.alive && !to.stopped && !from.links.peers_cut && !to.links.peers_cut;
}

Result<Content> World::ReadCopy(AgentNode& agent, const JobUid& job, ShardState what, SnapshotTier tier) {
  const SnapshotInfo* held = agent.custody->Find(job, what, tier);
  if (held == nullptr) return NotFound("this server holds no such copy");
  const SnapshotInfo info = *held;
  Content content;
  switch (tier) {
    case SnapshotTier::kStaged: {
      const checkpoint::StagedSlot slot = agent.custody->SlotOf(job, what);
      auto staged = agent.staging.find({slot.process, slot.slot});
      if (staged != agent.staging.end()) content = staged->second;
      if (DigestOf(content) != info.digest) return Aborted("the staged slot was overwritten");
      return content;
    }
    case SnapshotTier::kPeer:
      if (auto peer = agent.peers.find({job, what}); peer != agent.peers.end()) content = peer->second;
      break;
    case SnapshotTier::kStored: {
      if (agent.disk.failing) return Unavailable("the disk fails");
      const StoreDisk::Stored& stored = agent.disk.copies.at({job, what});
      auto chunk = agent.disk.chunks.find(stored.name);
      if (chunk == agent.disk.chunks.end()) {
        Tell([&](Checker& c) { c.OnChunkMissing(agent, stored.name); });
        return DataLoss("a chunk is gone");
      }
      content = chunk->second;
      break;
    }
  }
  if (DigestOf(content) != info.digest) {
    PerformCustody(agent, agent.custody->CopyFoundBad(job, info, Reason::kStorageCorrupt, "digest"));
    return DataLoss("the copy does not match its digest");
  }
  return content;
}

void World::StageOf(AgentNode& agent, const KeepStaged& staged) {
  PerformCustody(agent, agent.custody->Staged(staged.job, {staged.process, staged.staged.slot},
                                              {staged.staged.state, staged.staged.shard}, staged.staged.bytes));
}

void World::PerformCustody(AgentNode& agent, const CustodyEffects& effects) {
  const ServerId id = agent.id;
  const uint64_t life = agent.life;
  for (const CustodyEffect& effect : effects) {
    if (!agent.alive || agent.life != life) return;
    if (const auto* verify = std::get_if<checkpoint::VerifyStaged>(&effect)) {
      After(Between(Microseconds(100), options_.store_max), [this, id, life, v = *verify] {
        OnServer(agents_.at(id), life, [this, id, v] {
          AgentNode& node = agents_.at(id);
          auto slot = node.staging.find({v.slot.process, v.slot.slot});
          const Content content = slot == node.staging.end() ? Content() : slot->second;
          // The slot's header says which state is in it; a newer one means that the slot has moved on.
          if (static_cast<int64_t>(content.size()) != v.what.state.step.value) {
            PerformCustody(node, node.custody->StagedRefused(v.job, v.slot, v.what, Reason::kCheckpointDropped, "moved on"));
          } else {
            PerformCustody(node, node.custody->StagedVerified(v.job, v.slot, v.what, DigestOf(content)));
          }
        });
      });
    } else if (const auto* make = std::get_if<checkpoint::MakeCopy>(&effect)) {
      const Duration slow = make->command.to == SnapshotTier::kStored ? agent.disk.slow : Duration(0);
      After(Between(Microseconds(200), options_.store_max) + slow, [this, id, life, m = *make] {
        OnServer(agents_.at(id), life, [this, id, m] { MakeCopyOn(agents_.at(id), m); });
      });
    } else if (const auto* segment = std::get_if<checkpoint::FreeSegment>(&effect)) {
      auto first = agent.staging.lower_bound({segment->process, 0});
      while (first != agent.staging.end() && first->first.first == segment->process) first = agent.staging.erase(first);
    } else if (const auto* peer = std::get_if<checkpoint::FreePeerCopy>(&effect)) {
      agent.peers.erase({peer->job, peer->what});
      SnapshotInfo gone;
      gone.state = peer->what.state;
      gone.shard = peer->what.shard;
      gone.tier = SnapshotTier::kPeer;
      gone.server = id;
      Tell([&](Checker& c) { c.OnCopyGone(agent, peer->job, gone, false); });
    } else if (const auto* stored = std::get_if<checkpoint::DeleteStored>(&effect)) {
      Unstore(agent, {stored->job, stored->what});
    } else if (const auto* held = std::get_if<checkpoint::TellHeld>(&effect)) {
      FeedAgent(agent, KeeperReported{held->fact});
    } else if (const auto* lost = std::get_if<checkpoint::TellLost>(&effect)) {
      // A live rank writes over its own slots by what it was told; the agent then only says so.
      const RankNode* owner = lost->fact.snapshot.tier == SnapshotTier::kStaged ? Find(lost->slot.process) : nullptr;
      if (!lost->answer && lost->fact.snapshot.tier != SnapshotTier::kPeer && (owner == nullptr || !owner->alive)) {
        Tell([&](Checker& c) {
          c.OnCopyGone(agent, lost->fact.job, lost->fact.snapshot, lost->fact.reason != Reason::kCheckpointDropped);
        });
      }
      FeedAgent(agent, KeeperReported{lost->fact});
    }
  }
}

void World::MakeCopyOn(AgentNode& agent, const checkpoint::MakeCopy& make) {
  const CopySnapshot& c = make.command;
  const ShardState what{c.source.state, c.source.shard};
  auto fail = [&](Reason reason, const std::string& message) {
    PerformCustody(agent, agent.custody->CopyFailed(c.job, what, c.to, reason, message));
  };
  Result<Content> content = NotFound("no copy is near");
  if (make.local) {
    content = ReadCopy(agent, c.job, what, SnapshotTier::kPeer);
    if (!content.ok()) content = ReadCopy(agent, c.job, what, SnapshotTier::kStaged);
  } else {
    AgentNode& source = agents_.at(c.source.server);
    if (!Reaches(agent, source)) return fail(Reason::kSourceLost, "the source does not answer");
    content = ReadCopy(source, c.job, what, c.source.tier);
  }
  if (!content.ok()) return fail(Reason::kSourceLost, content.status().message());
  if (c.digest != Digest128{} && DigestOf(*content) != c.digest) return fail(Reason::kDigestMismatch, "digest");
  SnapshotInfo info{c.source.state, c.source.shard, c.to, agent.id, c.bytes, DigestOf(*content)};
  if (c.to == SnapshotTier::kPeer) {
    agent.peers[{c.job, what}] = *content;
  } else {
    if (agent.disk.full) return fail(Reason::kStorageFull, "the disk is full");
    if (agent.disk.failing) return fail(Reason::kStorageFailed, "fsync failed");
    Store(agent, c, *content);
  }
  PerformCustody(agent, agent.custody->CopyMade(c.job, info));
}

// Intent, chunk, manifest, as the store of the product does it.
void World::Store(AgentNode& agent, const CopySnapshot& command, const Content& content) {
  StoreDisk& disk = agent.disk;
  const CopyKey key{command.job, {command.source.state, command.source.shard}};
  const checkpoint::Epoch intent = disk.registry.OpenIntent();
  const checkpoint::ChunkRegistry::Choice choice = disk.registry.Choose(intent, DigestOf(content), content.size());
  if (choice.must_write) {
    disk.chunks[choice.name] = content;
  } else if (!disk.chunks.contains(choice.name)) {
    Tell([&](Checker& c) { c.OnChunkMissing(agent, choice.name); });
  }
  Unstore(agent, key);
  disk.registry.Commit(intent, std::span<const checkpoint::ChunkName>(&choice.name, 1));
  disk.copies[key] = {choice.name,
                      {command.source.state, command.source.shard, SnapshotTier::kStored, agent.id, command.bytes,
                       DigestOf(content)}};
  SweepStore(agent);
}

void World::Unstore(AgentNode& agent, const CopyKey& key) {
  auto it = agent.disk.copies.find(key);
  if (it == agent.disk.copies.end()) return;
  agent.disk.registry.DropReference(it->second.name);
  agent.disk.copies.erase(it);
  SweepStore(agent);
}

void World::SweepStore(AgentNode& agent) {
  for (const checkpoint::ChunkName& name : agent.disk.registry.TakeDeletable()) {
    // Most deletes land at once, some an hour late, whatever the agent does meanwhile.
    const Duration late = prng_.Chance(1, 4) ? Between(Duration(0), Seconds(3600)) : Between(Duration(0), Seconds(5));
    After(late, [this, node = &agent, name] {
      node->disk.chunks.erase(name);
      Tell([&](Checker& c) { c.OnChunkGone(*node, name); });
    });
  }
}

void World::LoadOn(AgentNode& agent, const LoadSnapshot& load) {
  const ServerId id = agent.id;
  const uint64_t life = agent.life;
  After(Between(Microseconds(200), options_.store_max), [this, id, life, l = load] {
    OnServer(agents_.at(id), life, [this, id, l] {
      AgentNode& node = agents_.at(id);
      const SnapshotSource& want = l.wanted.source;
      AgentNode& source = agents_.at(want.server);
      Result<Content> content = Unavailable("the holder does not answer");
      if (Reaches(node, source)) content = ReadCopy(source, l.job, {want.state, want.shard}, want.tier);
      if (!content.ok()) {
        FeedAgent(node, SnapshotLoadFailed{l.process, {l.wanted.generation, content.status().code(), content.status().message()}});
        return;
      }
      const DescriptorToken token(node.next_descriptor++);
      node.descriptors[token.value] = *content;
      SnapshotProvided answer;
      answer.generation = l.wanted.generation;
      answer.state = want.state;
      answer.digest = DigestOf(*content);
      answer.from = want.server.value;
      FeedAgent(node, SnapshotLoaded{l.process, answer, token});
    });
  });
}

}  // namespace everstep::sim
