// The controller's half of checkpoints (docs/protocol.md section 5): which copies exist, which are asked for, what is
// protected, and when a manifest commits.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/mutation.h"
#include "proto/model/names.h"

namespace everstep {

namespace {
constexpr size_t kStatesKept = 64;  // per job, in the table of volatile copies
}

void ControllerCore::Impl::Handle(ServerRow& server, const SnapshotHeld& fact) {
  JobRow* job = FindJob(fact.job);
  if (job == nullptr) return;
  if (job->stage == JobStage::kEnded) {
    // A copy that was under way when the job ended.
    if (fact.snapshot.tier != SnapshotTier::kStored) Send(server, ReleaseJob{fact.job});
    return;
  }
  job->touched.insert(server.inventory.server);
  const JobEntry& entry = Entry(*job);
  SnapshotInfo snapshot = fact.snapshot;
  snapshot.server = server.inventory.server;
  if (snapshot.shard.value < 0 || snapshot.shard.value >= entry.spec.pipeline_stages) return CountStale("snapshot");
  if (!entry.lineage.OnChain(snapshot.state) && !Mutated(Mutation::kAcceptOffChain)) {
    // Nothing can use it any more; a state whose generation's point is not durable yet cannot exist.
    SendTo(snapshot.server, DropSnapshots{fact.job, {snapshot}});
    return CountStale("snapshot");
  }
  std::vector<SnapshotInfo>& holders = job->snapshots[{snapshot.state, snapshot.shard}];
  for (SnapshotInfo& other : holders) {
    if (other.tier != snapshot.tier) continue;
    if (other.digest != snapshot.digest && other.bytes != 0) {
      Note(NoticeLevel::kError, Reason::kDigestMismatch, "Copies of one shard differ", snapshot.server, job,
           {{"shard", std::to_string(snapshot.shard.value)}, {"step", std::to_string(snapshot.state.step.value)}});
    }
    if (other.server == snapshot.server) {
      other = snapshot;
      return;
    }
  }
  holders.push_back(snapshot);
  AdvanceProtection(*job);
  AdvanceManifests(*job);
  if (job->stage == JobStage::kWaiting) dirty_ = true;
  if (!hold_copies_ && job->stage == JobStage::kCollecting && job->copies_until != kNever) CheckCollected(*job);
}

void ControllerCore::Impl::Handle(ServerRow& server, const SnapshotLost& fact) {
  JobRow* job = FindJob(fact.job);
  if (job == nullptr) return;
  auto it = job->snapshots.find({fact.snapshot.state, fact.snapshot.shard});
  if (it != job->snapshots.end()) {
    std::erase_if(it->second, [&](const SnapshotInfo& s) {
      return s.server == server.inventory.server && s.tier == fact.snapshot.tier;
    });
    if (it->second.empty()) job->snapshots.erase(it);
  }
  auto asked = job->copies_asked.find({fact.snapshot.state, fact.snapshot.shard, fact.snapshot.tier});
  if (asked != job->copies_asked.end() && asked->second.to == server.inventory.server) {
    if (fact.snapshot.tier == SnapshotTier::kPeer) {
      asked->second.to = ServerId();
    } else {
      job->copies_asked.erase(asked);
    }
  }
  const bool ordinary = fact.reason == Reason::kCheckpointDropped;  // its slot was used again, or memory was full
  if (!ordinary) Push(Measured{Measured::What::kCheckpointCommit, fact.reason, RecoveryPhase::kNone, "failed", 0});
  Note(ordinary ? NoticeLevel::kDebug : NoticeLevel::kError, fact.reason, "Snapshot copy lost", server.inventory.server, job,
       {{"step", std::to_string(fact.snapshot.state.step.value)},
        {"tier", std::string(SnapshotTierName(fact.snapshot.tier))},
        {"message", fact.message}});
  if (job->stage != JobStage::kEnded) AdvanceProtection(*job);
}

void ControllerCore::Impl::ForgetSnapshotsOf(const ServerId& server) {
  for (auto& [uid, job] : jobs_) {
    for (auto it = job.snapshots.begin(); it != job.snapshots.end();) {
      std::erase_if(it->second, [&](const SnapshotInfo& s) { return s.server == server; });
      it = it->second.empty() ? job.snapshots.erase(it) : std::next(it);
    }
    // What was asked of it is asked of somebody else.
    for (auto it = job.copies_asked.begin(); it != job.copies_asked.end();) {
      const bool its = it->second.to == server;
      if (its) it->second.to = ServerId();
      it = its && std::get<2>(it->first) == SnapshotTier::kStored ? job.copies_asked.erase(it) : std::next(it);
    }
  }
}

// Who said nothing about its failure domain is one of its own.
std::string ControllerCore::Impl::DomainOf(const ServerId& server) const {
  auto row = servers_.find(server);
  if (row != servers_.end() && !row->second.inventory.failure_domain.empty()) return row->second.inventory.failure_domain;
  auto entry = ledger_.servers.find(server);
  if (entry != ledger_.servers.end() && !entry->second.failure_domain.empty()) return entry->second.failure_domain;
  return "server " + server.value;
}

bool ControllerCore::Impl::InOneDomain(const JobRow& job) const {
  std::set<std::string> domains;
  for (const ProcessRow* process : ProcessesOf(job.uid)) {
    if (!process->exited) domains.insert(DomainOf(process->server));
  }
  return domains.size() <= 1;
}

// Asks one peer for a copy: of another failure domain first, then a server without ranks, then by name, spread by shard.
// Whoever died or failed with this copy is not asked again.
void ControllerCore::Impl::AskForPeerCopy(JobRow& job, const SnapshotInfo& source, const std::vector<SnapshotInfo>& holders) {
  const ServerRow* from = FindServer(source.server);
  if (from == nullptr || from->dead) return;
  CopyAsked& asked = job.copies_asked[{source.state, source.shard, SnapshotTier::kPeer}];
  std::set<ServerId> have;
  for (const SnapshotInfo& s : holders) {
    if (s.tier == SnapshotTier::kPeer) have.insert(s.server);
  }
  if (!asked.to.empty() && !have.contains(asked.to)) return;  // under way
  const std::string domain = DomainOf(source.server);
  std::vector<std::pair<std::tuple<bool, bool>, ServerId>> peers;
  for (const auto& [id, server] : servers_) {
    if (id == source.server || !Usable(server) || server.inventory.transfer_address.empty()) continue;
    if (asked.tried.contains(id) || have.contains(id)) continue;
    const bool same_domain = DomainOf(id) == domain;
    if (same_domain && !have.empty()) continue;  // one of those is enough until another domain can be reached
    peers.push_back({{same_domain, StateOf(server) != ServerState::kSpare}, id});
  }
  if (peers.empty()) return;
  std::sort(peers.begin(), peers.end());
  size_t best = 1;
  while (best < peers.size() && peers[best].first == peers[0].first) ++best;
  asked.to = peers[static_cast<size_t>(source.shard.value) % best].second;
  asked.tried.insert(asked.to);
  SendTo(asked.to, CopySnapshot{job.uid,
                                {source.server, SnapshotTier::kStaged, from->inventory.transfer_address, source.state,
                                 source.shard},
                                source.digest, source.bytes, SnapshotTier::kPeer});
}

// Asks for copies in other failure domains, and raises the watermark when every shard of a state has one. Where all of
// the job's servers share one domain, a copy on another of them is the best there is and counts.
void ControllerCore::Impl::AdvanceProtection(JobRow& job) {
  const JobEntry& entry = Entry(job);
  const bool one_domain = InOneDomain(job);
  bool inside = false;  // a copy counts only because there is no other domain
  std::map<StateId, int32_t> protected_shards;
  for (const auto& [key, holders] : job.snapshots) {
    const auto& [state, shard] = key;
    const SnapshotInfo* source = nullptr;
    bool copied = false, apart = false;
    for (const SnapshotInfo& s : holders) {
      if (s.tier == SnapshotTier::kStaged && source == nullptr) source = &s;
      if (s.tier != SnapshotTier::kPeer) continue;
      copied = true;
      apart |= std::any_of(holders.begin(), holders.end(),
                           [&](const SnapshotInfo& o) { return DomainOf(o.server) != DomainOf(s.server); });
    }
    if (apart || (copied && one_domain)) {
      ++protected_shards[state];
      inside |= !apart;
      continue;
    }
    if (source != nullptr && state.step > job.protected_step) AskForPeerCopy(job, *source, holders);
  }
  if (!protected_shards.empty()) job.one_domain = inside;
  everstep::Step newest = job.protected_step;
  for (const auto& [state, count] : protected_shards) {
    if (count == entry.spec.pipeline_stages && entry.lineage.OnChain(state)) newest = std::max(newest, state.step);
  }
  if (newest > job.protected_step) {
    job.protected_step = newest;
    std::set<ServerId> servers;
    for (const ProcessRow* process : ProcessesOf(job.uid)) {
      if (process->member && !process->exited) servers.insert(process->server);
    }
    // Whoever holds a copy must learn it, too, or it would keep what nobody needs any more.
    for (const auto& [key, holders] : job.snapshots) {
      for (const SnapshotInfo& s : holders) servers.insert(s.server);
    }
    for (const ServerId& server : servers) SendTo(server, ProtectedStepRaised{job.uid, newest});
  }
  // What is older than the two newest protected states has done its duty.
  while (job.snapshots.size() > kStatesKept * static_cast<size_t>(entry.spec.pipeline_stages)) {
    auto oldest = job.snapshots.begin();
    for (const SnapshotInfo& s : oldest->second) {
      if (s.tier != SnapshotTier::kStored) SendTo(s.server, DropSnapshots{job.uid, {s}});
    }
    job.snapshots.erase(oldest);
  }
  std::vector<StateId> whole;
  for (const auto& [state, count] : protected_shards) {
    if (count == entry.spec.pipeline_stages) whole.push_back(state);
  }
  if (whole.size() <= 2) return;
  const StateId keep_from = whole[whole.size() - 2];
  for (auto it = job.snapshots.begin(); it != job.snapshots.end();) {
    if (it->first.first >= keep_from) break;
    std::erase_if(it->second, [&](const SnapshotInfo& s) {
      if (s.tier == SnapshotTier::kStored) return false;
      SendTo(s.server, DropSnapshots{job.uid, {s}});
      return true;
    });
    it = it->second.empty() ? job.snapshots.erase(it) : std::next(it);
  }
  std::erase_if(job.copies_asked, [&](const auto& asked) { return std::get<0>(asked.first) < keep_from; });
}

// Persists every n-th state in the holders' stores; a manifest exists only when all its shards are verified there.
void ControllerCore::Impl::AdvanceManifests(JobRow& job) {
  const JobEntry& entry = Entry(job);
  const int64_t interval = entry.spec.persist_interval_steps;
  const everstep::Step newest = entry.manifests.empty() ? everstep::Step(0) : entry.manifests.back().state.step;
  std::map<StateId, Manifest> complete;
  for (const auto& [key, holders] : job.snapshots) {
    const auto& [state, shard] = key;
    if (state.step <= newest || !entry.lineage.OnChain(state)) continue;
    std::vector<SnapshotInfo> stored;
    const SnapshotInfo* source = nullptr;
    for (const SnapshotInfo& s : holders) {
      if (s.tier == SnapshotTier::kStored) stored.push_back(s);
      if (s.tier != SnapshotTier::kStored && source == nullptr) source = &s;
    }
    if (!stored.empty()) {
      Manifest& manifest = complete[state];
      manifest.state = state;
      ++manifest.shard_count;
      manifest.shards.insert(manifest.shards.end(), stored.begin(), stored.end());
    } else if (interval > 0 && state.step.value % interval == 0 && source != nullptr) {
      const ServerRow* holder = FindServer(source->server);
      if (holder == nullptr || holder->dead) continue;
      const CopyAsked asked{source->server, {source->server}};
      if (!job.copies_asked.insert({{state, shard, SnapshotTier::kStored}, asked}).second) continue;
      SendTo(source->server, CopySnapshot{job.uid,
                                          {source->server, source->tier, holder->inventory.transfer_address, state, shard},
                                          source->digest, source->bytes, SnapshotTier::kStored});
    }
  }
  for (auto& [state, manifest] : complete) {
    if (manifest.shard_count != entry.spec.pipeline_stages && !Mutated(Mutation::kCommitIncomplete)) continue;
    manifest.committed = now_.wall;
    Append(ManifestCommitted{job.uid, manifest});
    Push(Measured{Measured::What::kCheckpointCommit, Reason::kCheckpointCommitted, RecoveryPhase::kNone, "committed", 0});
    Note(NoticeLevel::kInfo, Reason::kCheckpointCommitted, "Checkpoint committed", {}, &job,
         {{"step", std::to_string(state.step.value)}});
  }
  while (static_cast<int32_t>(entry.manifests.size()) > std::max(1, entry.spec.checkpoints_kept)) {
    const Manifest oldest = entry.manifests.front();
    Append(ManifestDropped{job.uid, oldest.state});
    for (const SnapshotInfo& s : oldest.shards) {
      SendTo(s.server, DropSnapshots{job.uid, {s}});
      auto it = job.snapshots.find({s.state, s.shard});
      if (it == job.snapshots.end()) continue;
      std::erase_if(it->second, [&](const SnapshotInfo& other) {
        return other.tier == SnapshotTier::kStored && other.server == s.server;
      });
      if (it->second.empty()) job.snapshots.erase(it);
    }
  }
}

}  // namespace everstep
