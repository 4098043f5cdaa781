// JobSpec ↔ message. Used by the controller's and agent's shells and by the command line. Thread-safe: pure functions.
#pragma once

#include <string>
#include <vector>

#include "everstep/v1/types.pb.h"
#include "proto/base/status.h"
#include "proto/model/job.h"

namespace everstep {

v1::JobSpec ToMessage(const JobSpec& spec);
// Absent fields take the model's defaults. kInvalidArgument: a field is out of its bounds; the message names it.
Result<JobSpec> FromMessage(const v1::JobSpec& message);
// All problems at once, each beginning with the path of its field; the spec is of use only when there are none.
JobSpec FromMessage(const v1::JobSpec& message, std::vector<std::string>* problems);

}  // namespace everstep
