// Messages as one readable line each, for traces. Pure functions.
#pragma once

#include <string>

#include "controller/core/ledger/record.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"

namespace everstep::sim {

std::string Short(ProcessId id);     // "p1.3": the third process of term 1
std::string Describe(const Command& command);
std::string Describe(const Fact& fact);
std::string Describe(const Record& record);

}  // namespace everstep::sim
