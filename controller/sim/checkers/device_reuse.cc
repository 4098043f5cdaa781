// 13. No device and no process id is used again before the process that had it is reaped.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class DeviceReuse : public Checker {
 public:
  explicit DeviceReuse(World& world) : Checker(world, "device_reuse") {}
  void OnProcessStarting(const AgentNode& agent, const SpawnProcess& spawn) override {
    for (ProcessId id : agent.processes) {
      const RankNode& other = world().ranks().at(id);
      if (other.device == spawn.device) {
        Violate(fmt::format("device {} of {} is used again before {} is reaped", spawn.device.value, agent.id.value, Short(id)));
      }
    }
    if (world().ranks().contains(spawn.process)) Violate(Short(spawn.process) + " is started twice");
  }
};

}  // namespace

std::unique_ptr<Checker> MakeDeviceReuse(World& world) { return std::make_unique<DeviceReuse>(world); }

}  // namespace everstep::sim
