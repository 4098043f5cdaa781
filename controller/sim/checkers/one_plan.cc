// 5. One (term, plan) per generation number: whoever allotted it plans it, one assignment is made for it, and all ranks that
// meet under it hold that assignment.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class OnePlan : public Checker {
 public:
  explicit OnePlan(World& world) : Checker(world, "one_plan") {}
  void OnControllerStarted() override {
    // What a crashed controller decided on and never made durable was never told, and its numbers may be given again.
    if (restores_ != world().restores()) {
      restores_ = world().restores();
      allotted_.clear();
      tokens_.clear();
    }
    std::erase_if(allotted_, [&](const auto& entry) {
      auto job = world().decided().jobs.find(entry.first.first);
      return job == world().decided().jobs.end() || job->second.fenced < entry.first.second;
    });
    for (auto& [key, allotted] : allotted_) {
      const JobEntry& job = world().decided().jobs.at(key.first);
      if (job.fenced == key.second) allotted.assigned = job.assignment && job.assignment->generation == key.second;
    }
  }
  void OnDecided(const Record& record, const LedgerState& before) override {
    if (const auto* fenced = std::get_if<GenerationFenced>(&record)) {
      auto [it, inserted] = allotted_.emplace(std::make_pair(fenced->job, fenced->generation), Allotted{before.term, false});
      if (!inserted) Violate(fmt::format("generation {} is allotted twice", fenced->generation.value));
    } else if (const auto* plan = std::get_if<PlanMade>(&record)) {
      auto it = allotted_.find({plan->job, plan->generation});
      if (it == allotted_.end()) return;
      if (it->second.term != before.term) {
        Violate(fmt::format("term {} plans generation {} of term {}", before.term.value, plan->generation.value,
                            it->second.term.value));
      }
      if (it->second.assigned) Violate(fmt::format("generation {} is planned again after its Assign", plan->generation.value));
    } else if (const auto* made = std::get_if<AssignmentMade>(&record)) {
      auto it = allotted_.find({made->assignment.job, made->assignment.generation});
      if (it == allotted_.end()) return;
      if (it->second.assigned) Violate(fmt::format("generation {} is assigned twice", made->assignment.generation.value));
      if (it->second.term != before.term) Violate("a generation is assigned by another term than the one that allotted it");
      it->second.assigned = true;
    } else if (const auto* resumed = std::get_if<GenerationResumed>(&record)) {
      auto it = allotted_.find({resumed->job, resumed->generation});
      if (it != allotted_.end() && it->second.term != before.term) Violate("a generation is resumed by another term");
    }
  }
  void OnMeshJoined(const RankNode& rank, const Mesh& mesh) override {
    auto [it, inserted] = tokens_.emplace(std::make_pair(mesh.job, mesh.generation), mesh.assignment.token);
    if (!inserted && it->second != mesh.assignment.token) {
      Violate(fmt::format("rank {} follows another assignment of generation {}", rank.rank, mesh.generation.value));
    }
  }

 private:
  struct Allotted { Term term; bool assigned = false; };
  std::map<std::pair<JobUid, Generation>, Allotted> allotted_;
  std::map<std::pair<JobUid, Generation>, Token> tokens_;
  uint64_t restores_ = 0;
};

}  // namespace

std::unique_ptr<Checker> MakeOnePlan(World& world) { return std::make_unique<OnePlan>(world); }

}  // namespace everstep::sim
