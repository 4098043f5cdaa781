// A small text scenario and the conversation that it leads to, for golden traces (tests/golden): one command a line.
// All durations are fixed, so that a trace changes only when a rule does. Pure but for the world it runs.
#pragma once

#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace everstep::sim {

// The whole conversation. INVALID_ARGUMENT: a line that can't be read, by number and field · INTERNAL: a checker fired.
Result<std::string> RunScenario(std::string_view text);

}  // namespace everstep::sim
