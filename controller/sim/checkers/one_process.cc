// Every rank of a generation is held by at most one live process that can act in it.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class OneProcess : public Checker {
 public:
  explicit OneProcess(World& world) : Checker(world, "one_process") {}
  void OnMeshJoined(const RankNode& rank, const Mesh& mesh) override {
    const Mesh::Member& member = mesh.members.at(rank.rank);
    if (member.arrived && member.process != rank.id.value) {
      Violate(fmt::format("two processes connect as rank {} of generation {}", rank.rank, mesh.generation.value));
    }
  }
  void OnResumed(const RankNode& rank) override {
    for (const auto& [id, agent] : world().agents()) {
      for (ProcessId process : agent.processes) {
        const RankNode& other = world().ranks().at(process);
        if (other.id == rank.id || !other.alive || other.job != rank.job || other.rank != rank.rank) continue;
        if (other.mesh_generation != rank.mesh_generation) continue;
        const Mesh* mesh = world().MeshOf(other);
        if (mesh == nullptr || mesh->members.at(other.rank).left) continue;
        Violate(fmt::format("{} and {} both act for rank {} in generation {}", Short(rank.id), Short(other.id), rank.rank,
                            rank.mesh_generation.value));
      }
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeOneProcess(World& world) { return std::make_unique<OneProcess>(world); }

}  // namespace everstep::sim
