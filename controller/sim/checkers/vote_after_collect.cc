// 1. No vote completes with a contribution made after its rank answered a higher Collect.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class VoteAfterCollect : public Checker {
 public:
  explicit VoteAfterCollect(World& world) : Checker(world, "vote_after_collect") {}
  void OnVotePassed(const Mesh& mesh) override {
    for (const auto& [number, m] : mesh.members) {
      if (m.answered > mesh.generation) {
        Violate(fmt::format("step {} of generation {} passes with a ballot that rank {} cast after it had answered Collect({})",
                            mesh.passed, mesh.generation.value, number, m.answered.value));
      }
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeVoteAfterCollect(World& world) { return std::make_unique<VoteAfterCollect>(world); }

}  // namespace everstep::sim
