// What a rank answers to Collect is what its memory holds.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class HonestReports : public Checker {
 public:
  explicit HonestReports(World& world) : Checker(world, "honest_reports") {}
  void OnCollectAnswered(const RankNode& rank, const CollectAnswer& answer) override {
    const RankReport& report = answer.report;
    if (rank.torn && report.memory_valid) Violate(fmt::format("rank {} reports torn memory as valid", rank.rank));
    if (report.memory_valid && (report.applied.step.value != static_cast<int64_t>(rank.memory.size()) ||
                                (!rank.memory.empty() && report.applied.generation.value != rank.memory.back()))) {
      Violate(fmt::format("rank {} reports step {} and holds {}", rank.rank, report.applied.step.value, Text(rank.memory)));
    }
    if (report.gradients.value != 0 && rank.gradients != report.gradients.value) {
      Violate(fmt::format("rank {} reports gradients that it does not hold", rank.rank));
    }
    if (answer.generation < rank.answered.generation) Violate("an answer of a lower Collect follows a higher one");
    if (rank.doing == RankNode::Doing::kReducing || rank.doing == RankNode::Doing::kVoting ||
        rank.doing == RankNode::Doing::kReceiving || rank.doing == RankNode::Doing::kServing) {
      Violate(fmt::format("rank {} answers Collect({}) while a call is still inside the mesh", rank.rank, answer.generation.value));
    }
    if (const Mesh* mesh = world().MeshOf(rank); mesh != nullptr && !answer.planned && mesh->generation < answer.generation) {
      const Mesh::Member& member = mesh->members.at(rank.rank);
      if (member.process == rank.id.value && !member.left) {
        Violate(fmt::format("rank {} answers Collect({}) before it has left its mesh", rank.rank, answer.generation.value));
      }
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeHonestReports(World& world) { return std::make_unique<HonestReports>(world); }

}  // namespace everstep::sim
