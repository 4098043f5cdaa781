// One whole run: a cluster drawn from a seed, faults throughout, then everything is healed and each job must step again
// within a bound, then all jobs end and nothing of them may be left. Used by tests/sim.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "controller/sim/options.h"
#include "controller/sim/world.h"

namespace everstep::sim {

struct RunReport {
  uint64_t seed = 0;
  std::string options;               // one line
  int faults = 0;
  std::map<std::string, int> fault_counts;
  int64_t steps = 0;                 // votes that passed
  uint64_t generations = 0;
  uint64_t events = 0, heartbeats = 0;
  uint64_t trace_hash = 0;
  std::set<std::string> marks;
  std::vector<Violation> violations;
  std::vector<std::string> trace;    // when asked for
  Duration healing{};                // from the heal to a step of every job
};

struct RunSettings {
  bool keep_trace = false;
  ShellMistake mistake = ShellMistake::kNone;
};

RunReport RunSeed(uint64_t seed, Profile profile, RunSettings settings = {});
RunReport RunWith(uint64_t seed, RunOptions options, RunSettings settings = {});

}  // namespace everstep::sim
