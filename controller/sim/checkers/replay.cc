// Replay equals live: the records add up to the state that the controller works with.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Replay : public Checker {
 public:
  explicit Replay(World& world) : Checker(world, "replay") {}
  void OnReplayed() override {
    if (world().controller_up() && !(world().decided() == world().live())) Violate("replay does not equal the live ledger");
  }
};

}  // namespace

std::unique_ptr<Checker> MakeReplay(World& world) { return std::make_unique<Replay>(world); }

}  // namespace everstep::sim
