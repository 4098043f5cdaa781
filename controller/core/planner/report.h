// Plans and decisions as people and programs read them: text with a picture, SVG, JSON. Pure: the same plan gives the same
// bytes. Called by the command line and by the view; thread-compatible.
#pragma once

#include <string>

#include "controller/core/planner/plan.h"
#include "controller/core/planner/replan.h"

namespace everstep::planner {

// servers x stages x shares, then memory, the parts of the step, traffic, and the alternatives with their reasons.
std::string PlanText(const CostModel& model, const Plan& plan);
std::string PlanSvg(const CostModel& model, const Plan& plan);
std::string PlanJson(const CostModel& model, const Plan& plan);
std::string ReplanText(const CostModel& model, const Replan& replan);
std::string ReplanJson(const CostModel& model, const Replan& replan);
// The layout of a decision as a plan, to be drawn.
Plan AsPlan(const ReplanOption& option);

}  // namespace everstep::planner
