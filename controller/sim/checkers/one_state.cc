// 3. All shards of a resumed state, of a committed checkpoint and of the end share one state id on the chain, and their
// bytes are those of the chain.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class OneState : public Checker {
 public:
  explicit OneState(World& world) : Checker(world, "one_state") {}
  void OnResumed(const RankNode& rank) override {
    if (const Mesh* old = world().MeshOf(rank); old != nullptr && old->restores != world().restores()) return;
    const auto step = static_cast<int64_t>(rank.memory.size());
    const Content chain = world().ChainContent(rank.job, step);
    if (rank.torn || rank.memory != chain) {
      Violate(fmt::format("rank {} resumes in generation {} with {}{} where the chain has {}", rank.rank,
                          rank.mesh_generation.value, rank.torn ? "torn " : "", Text(rank.memory), Text(chain)));
    }
    const Mesh* mesh = world().MeshOf(rank);
    if (mesh != nullptr && mesh->passed == 0 && mesh->assignment.recovery_point.step.value != step) {
      Violate(fmt::format("rank {} resumes at step {}, the recovery point is {}", rank.rank, step,
                          mesh->assignment.recovery_point.step.value));
    }
  }
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* committed = std::get_if<ManifestCommitted>(&record);
    if (committed == nullptr) return;
    const Manifest& manifest = committed->manifest;
    const JobEntry& job = before.jobs.at(committed->job);
    if (!job.lineage.OnChain(manifest.state)) Violate("a checkpoint off the chain is committed");
    for (int32_t shard = 0; shard < job.spec.pipeline_stages; ++shard) {
      const bool there = std::any_of(manifest.shards.begin(), manifest.shards.end(), [&](const SnapshotInfo& s) {
        return s.shard.value == shard && s.state == manifest.state;
      });
      if (!there) Violate(fmt::format("the checkpoint of step {} lacks shard {}", manifest.state.step.value, shard));
    }
    Content chain;
    for (int64_t s = 1; s <= manifest.state.step.value; ++s) chain.push_back(job.lineage.AtStep(Step(s)).generation.value);
    for (const SnapshotInfo& s : manifest.shards) {
      if (s.digest != DigestOf(chain)) {
        Violate(fmt::format("shard {} of the checkpoint of step {} holds other bytes than the chain", s.shard.value,
                            manifest.state.step.value));
      }
    }
  }
  void OnFinished(const RankNode& rank) override {
    const Mesh* mesh = world().MeshOf(rank);
    if (mesh == nullptr || mesh->restores != world().restores()) return;  // of a history that a restored ledger lost
    // A rank that was cut off with all of its job may come to an end that counts for nothing.
    auto job = world().durable().jobs.find(rank.job);
    if (job != world().durable().jobs.end() && rank.mesh_generation < job->second.lineage.newest()) return;
    auto first = world().final_contents().find(rank.job);
    if (first == world().final_contents().end() || rank.memory != first->second) Violate("ranks finish with different states");
    if (rank.memory != world().ChainContent(rank.job, static_cast<int64_t>(rank.memory.size()))) {
      Violate("a rank finishes off the chain");
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeOneState(World& world) { return std::make_unique<OneState>(world); }

}  // namespace everstep::sim
