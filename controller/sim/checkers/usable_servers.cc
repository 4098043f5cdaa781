// No plan uses a dead server, and none puts a newcomer on a draining one.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class UsableServers : public Checker {
 public:
  explicit UsableServers(World& world) : Checker(world, "usable_servers") {}
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* plan = std::get_if<PlanMade>(&record);
    if (plan == nullptr) return;
    const JobEntry& job = before.jobs.at(plan->job);
    for (const PlannedSlot& slot : plan->slots) {
      auto server = before.servers.find(slot.server);
      if (server == before.servers.end() || server->second.newest <= server->second.dead_upto) {
        Violate("a plan uses the dead server " + slot.server.value);
        continue;
      }
      const bool incumbent = job.assignment && std::any_of(job.assignment->ranks.begin(), job.assignment->ranks.end(),
                                                           [&](const RankAssignment& r) { return r.process == slot.process; });
      if (server->second.draining && !incumbent) Violate("a plan puts a newcomer on the draining server " + slot.server.value);
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeUsableServers(World& world) { return std::make_unique<UsableServers>(world); }

}  // namespace everstep::sim
