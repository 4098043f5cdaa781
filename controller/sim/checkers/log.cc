// 14. The log of the ledger has no hole, whatever became of writes whose outcome is unknown.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Log : public Checker {
 public:
  explicit Log(World& world) : Checker(world, "log") {}
  void OnControllerStarted() override {
    durable_ = world().durable().applied;
    if (world().decided().applied != durable_) Violate("a controller starts with more than the log holds");
  }
  void OnDurable(const Record&) override {
    if (world().durable().applied != durable_.Next()) Violate("the durable log has a hole");
    durable_ = world().durable().applied;
  }

 private:
  LedgerSequence durable_;
};

}  // namespace

std::unique_ptr<Checker> MakeLog(World& world) { return std::make_unique<Log>(world); }

}  // namespace everstep::sim
