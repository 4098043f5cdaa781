#include "checkpoint/core/custody.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include <fmt/format.h>

#include "proto/base/check.h"
#include "proto/base/mutation.h"

namespace everstep::checkpoint {

// (t, g) is off the chain as soon as any later generation started below t (docs/protocol.md section 1).
bool SnapshotCustody::OffChain(const Job& job, StateId state) {
  if (state.step.value == 0) return false;
  return std::any_of(job.starts.begin(), job.starts.end(), [&](const auto& start) {
    return start.first > state.generation && start.second < state.step;
  });
}

const SnapshotCustody::StagedCopy* SnapshotCustody::FindStaged(const Job& job, ShardState what,
                                                               StagedSlot* slot) const {
  for (const auto& [at, copy] : job.staged) {
    if (!copy.verified || !copy.offered) continue;
    if (copy.info.state != what.state || copy.info.shard != what.shard) continue;
    if (slot != nullptr) *slot = at;
    return &copy;
  }
  return nullptr;
}

bool SnapshotCustody::MustStay(const Job& job, const StagedCopy& copy) const {
  return !Mutated(Mutation::kFreeAboveWatermark) && copy.info.state.step >= job.watermark && !OffChain(job, copy.info.state);
}

void SnapshotCustody::TellFailed(const JobUid& uid, ShardState what, SnapshotTier tier, Reason reason,
                                 std::string message, CustodyEffects& effects, StagedSlot slot) const {
  SnapshotInfo info;
  info.state = what.state;
  info.shard = what.shard;
  info.tier = tier;
  info.server = self_;
  effects.push_back(TellLost{{uid, info, reason, std::move(message)}, slot, true});
}

CustodyEffects SnapshotCustody::Staged(const JobUid& uid, StagedSlot slot, ShardState what, uint64_t bytes) {
  CustodyEffects effects;
  Job& job = jobs_[uid];
  if (const auto found = job.staged.find(slot); found != job.staged.end()) {
    StagedCopy& before = found->second;
    if (before.info.state == what.state && before.info.shard == what.shard && before.info.bytes == bytes) {
      if (before.verified && before.offered) effects.push_back(TellHeld{{uid, before.info}, slot});
      return effects;  // said twice
    }
    if (before.verified && before.offered) {
      effects.push_back(
          TellLost{{uid, before.info, Reason::kCheckpointDropped, "its slot was used for a newer snapshot"}, slot});
    }
    job.staged.erase(found);
  }
  if (job.staged.size() >= limits_.staged_max) {
    TellFailed(uid, what, SnapshotTier::kStaged, Reason::kStorageFull, "too many staged slots", effects, slot);
    return effects;
  }
  StagedCopy copy;
  copy.info.state = what.state;
  copy.info.shard = what.shard;
  copy.info.tier = SnapshotTier::kStaged;
  copy.info.server = self_;
  copy.info.bytes = bytes;
  if (Mutated(Mutation::kPromiseUnverified)) {
    copy.verified = true;
    effects.push_back(TellHeld{{uid, copy.info}, slot});
  }
  job.staged.emplace(slot, std::move(copy));
  effects.push_back(VerifyStaged{uid, slot, what, bytes});
  return effects;
}

CustodyEffects SnapshotCustody::StagedVerified(const JobUid& uid, StagedSlot slot, ShardState what,
                                               const Digest128& digest) {
  CustodyEffects effects;
  const auto job = jobs_.find(uid);
  if (job == jobs_.end()) return effects;
  const auto found = job->second.staged.find(slot);
  if (found == job->second.staged.end()) return effects;
  StagedCopy& copy = found->second;
  if (copy.verified || copy.info.state != what.state || copy.info.shard != what.shard) return effects;
  copy.verified = true;
  copy.info.digest = digest;
  if (copy.offered) effects.push_back(TellHeld{{uid, copy.info}, slot});
  FreeDeadSegments(uid, job->second, effects);
  return effects;
}

CustodyEffects SnapshotCustody::StagedRefused(const JobUid& uid, StagedSlot slot, ShardState what, Reason reason,
                                              std::string message) {
  CustodyEffects effects;
  const auto job = jobs_.find(uid);
  if (job == jobs_.end()) return effects;
  const auto found = job->second.staged.find(slot);
  if (found == job->second.staged.end() || found->second.info.state != what.state ||
      found->second.info.shard != what.shard) {
    return effects;
  }
  job->second.staged.erase(found);
  TellFailed(uid, what, SnapshotTier::kStaged, reason, std::move(message), effects, slot);
  FreeDeadSegments(uid, job->second, effects);
  return effects;
}

CustodyEffects SnapshotCustody::ProcessGone(const JobUid& uid, ProcessId process) {
  CustodyEffects effects;
  const auto job = jobs_.find(uid);
  if (job == jobs_.end()) {
    effects.push_back(FreeSegment{uid, process});
    return effects;
  }
  job->second.gone.insert(process);
  FreeDeadSegments(uid, job->second, effects);
  return effects;
}

CustodyEffects SnapshotCustody::FreeStaging(const JobUid& uid, ProcessId process) {
  CustodyEffects effects;
  if (const auto job = jobs_.find(uid); job != jobs_.end()) {
    std::erase_if(job->second.staged, [&](const auto& entry) { return entry.first.process == process; });
    job->second.gone.erase(process);
  }
  effects.push_back(FreeSegment{uid, process});
  return effects;
}

void SnapshotCustody::FreeDeadSegments(const JobUid& uid, Job& job, CustodyEffects& effects) {
  for (auto it = job.gone.begin(); it != job.gone.end();) {
    const ProcessId process = *it;
    const auto first = job.staged.lower_bound({process, 0});
    auto last = first;
    bool needed = false;
    for (; last != job.staged.end() && last->first.process == process; ++last) {
      const StagedCopy& copy = last->second;
      // A copy that is still being verified stays until the answer is there.
      needed |= !copy.verified || (copy.offered && MustStay(job, copy));
    }
    if (needed) {
      ++it;
      continue;
    }
    for (auto copy = first; copy != last; ++copy) {
      if (!copy->second.offered) continue;
      effects.push_back(TellLost{{uid, copy->second.info, Reason::kCheckpointDropped,
                                  "its process is gone and a newer state is protected"},
                                 copy->first});
    }
    job.staged.erase(first, last);
    effects.push_back(FreeSegment{uid, process});
    it = job.gone.erase(it);
  }
}

CustodyEffects SnapshotCustody::Copy(const CopySnapshot& command) {
  CustodyEffects effects;
  const ShardState what{command.source.state, command.source.shard};
  const SnapshotTier tier = command.to;
  if (tier == SnapshotTier::kStaged) {
    TellFailed(command.job, what, tier, Reason::kStorageFailed, "a copy can't be made into staging", effects);
    return effects;
  }
  Job& job = jobs_[command.job];
  if (const SnapshotInfo* held = Find(command.job, what, tier)) {
    if (command.digest == Digest128{} || held->digest == command.digest) {
      effects.push_back(TellHeld{{command.job, *held}, {}});
      return effects;
    }
    // Two contents under one state id: one of them is wrong, and it is not for this server to say which.
    TellFailed(command.job, what, tier, Reason::kDigestMismatch,
                 "the copy held here has another digest than the one asked for", effects);
    return effects;
  }
  if (const auto found = job.in_flight.find({what, tier}); found != job.in_flight.end()) {
    found->second.dropped = false;
    return effects;
  }
  if (copies_in_flight_ >= limits_.copies_in_flight_max) {
    TellFailed(command.job, what, tier, Reason::kStorageFull, "too many copies are being made", effects);
    return effects;
  }
  const SnapshotInfo* peer = Find(command.job, what, SnapshotTier::kPeer);
  const SnapshotInfo* staged = Find(command.job, what, SnapshotTier::kStaged);
  const bool local = peer != nullptr || staged != nullptr;
  if (!local && command.source.server == self_) {
    TellFailed(command.job, what, tier, Reason::kSourceLost, "this server does not hold the source", effects);
    return effects;
  }
  InFlight in_flight;
  if (tier == SnapshotTier::kPeer) {
    in_flight.peer_bytes = command.bytes;
    if (!MakeRoom(command.bytes, effects)) {
      TellFailed(command.job, what, tier, Reason::kStorageFull,
                   fmt::format("{} bytes do not fit: {} of {} bytes hold copies that must stay", command.bytes,
                               peer_bytes_, limits_.peer_bytes_max),
                   effects);
      return effects;
    }
    peer_bytes_ += command.bytes;
  }
  job.in_flight.emplace(CopyKey{what, tier}, in_flight);
  ++copies_in_flight_;
  effects.push_back(MakeCopy{command, local});
  return effects;
}

bool SnapshotCustody::MakeRoom(uint64_t bytes, CustodyEffects& effects) {
  if (bytes > limits_.peer_bytes_max) return false;
  const uint64_t allowed = limits_.peer_bytes_max - bytes;
  if (peer_bytes_ <= allowed) return true;
  // Copies that may give way: off the chain first, then the oldest below their job's watermark.
  std::vector<std::tuple<bool, Step, JobUid, ShardState, uint64_t>> candidates;
  uint64_t freeable = 0;
  for (const auto& [uid, job] : jobs_) {
    for (const auto& [what, info] : job.peer) {
      const bool off_chain = OffChain(job, what.state);
      if (!off_chain && what.state.step >= job.watermark) continue;
      candidates.emplace_back(!off_chain, what.state.step, uid, what, info.bytes);
      freeable += info.bytes;
    }
  }
  if (peer_bytes_ - freeable > allowed) return false;
  std::sort(candidates.begin(), candidates.end());
  for (const auto& [on_chain, step, uid, what, freed] : candidates) {
    if (peer_bytes_ <= allowed) break;
    Job& job = jobs_.at(uid);
    effects.push_back(TellLost{{uid, job.peer.at(what), Reason::kCheckpointDropped,
                                "memory was needed for a newer copy"},
                                 {}});
    FreePeer(uid, job, what, effects);
  }
  return true;
}

void SnapshotCustody::FreePeer(const JobUid& uid, Job& job, ShardState what, CustodyEffects& effects) {
  const auto found = job.peer.find(what);
  EVERSTEP_CHECK(found != job.peer.end());
  EVERSTEP_CHECK(peer_bytes_ >= found->second.bytes);
  peer_bytes_ -= found->second.bytes;
  job.peer.erase(found);
  effects.push_back(FreePeerCopy{uid, what});
}

CustodyEffects SnapshotCustody::CopyMade(const JobUid& uid, const SnapshotInfo& copy) {
  CustodyEffects effects;
  const ShardState what{copy.state, copy.shard};
  const auto job = jobs_.find(uid);
  std::optional<InFlight> in_flight;
  if (job != jobs_.end()) {
    if (const auto found = job->second.in_flight.find({what, copy.tier}); found != job->second.in_flight.end()) {
      in_flight = found->second;
      job->second.in_flight.erase(found);
      --copies_in_flight_;
      peer_bytes_ -= in_flight->peer_bytes;
    }
  }
  if (!in_flight.has_value() || in_flight->dropped) {  // the job or the copy was dropped meanwhile
    if (copy.tier == SnapshotTier::kPeer) effects.push_back(FreePeerCopy{uid, what});
    if (copy.tier == SnapshotTier::kStored) effects.push_back(DeleteStored{uid, what});
    return effects;
  }
  SnapshotInfo info = copy;
  info.server = self_;
  if (copy.tier == SnapshotTier::kPeer) {
    peer_bytes_ += copy.bytes;
    job->second.peer[what] = info;
  } else {
    job->second.stored[what] = info;
  }
  effects.push_back(TellHeld{{uid, info}, {}});
  return effects;
}

CustodyEffects SnapshotCustody::CopyFailed(const JobUid& uid, ShardState what, SnapshotTier tier, Reason reason,
                                           std::string message) {
  CustodyEffects effects;
  const auto job = jobs_.find(uid);
  if (job == jobs_.end()) return effects;
  const auto found = job->second.in_flight.find({what, tier});
  if (found == job->second.in_flight.end()) return effects;
  peer_bytes_ -= found->second.peer_bytes;
  --copies_in_flight_;
  const bool dropped = found->second.dropped;
  job->second.in_flight.erase(found);
  if (!dropped) TellFailed(uid, what, tier, reason, std::move(message), effects);
  return effects;
}

CustodyEffects SnapshotCustody::CopyFoundBad(const JobUid& uid, const SnapshotInfo& copy, Reason reason,
                                             std::string message) {
  CustodyEffects effects;
  const ShardState what{copy.state, copy.shard};
  if (Find(uid, what, copy.tier) == nullptr) return effects;
  Job& job = jobs_.at(uid);
  SnapshotInfo lost = copy;
  lost.server = self_;
  const StagedSlot slot = copy.tier == SnapshotTier::kStaged ? SlotOf(uid, what) : StagedSlot{};
  effects.push_back(TellLost{{uid, lost, reason, std::move(message)}, slot});
  switch (copy.tier) {
    case SnapshotTier::kStaged:
      job.staged.erase(slot);
      FreeDeadSegments(uid, job, effects);
      break;
    case SnapshotTier::kPeer: FreePeer(uid, job, what, effects); break;
    case SnapshotTier::kStored:
      job.stored.erase(what);
      effects.push_back(DeleteStored{uid, what});
      break;
  }
  return effects;
}

void SnapshotCustody::StoredFound(const JobUid& uid, const SnapshotInfo& copy) {
  SnapshotInfo info = copy;
  info.tier = SnapshotTier::kStored;
  info.server = self_;
  jobs_[uid].stored[{copy.state, copy.shard}] = info;
}

CustodyEffects SnapshotCustody::Drop(const DropSnapshots& command) {
  CustodyEffects effects;
  const auto entry = jobs_.find(command.job);
  if (entry == jobs_.end()) return effects;
  Job& job = entry->second;
  for (const SnapshotInfo& drop : command.snapshots) {
    if (drop.server != self_) continue;
    const ShardState what{drop.state, drop.shard};
    if (const auto flying = job.in_flight.find({what, drop.tier}); flying != job.in_flight.end()) {
      flying->second.dropped = true;
      continue;
    }
    switch (drop.tier) {
      case SnapshotTier::kStaged:
        for (auto& [slot, copy] : job.staged) {
          if (copy.info.state != drop.state || copy.info.shard != drop.shard) continue;
          if (MustStay(job, copy)) {
            ++drops_refused_;
          } else {
            copy.offered = false;
          }
        }
        break;
      case SnapshotTier::kPeer:
        if (job.peer.contains(what)) FreePeer(command.job, job, what, effects);
        break;
      case SnapshotTier::kStored:
        if (job.stored.erase(what) > 0) effects.push_back(DeleteStored{command.job, what});
        break;
    }
  }
  FreeDeadSegments(command.job, job, effects);
  return effects;
}

CustodyEffects SnapshotCustody::ProtectedRaised(const JobUid& uid, Step watermark) {
  CustodyEffects effects;
  Job& job = jobs_[uid];
  if (watermark <= job.watermark) return effects;
  job.watermark = watermark;
  FreeDeadSegments(uid, job, effects);
  return effects;
}

CustodyEffects SnapshotCustody::Assigned(const JobUid& uid, Generation generation, Step start) {
  CustodyEffects effects;
  Job& job = jobs_[uid];
  if (!job.starts.empty() && job.starts.back().first >= generation) return effects;
  // A later, lower start says all that an earlier, higher one did about states of generations before both; states of
  // the generation in between lie above its start and so above the later one.
  while (!job.starts.empty() && job.starts.back().second >= start) job.starts.pop_back();
  job.starts.emplace_back(generation, start);
  if (job.starts.size() > limits_.chain_links_max) job.starts.erase(job.starts.begin());
  // A roll-back takes the watermark with it: the states above the start are gone from the chain.
  job.watermark = std::min(job.watermark, start);
  FreeDeadSegments(uid, job, effects);
  return effects;
}

CustodyEffects SnapshotCustody::Release(const JobUid& uid, bool keep_stored) {
  CustodyEffects effects;
  const auto entry = jobs_.find(uid);
  if (entry == jobs_.end()) {
    effects.push_back(ForgetJob{uid});  // a generation may be known of a job that never had a copy here
    return effects;
  }
  Job& job = entry->second;
  std::set<ProcessId> segments = job.gone;
  for (const auto& [slot, copy] : job.staged) segments.insert(slot.process);
  for (const ProcessId process : segments) effects.push_back(FreeSegment{uid, process});
  while (!job.peer.empty()) FreePeer(uid, job, job.peer.begin()->first, effects);
  for (const auto& [key, in_flight] : job.in_flight) {
    peer_bytes_ -= in_flight.peer_bytes;
    --copies_in_flight_;
  }
  if (!keep_stored) {
    for (const auto& [what, info] : job.stored) effects.push_back(DeleteStored{uid, what});
  }
  effects.push_back(ForgetJob{uid});
  std::map<ShardState, SnapshotInfo> stored;
  if (keep_stored) stored = std::move(job.stored);
  jobs_.erase(entry);
  if (!stored.empty()) jobs_[uid].stored = std::move(stored);
  return effects;
}

std::vector<std::pair<JobUid, SnapshotInfo>> SnapshotCustody::Held() const {
  std::vector<std::pair<JobUid, SnapshotInfo>> held;
  for (const auto& [uid, job] : jobs_) {
    for (const auto& [slot, copy] : job.staged) {
      if (copy.verified && copy.offered) held.emplace_back(uid, copy.info);
    }
    for (const auto& [what, info] : job.peer) held.emplace_back(uid, info);
    for (const auto& [what, info] : job.stored) held.emplace_back(uid, info);
  }
  return held;
}

const SnapshotInfo* SnapshotCustody::Find(const JobUid& uid, ShardState what, SnapshotTier tier) const {
  const auto job = jobs_.find(uid);
  if (job == jobs_.end()) return nullptr;
  if (tier == SnapshotTier::kStaged) {
    const StagedCopy* copy = FindStaged(job->second, what, nullptr);
    return copy == nullptr ? nullptr : &copy->info;
  }
  const auto& copies = tier == SnapshotTier::kPeer ? job->second.peer : job->second.stored;
  const auto found = copies.find(what);
  return found == copies.end() ? nullptr : &found->second;
}

StagedSlot SnapshotCustody::SlotOf(const JobUid& uid, ShardState what) const {
  StagedSlot slot;
  const auto job = jobs_.find(uid);
  EVERSTEP_CHECK(job != jobs_.end() && FindStaged(job->second, what, &slot) != nullptr);
  return slot;
}

bool SnapshotCustody::Gone(const JobUid& uid, ProcessId process) const {
  const auto job = jobs_.find(uid);
  return job != jobs_.end() && job->second.gone.contains(process);
}

}  // namespace everstep::checkpoint
