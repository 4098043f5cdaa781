// Samples are consumed exactly once along the chain: the shares of each generation cover the global batch once per stage, the
// global batch never changes, and no step of the chain is voted for by two generations.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Samples : public Checker {
 public:
  explicit Samples(World& world) : Checker(world, "samples") {}
  void OnControllerStarted() override {
    if (restores_ == world().restores()) return;
    restores_ = world().restores();
    voted_.clear();
  }
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* made = std::get_if<AssignmentMade>(&record);
    if (made == nullptr) return;
    const Assignment& a = made->assignment;
    if (a.micro_batch_count != before.jobs.at(a.job).spec.micro_batch_count) Violate("the global batch changes");
    std::map<int32_t, std::vector<int>> consumed;
    for (const RankAssignment& r : a.ranks) {
      std::vector<int>& counts = consumed[r.pp];
      counts.resize(static_cast<size_t>(a.micro_batch_count));
      for (int32_t i = r.micro_batch_first; i < r.micro_batch_first + r.micro_batch_count; ++i) {
        if (i < 0 || i >= a.micro_batch_count) {
          Violate("a share lies outside the global batch");
          return;
        }
        ++counts[static_cast<size_t>(i)];
      }
    }
    for (const auto& [stage, counts] : consumed) {
      if (std::any_of(counts.begin(), counts.end(), [](int n) { return n != 1; })) {
        Violate(fmt::format("generation {} does not consume each micro-batch once in stage {}", a.generation.value, stage));
      }
    }
  }
  void OnVotePassed(const Mesh& mesh) override {
    if (mesh.restores != world().restores()) return;  // of a history that a restored ledger has never heard of
    // A vote that passes makes its step part of the history: the chain must say so, or lose it to a later generation.
    auto [it, inserted] = voted_.emplace(std::make_pair(mesh.job, mesh.passed), mesh.generation);
    if (!inserted && it->second > mesh.generation) {
      Violate(fmt::format("step {} passes in generation {} after it passed in {}", mesh.passed, mesh.generation.value, it->second.value));
    }
    it->second = mesh.generation;
  }

 private:
  std::map<std::pair<JobUid, int64_t>, Generation> voted_;
  uint64_t restores_ = 0;
};

}  // namespace

std::unique_ptr<Checker> MakeSamples(World& world) { return std::make_unique<Samples>(world); }

}  // namespace everstep::sim
