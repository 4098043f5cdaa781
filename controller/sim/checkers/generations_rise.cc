// Generations only rise: in the ledger, and on each rank.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class GenerationsRise : public Checker {
 public:
  explicit GenerationsRise(World& world) : Checker(world, "generations_rise") {}
  void OnDecided(const Record& record, const LedgerState& before) override {
    if (const auto* fenced = std::get_if<GenerationFenced>(&record)) {
      if (fenced->generation <= before.jobs.at(fenced->job).fenced) Violate("a generation does not rise");
    } else if (const auto* point = std::get_if<RecoveryPointDecided>(&record)) {
      if (point->generation <= before.jobs.at(point->job).lineage.newest()) {
        Violate(fmt::format("the recovery point of generation {} is decided twice", point->generation.value));
      }
    } else if (const auto* registered = std::get_if<ServerRegistered>(&record)) {
      auto server = before.servers.find(registered->server);
      if (server != before.servers.end() && registered->incarnation <= server->second.newest) Violate("an incarnation does not rise");
    }
  }
  void OnResumed(const RankNode& rank) override {
    Generation& newest = resumed_[rank.id];
    if (rank.mesh_generation <= newest) {
      Violate(fmt::format("{} resumes generation {} after {}", Short(rank.id), rank.mesh_generation.value, newest.value));
    }
    newest = rank.mesh_generation;
  }

 private:
  std::map<ProcessId, Generation> resumed_;
};

}  // namespace

std::unique_ptr<Checker> MakeGenerationsRise(World& world) { return std::make_unique<GenerationsRise>(world); }

}  // namespace everstep::sim
