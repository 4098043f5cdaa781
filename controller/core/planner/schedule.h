// Schedules of pipelines: the 1F1B recurrence, which the cost model uses, and an event simulation of any failure
// pattern, which checks it and shows what re-routing, split backward passes and staggered optimizer steps would bring.
// Pure functions; times are whole ticks. Thread-compatible.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace everstep::planner {

// A stage's times for one micro-batch, and the transfer to the next stage (the same both ways).
struct StageTimes {
  double forward = 0;
  double backward = 0;
  double transfer = 0;
};

// The time from the first forward to the last backward of 1F1B: stage s starts min(P - s, n) forwards, then one backward
// and one forward in turn. Operations start when their input is there and the stage is free. O(P * n).
double OneFOneB(const std::vector<StageTimes>& stages, int64_t micro_batches);

// The same in closed form: fill + (n - 1) * period, where period is the greatest mean over runs of neighbouring stages
// of compute and transfers, and fill the time of one micro-batch alone. Never below the recurrence by more than
// rounding; above it by a few percent at most when stages differ (the unit tests state the bound).
struct ClosedForm {
  double fill = 0;
  double period = 0;
  double Total(int64_t micro_batches) const { return fill + static_cast<double>(micro_batches - 1) * period; }
};
ClosedForm OneFOneBClosedForm(const std::vector<StageTimes>& stages);

// A cost of stages that a public planner of pipeline templates uses (docs/planner.md): rightmost slowest stage k,
// total = sum(w) + (n - S + k - 1) * w_k + sum of w from k on.
double TemplateCost(const std::vector<double>& stage_times, int64_t micro_batches);

// The event simulation.
struct ScheduleSpec {
  int32_t stages = 1;
  int32_t pipelines = 1;
  int32_t micro_batches = 1;                        // of each pipeline
  int64_t forward = 1, backward_input = 1, backward_weight = 1, transfer = 0;  // ticks
  std::vector<std::pair<int32_t, int32_t>> failed;  // (stage, pipeline)
  bool split_backward = false;                      // Bi and Bw are operations of their own
  bool staggered = false;                           // a stage steps when it has finished, not when all have
  int32_t in_flight_factor = 1;                     // forwards in flight at stage s: at most (P - s) * factor
  int32_t steps = 6;
};
struct ScheduleResult {
  double period = 0;                 // ticks of a step, after two steps of warming up
  std::vector<int64_t> step_ends;
  int32_t in_flight_max = 0;         // on any worker
};
// kInvalidArgument: sizes out of bounds; kFailedPrecondition: a stage has no live worker.
Result<ScheduleResult> SimulateSchedule(const ScheduleSpec& spec);

}  // namespace everstep::planner
