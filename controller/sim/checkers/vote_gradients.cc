// 2. No vote says apply unless the gradients of every member are complete; no apply without them.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class VoteGradients : public Checker {
 public:
  explicit VoteGradients(World& world) : Checker(world, "vote_gradients") {}
  void OnVotePassed(const Mesh& mesh) override {
    for (const auto& [number, m] : mesh.members) {
      if (!m.complete_gradients || m.voted < mesh.passed) {
        Violate(fmt::format("step {} passes although the gradients of rank {} are not complete", mesh.passed, number));
      }
    }
    if (mesh.restores != world().restores()) return;  // of a history that a restored ledger has never heard of
    const LedgerState& durable = world().durable();
    auto job = durable.jobs.find(mesh.job);
    if (job == durable.jobs.end() || job->second.lineage.newest() < mesh.generation) {
      Violate(fmt::format("a vote passes in generation {}, whose recovery point is not durable", mesh.generation.value));
    }
  }
  void OnApplying(const RankNode& rank) override {
    if (!rank.gradients) Violate(fmt::format("rank {} applies gradients that are not complete", rank.rank));
  }
};

}  // namespace

std::unique_ptr<Checker> MakeVoteGradients(World& world) { return std::make_unique<VoteGradients>(world); }

}  // namespace everstep::sim
