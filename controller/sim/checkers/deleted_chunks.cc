// 8. No live checkpoint refers to a deleted chunk and no restore reads one, however late deletes land.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class DeletedChunks : public Checker {
 public:
  explicit DeletedChunks(World& world) : Checker(world, "deleted_chunks") {}
  void OnChunkGone(const AgentNode& agent, const checkpoint::ChunkName& name) override {
    for (const auto& [key, stored] : agent.disk.copies) {
      if (stored.name != name) continue;
      Violate(fmt::format("a delete on {} takes a chunk that the copy of step {} refers to", agent.id.value,
                          key.second.state.step.value));
    }
  }
  void OnChunkMissing(const AgentNode& agent, const checkpoint::ChunkName&) override {
    Violate(fmt::format("{} needs a chunk that was deleted", agent.id.value));
  }
};

}  // namespace

std::unique_ptr<Checker> MakeDeletedChunks(World& world) { return std::make_unique<DeletedChunks>(world); }

}  // namespace everstep::sim
