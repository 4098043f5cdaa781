// Refuses bad input before anything is computed from it, with the name of what is wrong. Pure, thread-compatible.
#pragma once

#include "controller/core/planner/model.h"
#include "controller/core/planner/tables.h"
#include "proto/base/status.h"

namespace everstep::planner {

// kInvalidArgument: a number that is zero, negative, no number or absurd; an unknown device or server; a name given
// twice; servers that cannot reach each other; a precision that no device has; limits that contradict each other.
Status Validate(const Cluster& cluster, const Job& job, const Tables& tables);

}  // namespace everstep::planner
