// 10. A step that does not count leaves no trace: all registered state that the program changed before the vote is put back.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Discard : public Checker {
 public:
  explicit Discard(World& world) : Checker(world, "discard") {}
  void OnResumed(const RankNode& rank) override {
    if (rank.drawn != static_cast<int64_t>(rank.memory.size())) {
      Violate(fmt::format("rank {} resumes at step {} with random numbers of {} steps drawn", rank.rank, rank.memory.size(),
                          rank.drawn));
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeDiscard(World& world) { return std::make_unique<Discard>(world); }

}  // namespace everstep::sim
