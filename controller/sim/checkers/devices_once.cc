// No device is assigned twice, over all jobs.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class DevicesOnce : public Checker {
 public:
  explicit DevicesOnce(World& world) : Checker(world, "devices_once") {}
  // A plan may still lose its devices to a job with a higher claim; an assignment is for good.
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* made = std::get_if<AssignmentMade>(&record);
    if (made == nullptr) return;
    const Assignment& a = made->assignment;
    std::set<std::pair<ServerId, DeviceIndex>> used;
    for (const auto& [uid, job] : before.jobs) {
      if (uid == a.job || job.ended || !job.assignment || job.assignment->generation != job.fenced) continue;
      for (const RankAssignment& r : job.assignment->ranks) {
        // A server that died since then took its ranks with it.
        auto server = before.servers.find(r.server);
        auto assigned = incarnations_.find({uid, job.assignment->generation, r.server});
        if (server == before.servers.end() || server->second.newest <= server->second.dead_upto) continue;
        if (assigned != incarnations_.end() && assigned->second != server->second.newest) continue;
        const RankNode* rank = world().ranks().contains(r.process) ? &world().ranks().at(r.process) : nullptr;
        if (rank == nullptr || !rank->reaped) used.emplace(r.server, r.device);
      }
    }
    for (const RankAssignment& r : a.ranks) {
      if (!used.emplace(r.server, r.device).second) {
        Violate(fmt::format("device {} of {} is assigned twice", r.device.value, r.server.value));
      }
      auto server = before.servers.find(r.server);
      if (server != before.servers.end()) incarnations_[{a.job, a.generation, r.server}] = server->second.newest;
    }
  }

 private:
  std::map<std::tuple<JobUid, Generation, ServerId>, Incarnation> incarnations_;
};

}  // namespace

std::unique_ptr<Checker> MakeDevicesOnce(World& world) { return std::make_unique<DevicesOnce>(world); }

}  // namespace everstep::sim
