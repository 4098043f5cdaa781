// Turns the core's notices into log lines (docs: structured, one line per event). Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "worker/core/agent/agent_effect.h"

namespace everstep {

// To stderr. `json`: one object per line. `level`: debug, info, warn or error.
void StartLogging(const std::string& level, bool json);
void WriteNotice(const AgentNotice& notice);

}  // namespace everstep
