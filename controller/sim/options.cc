#include "controller/sim/options.h"

#include <algorithm>

#include <fmt/format.h>

#include "proto/base/prng.h"

namespace everstep::sim {
namespace {

// Hostile but legal: whatever ValidatePolicy accepts may be set by an operator.
Policy DrawPolicy(Prng& prng, Profile profile) {
  Policy p;
  if (prng.Chance(1, 3)) return p;
  const int64_t beat_ms = profile == Profile::kLarge ? prng.Between(200, 2000) : prng.Between(20, 800);
  p.heartbeat_interval = Milliseconds(beat_ms);
  p.lease = p.heartbeat_interval * prng.Between(4, 12);
  p.lease = std::max(p.lease, Milliseconds(100));
  p.probe_timeout = Milliseconds(prng.Between(10, 2000));
  p.recovery_budget = Milliseconds(prng.Between(4000, 90000));
  p.process_start_timeout = Seconds(prng.Between(2, 60));
  p.adoption_grace = std::max(2 * p.lease, Milliseconds(prng.Between(200, 15000)));
  p.mass_silence_hold = 2 * p.lease + Milliseconds(prng.Between(0, 8000));
  p.join_settle = Milliseconds(prng.Between(0, 3000));
  p.regrow_delay = Milliseconds(prng.Between(0, 5000));
  return p;
}

}  // namespace

RunOptions DrawOptions(uint64_t seed, Profile profile) {
  Prng prng(seed * 2 + (profile == Profile::kLarge ? 1 : 0));
  RunOptions o;
  o.profile = profile;
  WorldOptions& w = o.world;
  w.seed = prng.Next();
  w.policy = DrawPolicy(prng, profile);
  if (prng.Chance(1, 2)) w.datagram_loss_percent = static_cast<uint32_t>(prng.UpTo(20));
  if (prng.Chance(1, 2)) w.datagram_double_percent = static_cast<uint32_t>(prng.UpTo(10));
  if (prng.Chance(1, 2)) w.datagram_late_percent = static_cast<uint32_t>(prng.UpTo(10));
  if (prng.Chance(1, 2)) w.command_double_percent = static_cast<uint32_t>(prng.UpTo(10));
  if (prng.Chance(1, 2)) w.drift_ppm_max = prng.Between(0, 2000);
  if (prng.Chance(1, 4)) w.link_max = Milliseconds(prng.Between(1, 30));
  if (prng.Chance(1, 4)) w.sync_max = Milliseconds(prng.Between(3, 80));
  if (prng.Chance(1, 4)) w.store_max = Milliseconds(prng.Between(4, 300));
  o.kinds = static_cast<uint32_t>(prng.Next()) | static_cast<uint32_t>(prng.Next());  // each kind in 3 of 4 runs
  if (profile == Profile::kSmall) {
    o.servers = static_cast<int>(prng.Between(4, 9));
    o.devices = prng.Chance(1, 3) ? 2 : 1;
    o.racks = prng.Chance(1, 2) ? static_cast<int>(prng.Between(2, 4)) : 0;
    o.jobs = prng.Chance(1, 3) ? 2 : 1;
    o.lasting = Seconds(6);
    o.fault_min = Milliseconds(1);
    o.fault_max = Milliseconds(500);
    o.fixed_length = prng.Chance(1, 2);
    o.steps = o.fixed_length ? 150 : 1000000;
    w.snapshot_every = prng.Chance(1, 3) ? 0 : prng.Between(1, 4);
    o.focus = prng.Chance(1, 2);
    if (o.focus) {
      // Wide windows between the moments at which ranks learn one fact.
      w.reduce_max = Milliseconds(prng.Between(2, 30));
      w.apply_max = Milliseconds(prng.Between(1, 20));
      o.fault_max = Milliseconds(300);
    }
    return o;
  }
  o.servers = static_cast<int>(prng.Between(32, prng.Chance(1, 4) ? 256 : 96));
  o.devices = prng.Chance(1, 4) ? 2 : 1;
  o.racks = static_cast<int>(prng.Between(3, 12));
  o.jobs = static_cast<int>(prng.Between(1, 3));
  o.lasting = Seconds(600);
  o.fault_min = Seconds(1);
  o.fault_max = Seconds(prng.Between(10, 90));
  o.steps = 1000000;
  w.compute_min = Milliseconds(prng.Between(500, 1500));
  w.compute_max = w.compute_min + Milliseconds(prng.Between(50, 1500));
  w.start_min = Milliseconds(200);
  w.start_max = Milliseconds(prng.Between(500, 5000));
  // Whoever grants a start less time than it takes gets what he asked for.
  w.start_max = std::min<Duration>(w.start_max, w.policy.process_start_timeout / 2);
  w.snapshot_every = prng.Chance(1, 3) ? 0 : prng.Between(1, 10);
  w.replay_check_every = 64;
  return o;
}

std::string Describe(const RunOptions& o) {
  const WorldOptions& w = o.world;
  const Policy& p = w.policy;
  auto ms = [](Duration d) { return d.count() / 1000000; };
  return fmt::format(
      "profile={}{} world_seed={} servers={}x{} racks={} jobs={} steps={} faults_every={}..{}ms kinds={:08x} loss={}% "
      "double={}% late={}% commands_twice={}% drift={}ppm link<={}ms sync<={}ms store<={}ms compute={}..{}ms "
      "start<={}ms snapshot_every={} heartbeat={}ms lease={}ms probe={}ms budget={}ms start_timeout={}ms grace={}ms "
      "hold={}ms settle={}ms regrow={}ms",
      o.profile == Profile::kSmall ? "small" : "large", o.focus ? " focus" : "", w.seed, o.servers, o.devices, o.racks, o.jobs, o.steps,
      ms(o.fault_min), ms(o.fault_max), o.kinds, w.datagram_loss_percent, w.datagram_double_percent,
      w.datagram_late_percent, w.command_double_percent, w.drift_ppm_max, ms(w.link_max), ms(w.sync_max),
      ms(w.store_max), ms(w.compute_min), ms(w.compute_max), ms(w.start_max), w.snapshot_every,
      ms(p.heartbeat_interval), ms(p.lease), ms(p.probe_timeout), ms(p.recovery_budget), ms(p.process_start_timeout),
      ms(p.adoption_grace), ms(p.mass_silence_hold), ms(p.join_settle), ms(p.regrow_delay));
}

// A takeover, two recoveries of which one waits out each deadline, a wait for a checkpoint's holders, a cold start.
Duration LivenessBound(const Policy& p) {
  // Twice the hold: agents that come back before their old streams end wait until the brake lets those go.
  return p.adoption_grace + 2 * p.recovery_budget + p.recovery_budget + p.process_start_timeout + 2 * p.mass_silence_hold +
         p.lease + p.probe_timeout + p.join_settle + Seconds(30);
}

}  // namespace everstep::sim
