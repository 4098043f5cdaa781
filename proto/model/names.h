// Text of the model's enums, as it appears in CLI, logs and metrics.
#pragma once

#include <string_view>

#include "proto/model/assignment.h"
#include "proto/model/job.h"
#include "proto/model/progress.h"
#include "proto/model/server.h"

namespace everstep {

std::string_view ServerStateName(ServerState state);      // "Spare"
std::string_view JobStateName(JobState state);            // "Running"
std::string_view RecoveryPhaseName(RecoveryPhase phase);  // "collect"
std::string_view RankPhaseName(RankPhase phase);          // "computing"
std::string_view RestoreActionName(RestoreAction action); // "keep"
std::string_view SnapshotTierName(SnapshotTier tier);     // "staged"

}  // namespace everstep
