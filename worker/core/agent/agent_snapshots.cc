// Snapshots held on this server: what is promised about them, and when their memory goes.
#include <vector>

#include "worker/core/agent/agent_core.h"

namespace everstep {

void AgentCore::Hear(ProcessId id, Process& process, const SnapshotStaged& message) {
  // The slot's former content is overwritten already.
  LoseSlot(id, message.slot);
  StagingOwner& owner = staging_[id];
  owner.job = process.spawn.job;
  constexpr size_t kSlotsMax = 64;
  if (owner.slots.size() >= kSlotsMax && !owner.slots.contains(message.slot)) {
    Note(NoticeLevel::kWarning, Reason::kStorageFull, "Snapshot in a slot beyond the limit ignored",
         {{"process", std::to_string(id.value)}, {"slot", std::to_string(message.slot)}});
    return;
  }
  owner.slots[message.slot] = message.state;
  ++owner.verifying_count;
  Emit(StartSnapshotVerify{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const SnapshotWanted& message) {
  if (message.generation < process.told) {
    NoteStale("SnapshotWanted", id, message.generation, process.told);
    return;
  }
  Emit(StartSnapshotLoad{process.spawn.job, id, message});
}

void AgentCore::LoseSlot(ProcessId process, uint32_t slot) {
  for (auto it = snapshots_.begin(); it != snapshots_.end();) {
    if (it->first.process == process && it->second.slot == slot) {
      Report(SnapshotLost{it->first.job, it->second.info, Reason::kNone, "its slot is used for a newer one"});
      it = snapshots_.erase(it);
    } else {
      ++it;
    }
  }
}

bool AgentCore::Hold(const SnapshotKey& key, HeldSnapshot held) {
  held.info.server = inventory_.server;
  if (snapshots_.size() >= policy_.snapshots_max && !snapshots_.contains(key)) {
    Report(SnapshotLost{key.job, held.info, Reason::kStorageFull, "the agent holds its limit of snapshots"});
    return false;
  }
  snapshots_[key] = held;
  Report(SnapshotHeld{key.job, held.info});
  return true;
}

void AgentCore::On(const SnapshotVerified& event) {
  auto owner = staging_.find(event.process);
  if (owner == staging_.end()) return;
  --owner->second.verifying_count;
  auto slot = owner->second.slots.find(event.slot);
  // Overwritten while it was being hashed: a newer verification is on its way.
  if (slot != owner->second.slots.end() && slot->second == event.snapshot.state) {
    const SnapshotKey key{owner->second.job, SnapshotTier::kStaged, event.snapshot.state, event.snapshot.shard,
                          event.process};
    Hold(key, HeldSnapshot{event.snapshot, event.slot});
  }
  MaybeFreeStaging(event.process);
}

void AgentCore::On(const SnapshotVerifyFailed& event) {
  auto owner = staging_.find(event.process);
  if (owner == staging_.end()) return;
  --owner->second.verifying_count;
  Note(NoticeLevel::kWarning, Reason::kStorageCorrupt, "Staged snapshot not held",
       {{"process", std::to_string(event.process.value)},
        {"slot", std::to_string(event.slot)},
        {"err", event.message}});
  MaybeFreeStaging(event.process);
}

void AgentCore::MaybeFreeStaging(ProcessId process) {
  auto owner = staging_.find(process);
  if (owner == staging_.end() || !owner->second.process_gone || owner->second.verifying_count > 0) return;
  for (const auto& [key, held] : snapshots_) {
    if (key.process == process) return;
  }
  staging_.erase(owner);
  Emit(FreeStaging{process});
}

void AgentCore::Obey(const CopySnapshot& command) {
  const SnapshotKey key{command.job, command.to, command.source.state, command.source.shard, ProcessId(0)};
  if (auto held = snapshots_.find(key); held != snapshots_.end()) {
    Report(SnapshotHeld{command.job, held->second.info});
    return;
  }
  Emit(StartSnapshotCopy{command});
}

void AgentCore::On(const SnapshotCopied& event) {
  const SnapshotKey key{event.job, event.snapshot.tier, event.snapshot.state, event.snapshot.shard, ProcessId(0)};
  if (!Hold(key, HeldSnapshot{event.snapshot, 0})) Emit(DropSnapshot{event.job, event.snapshot});
}

void AgentCore::On(const SnapshotCopyFailed& event) {
  SnapshotInfo info = event.snapshot;
  info.server = inventory_.server;
  Report(SnapshotLost{event.job, info, event.reason, event.message});
}

void AgentCore::On(const SnapshotLoaded& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end() || event.answer.generation < it->second.told) {
    Emit(DropDescriptor{event.descriptor});
    return;
  }
  Tell(it->second, event.answer, event.descriptor);
}

void AgentCore::On(const SnapshotLoadFailed& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end() || event.answer.generation < it->second.told) return;
  Tell(it->second, event.answer);
}

void AgentCore::DropOne(std::map<SnapshotKey, HeldSnapshot>::iterator it) {
  const SnapshotKey key = it->first;
  Emit(DropSnapshot{key.job, it->second.info});
  snapshots_.erase(it);
  if (key.process != ProcessId(0)) MaybeFreeStaging(key.process);
}

void AgentCore::Obey(const DropSnapshots& command) {
  for (const SnapshotInfo& info : command.snapshots) {
    std::vector<SnapshotKey> matching;
    for (const auto& [key, held] : snapshots_) {
      if (key.job == command.job && key.tier == info.tier && key.state == info.state && key.shard == info.shard) {
        matching.push_back(key);
      }
    }
    for (const SnapshotKey& key : matching) DropOne(snapshots_.find(key));
  }
}

void AgentCore::DropJobSnapshots(const JobUid& job) {
  std::vector<SnapshotKey> matching;
  for (const auto& [key, held] : snapshots_) {
    if (key.job == job) matching.push_back(key);
  }
  for (const SnapshotKey& key : matching) DropOne(snapshots_.find(key));
}

}  // namespace everstep
