// A job ends only for a reason: it succeeds when every step is done, and fails only by its own program or an operator.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Ends : public Checker {
 public:
  explicit Ends(World& world) : Checker(world, "ends") {}
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* ended = std::get_if<JobEnded>(&record);
    if (ended == nullptr || before.jobs.at(ended->job).spec.opaque) return;
    if (ended->outcome == JobState::kSucceeded) {
      auto content = world().final_contents().find(ended->job);
      auto wanted = world().steps_wanted().find(ended->job);
      if (content == world().final_contents().end() || wanted == world().steps_wanted().end() ||
          static_cast<int64_t>(content->second.size()) != wanted->second) {
        Violate("a job succeeds before its last step");
      }
    } else if (ended->outcome == JobState::kFailed) {
      // A device that breaks again and again under every start ends the job, too: nothing else is left to try.
      const bool no_device = ended->reason == Reason::kNoCapacity && world().fault_counts().contains("device lost");
      const bool by_program = no_device || world().fault_counts().contains("program crashed") || world().program_fails.contains(ended->job);
      if (!by_program) Violate(fmt::format("a job is given up: {} ({})", ended->message, ReasonName(ended->reason)));
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeEnds(World& world) { return std::make_unique<Ends>(world); }

}  // namespace everstep::sim
