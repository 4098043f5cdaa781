// Validation of what a user asks for. Pure; used by the controller at submission and by the CLI before it connects.
#pragma once

#include <string>
#include <vector>

#include "proto/model/job.h"

namespace everstep {

// All problems, one sentence each, naming the field, the value and the remedy. Empty: the spec is legal.
std::vector<std::string> ValidateJobSpec(const JobSpec& spec);

}  // namespace everstep
