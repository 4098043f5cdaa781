// 7. No byte is served after its source's state changed.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class ServedBytes : public Checker {
 public:
  explicit ServedBytes(World& world) : Checker(world, "served_bytes") {}
  void OnServed(const RankNode& source, const Content& pinned) override {
    if (source.torn || source.memory != pinned) {
      Violate(fmt::format("rank {} serves {} and holds {}{}", source.rank, Text(pinned), source.torn ? "torn " : "",
                          Text(source.memory)));
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeServedBytes(World& world) { return std::make_unique<ServedBytes>(world); }

}  // namespace everstep::sim
