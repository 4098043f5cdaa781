// What to do when servers are lost, added or change their speed while a job runs: swap, shrink, re-shape, wait or keep, by
// predicted loss. Moving state is part of the cost, so incumbents keep their place and their state unless moving pays.
// A pure function; called by the controller's core and by the command line, thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/core/planner/plan.h"

namespace everstep::planner {

// The plan that ran until now. Its servers are named, since the new snapshot numbers them anew.
struct Running {
  Layout layout;
  std::vector<ServerId> servers;        // by the layout's server index
  double step_seconds = 0;              // measured or predicted
  int64_t steps_since_change = 0;
};

// A copy of layers that is in no rank's memory: staged on a server, or in a store.
struct StateCopy {
  ServerId server;                      // empty: the object store
  int32_t layer_begin = 0, layer_end = 0;
  int64_t steps_behind = 0;             // these steps are computed once more
};

struct ReplanInput {
  Running running;
  std::vector<StateCopy> copies;
  std::vector<ServerId> warm;           // spares where a process of this job waits
  double detect_seconds = 1.5;
  double connect_seconds = 1;           // communicators, digest
  double start_cold_seconds = 15, start_warm_seconds = 0.3;
  double store_bandwidth = 1e9;         // of the object store, all readers together
  double horizon_seconds = 3600;        // expected time until the next change
  double wait_seconds = 0;              // until what was lost is expected back; 0: not expected
  double gain_min = 0.05;               // restraint: without a loss, throughput must rise by this
  int64_t dwell_steps = 50;             // and the last change must be this long ago
  int64_t work_budget = 2'000'000;      // of the search for another shape, see SearchLimits
};

enum class OptionKind { kKeep, kReshare, kSwap, kSwapAndCut, kShrink, kShrinkAndMove, kReshape, kWait };
const char* OptionName(OptionKind kind);

struct ReplanOption {
  OptionKind kind = OptionKind::kKeep;
  bool possible = false;
  std::string reason;                   // why not; or what it does, in numbers
  Layout layout;
  Evaluation evaluation;
  double bytes_moved = 0;
  int32_t groups_moved = 0;             // groups of devices that load state
  int32_t groups_kept = 0;              // that go on with what they hold
  double transfer_seconds = 0;
  double recovery_seconds = 0;
  double throughput = 0;                // samples per second afterwards
  double loss_samples = 0;              // recovery * throughput before + horizon * (before - after)
};

struct Replan {
  size_t chosen = 0;
  std::vector<ReplanOption> options;    // in the order of OptionKind
  int32_t groups_lost = 0;
  double throughput_before = 0;
  std::string message;                  // the decision in a sentence
  const ReplanOption& choice() const { return options[chosen]; }
};

// kInvalidArgument: the running plan does not belong to this job, or a time is not a number. kResourceExhausted: nothing
// is possible; the message says why for each option.
Result<Replan> MakeReplan(const CostModel& model, const ReplanInput& input);

}  // namespace everstep::planner
