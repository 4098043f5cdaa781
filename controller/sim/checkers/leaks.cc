// When all jobs have ended nothing of them is left: no process, no copy in memory, no reservation, no device.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class Leaks : public Checker {
 public:
  explicit Leaks(World& world) : Checker(world, "leaks") {}
  void OnEnd() override {
    for (const auto& [id, agent] : world().agents()) {
      for (ProcessId process : agent.processes) Violate(fmt::format("{} still runs on {}", Short(process), id.value));
      if (!agent.peers.empty()) Violate(fmt::format("{} still holds {} peer copies", id.value, agent.peers.size()));
      if (!agent.staging.empty()) Violate(fmt::format("{} still holds {} staged slots", id.value, agent.staging.size()));
      if (!agent.descriptors.empty()) Violate(fmt::format("{} still holds {} descriptors", id.value, agent.descriptors.size()));
      if (agent.custody && agent.custody->peer_bytes() != 0) Violate(id.value + " still counts bytes of peer copies");
    }
    for (const auto& [uid, job] : world().decided().jobs) {
      if (!job.ended) Violate("a job has not ended");
      if (job.plan) Violate("an ended job still reserves devices");
    }
    for (const ServerView& server : world().View().servers) {
      if (server.devices_free != static_cast<int32_t>(server.inventory.devices.size())) {
        Violate(fmt::format("{} of {} devices of {} are free", server.devices_free, server.inventory.devices.size(), server.server.value));
      }
    }
  }
};

}  // namespace

std::unique_ptr<Checker> MakeLeaks(World& world) { return std::make_unique<Leaks>(world); }

}  // namespace everstep::sim
