// From an immutable snapshot to a plan, or to a refusal with its reason: which device plays which stage of which replica,
// how many micro-batches each replica takes, what a step will cost, and why not otherwise. A pure function: the same
// inputs give the same bytes. Called by the controller's core and by the command line; thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/core/planner/cost.h"

namespace everstep::planner {

// A plan that was not chosen.
struct Alternative {
  int32_t data_parallel = 1, tensor_parallel = 1, pipeline_stages = 1, micro_batch = 1;
  bool fits = true;
  double step_seconds = 0;         // when it does not fit: what it would take at least
  std::string reason;              // why not this one
};

struct Plan {
  Layout layout;                   // shares filled in
  Evaluation evaluation;
  std::vector<Alternative> alternatives;  // the best three, best first
  int64_t layouts_tried = 0;
  bool complete = true;            // false: the search ended at its budget, not at its bound
};

// What a re-plan narrows the search to; 0: free.
struct SearchLimits {
  int32_t tensor_parallel = 0;
  int32_t pipeline_stages_min = 0, pipeline_stages_max = 0;
  int32_t micro_batch = 0;
  int64_t work_budget = 20'000'000;  // visits of slots and cells
};

// kInvalidArgument: bad input (validate.h). kResourceExhausted: no layout can run the job on these servers; the message
// says what is missing.
Result<Plan> MakePlan(const Cluster& cluster, const Job& job, const Tables& tables, const Calibration& calibration = {});
Result<Plan> MakePlan(const CostModel& model, const SearchLimits& limits = {});

// The best cut of the layers for these slots: fills in bounds, or leaves them empty when no cut fits the memory.
void CutLayers(const CostModel& model, Layout* layout);

// What is minimized: seconds, units of money or joules of one step; a step whose replicas of some stage are all in one
// failure domain counts two percent more when spread is preferred.
double Score(const CostModel& model, const Evaluation& evaluation);

// Every rule that a plan keeps: each layer in one stage, every micro-batch once, no device twice, memory, pinned and
// forbidden servers, fixed sizes. kInternal names the rule that is broken. Tests call it on every plan they make.
Status CheckPlan(const CostModel& model, const Plan& plan);

// "2 x 4 x 1" with names: "4 replicas x 2 stages x 1 device".
std::string ShapeText(int32_t data_parallel, int32_t pipeline_stages, int32_t tensor_parallel);
std::string BytesText(double bytes);      // "12.3 GiB"
std::string SecondsText(double seconds);  // "1.23 s", "4.56 ms"

}  // namespace everstep::planner
