// Job files: YAML or JSON in the schema of everstep.v1.JobSpec. Used by the command line. Thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "proto/model/job.h"

namespace everstep {

struct LoadedJob {
  std::optional<JobSpec> spec;        // absent when there are problems
  std::vector<std::string> problems;  // one line each, with file, line and field
};

// Reads and checks forms and bounds; what fits together is checked by the controller (ValidateJobSpec).
LoadedJob LoadJobFile(const std::string& path);
// The same on a text; `name` is what problems call it.
LoadedJob ParseJobFile(const std::string& text, const std::string& name);

}  // namespace everstep
