// The number of generations is bounded by the number of faults: no flapping. After everything is healed a job needs few.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class BoundedRecoveries : public Checker {
 public:
  explicit BoundedRecoveries(World& world) : Checker(world, "bounded_recoveries") {}
  void OnHealed() override {
    healed_ = true;
    fences_.clear();
  }
  void OnFault(const std::string&) override {
    if (healed_) {
      healed_ = false;
      fences_.clear();
    }
  }
  void OnDecided(const Record& record, const LedgerState&) override {
    const auto* fenced = std::get_if<GenerationFenced>(&record);
    if (fenced == nullptr) return;
    const int count = ++fences_[fenced->job];
    const int allowed = healed_ ? 16 : 8 + 8 * world().faults();
    if (count == allowed + 1) Violate(fmt::format("{} generations after {} faults{}", count, world().faults(), healed_ ? ", all healed" : ""));
  }

 private:
  std::map<JobUid, int> fences_;
  bool healed_ = false;
};

}  // namespace

std::unique_ptr<Checker> MakeBoundedRecoveries(World& world) { return std::make_unique<BoundedRecoveries>(world); }

}  // namespace everstep::sim
