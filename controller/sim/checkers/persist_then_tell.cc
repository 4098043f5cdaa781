// Persist, then tell: a command leaves only after the record that makes it true is durable.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class PersistThenTell : public Checker {
 public:
  explicit PersistThenTell(World& world) : Checker(world, "persist_then_tell") {}
  void OnCommandLeft(const ServerId& to, const SendCommand& sent) override {
    const LedgerState& durable = world().durable();
    auto job_of = [&](const JobUid& uid) -> const JobEntry* {
      auto it = durable.jobs.find(uid);
      return it == durable.jobs.end() ? nullptr : &it->second;
    };
    bool kept = durable.term >= sent.header.term;
    if (const auto* assign = std::get_if<AssignProcesses>(&sent.command)) {
      const JobEntry* job = job_of(assign->assignment.job);
      kept &= job != nullptr && job->assignment && job->assignment->generation >= assign->assignment.generation &&
              job->lineage.newest() >= assign->assignment.generation;
      if (kept && job->assignment->generation == assign->assignment.generation) kept = *job->assignment == assign->assignment;
    } else if (const auto* fence = std::get_if<FenceProcesses>(&sent.command)) {
      const JobEntry* job = job_of(fence->job);
      kept &= job != nullptr && job->fenced >= fence->generation;
    } else if (const auto* prepare = std::get_if<PrepareProcesses>(&sent.command)) {
      const JobEntry* job = job_of(prepare->job);
      kept &= job != nullptr && job->fenced >= prepare->generation;
    } else if (const auto* resume = std::get_if<ResumeProcesses>(&sent.command)) {
      const JobEntry* job = job_of(resume->job);
      kept &= job != nullptr && job->resumed >= resume->generation;
    } else if (const auto* spawn = std::get_if<SpawnProcess>(&sent.command)) {
      const JobEntry* job = job_of(spawn->job);
      kept &= job != nullptr && (spawn->standby || job->fenced >= spawn->generation);
    } else if (const auto* welcome = std::get_if<Welcome>(&sent.command)) {
      auto server = durable.servers.find(to);
      kept &= server != durable.servers.end() && server->second.newest >= welcome->incarnation;
    }
    if (!kept) Violate(fmt::format("{} is told before it is durable: {}", to.value, Describe(sent.command)));
  }
};

}  // namespace

std::unique_ptr<Checker> MakePersistThenTell(World& world) { return std::make_unique<PersistThenTell>(world); }

}  // namespace everstep::sim
