#include "controller/sim/run.h"

#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/fault_script.h"

namespace everstep::sim {
namespace {

JobSpec DrawSpec(Prng& prng, const RunOptions& o, int index) {
  JobSpec spec;
  spec.name = fmt::format("job{}", index);
  spec.program = "/bin/train";
  spec.ranks_per_server = o.devices;
  spec.pipeline_stages = prng.Chance(1, 3) ? 2 : 1;
  // All jobs together leave a third of the cluster as spares.
  const int most = std::max(2, o.servers * 2 / 3 / o.jobs);
  spec.servers_wanted = static_cast<int>(prng.Between(2, std::min(most, o.profile == Profile::kLarge ? 24 : 6)));
  spec.servers_min = static_cast<int>(prng.Between(1, std::max(1, spec.servers_wanted / 2)));
  spec.micro_batch_count = static_cast<int>(prng.Between(spec.servers_wanted * o.devices, 96));
  spec.priority = static_cast<int>(prng.UpTo(2));
  spec.standbys_wanted = static_cast<int>(prng.UpTo(2));
  spec.restarts_max = 1000000;
  spec.termination_grace = Milliseconds(prng.Between(0, 3000));
  if (o.world.snapshot_every > 0 && prng.Chance(2, 3)) spec.persist_interval_steps = o.world.snapshot_every * prng.Between(1, 8);
  spec.checkpoints_kept = static_cast<int>(prng.Between(1, 3));
  return spec;
}

}  // namespace

RunReport RunSeed(uint64_t seed, Profile profile, RunSettings settings) {
  return RunWith(seed, DrawOptions(seed, profile), settings);
}

RunReport RunWith(uint64_t seed, RunOptions options, RunSettings settings) {
  options.world.mistake = settings.mistake;
  RunReport report;
  report.seed = seed;
  report.options = Describe(options);
  World world(options.world);
  world.KeepTrace(settings.keep_trace);
  for (int i = 1; i <= options.servers; ++i) {
    const std::string domain = options.racks > 0 ? fmt::format("rack{}", i % options.racks) : "";
    world.AddServer(fmt::format("s{:03d}", i), options.devices, domain);
  }
  Prng& prng = world.fault_prng();
  std::vector<ScriptedJob> jobs;
  for (int i = 0; i < options.jobs; ++i) {
    ScriptedJob job;
    job.spec = DrawSpec(prng, options, i);
    job.steps = options.steps;
    if (const std::optional<JobUid> uid = world.TrySubmit(job.spec, job.steps)) {
      job.uid = *uid;
      jobs.push_back(job);
    }
  }
  FaultScript(world, options, jobs).Run();

  // Liveness: everything is healed, and each job steps again.
  world.HealAll();
  const Instant healed = world.now();
  std::map<JobUid, int64_t> before;
  for (const ScriptedJob& job : jobs) before[job.uid] = world.steps_passed(job.uid);
  auto alive = [&] {
    return std::all_of(jobs.begin(), jobs.end(), [&](const ScriptedJob& job) {
      return world.EndOf(job.uid) || world.steps_passed(job.uid) > before[job.uid] || !world.durable().jobs.contains(job.uid);
    });
  };
  const Duration bound = LivenessBound(options.world.policy) + 8 * options.world.compute_max;
  if (!world.RunUntil(alive, bound)) {
    for (const ScriptedJob& job : jobs) {
      if (world.EndOf(job.uid) || world.steps_passed(job.uid) > before[job.uid]) continue;
      const std::optional<JobView> view = world.ViewOf(job.uid);
      world.Violate("liveness", fmt::format("{} does not step within {:.0f} s after everything is healed: {}", job.spec.name,
                                            ToSeconds(bound), view ? view->message : "no controller"));
    }
  }
  report.healing = world.now() - healed;
  if (options.fixed_length) {
    world.RunUntil([&] {
      return std::all_of(jobs.begin(), jobs.end(), [&](const ScriptedJob& job) {
        return world.EndOf(job.uid) || !world.durable().jobs.contains(job.uid);
      });
    }, bound + options.steps * (options.world.compute_max + 4 * options.world.link_max + Milliseconds(30)));
    for (const ScriptedJob& job : jobs) {
      if (!world.EndOf(job.uid) && world.durable().jobs.contains(job.uid)) world.Violate("liveness", job.spec.name + " does not finish");
    }
  }
  // Everything ends, and nothing is left.
  for (const auto& [uid, entry] : LedgerState(world.durable()).jobs) {
    if (!entry.ended) world.Cancel(uid);
  }
  world.RunFor(Seconds(12) + options.world.start_max + options.world.store_max);
  world.CheckEnd();

  report.faults = world.faults();
  report.fault_counts = world.fault_counts();
  for (const auto& [uid, entry] : world.durable().jobs) {
    report.steps += world.steps_passed(uid);
    report.generations += entry.fenced.value;
  }
  report.events = world.events_run();
  report.heartbeats = world.heartbeats();
  report.trace_hash = world.trace_hash();
  report.marks = world.marks();
  report.violations = world.violations();
  report.trace = world.trace();
  return report;
}

}  // namespace everstep::sim
