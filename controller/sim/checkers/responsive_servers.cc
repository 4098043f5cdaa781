// A server that runs and is connected in every way is never declared dead, once it has been so for a lease, a probe and two
// seconds.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class ResponsiveServers : public Checker {
 public:
  explicit ResponsiveServers(World& world) : Checker(world, "responsive_servers") {}
  void OnControllerStarted() override { started_ = world().now(); }
  void OnDecided(const Record& record, const LedgerState&) override {
    const auto* died = std::get_if<ServerDied>(&record);
    if (died == nullptr || died->reason == Reason::kServerRestarted) return;
    auto agent = world().agents().find(died->server);
    if (agent == world().agents().end() || agent->second.well_since == kNever) return;
    const Policy& policy = world().options().policy;
    const Duration bound = policy.lease + policy.probe_timeout + Seconds(2);
    const Duration well = world().now() - std::max(started_, agent->second.well_since);
    if (well > bound) {
      Violate(fmt::format("{} is declared dead ({}) although it has answered for {:.1f} s", died->server.value,
                          ReasonName(died->reason), ToSeconds(well)));
    }
  }

 private:
  Instant started_{};
};

}  // namespace

std::unique_ptr<Checker> MakeResponsiveServers(World& world) { return std::make_unique<ResponsiveServers>(world); }

}  // namespace everstep::sim
