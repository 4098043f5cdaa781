// The environment of a rank process, as far as it follows from the spawn command. Pure; the shell adds descriptors,
// paths and secrets.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "proto/model/commands.h"

namespace everstep {

// `host`: the address of this server, for the rank's listeners.
// Sorted by name, each once. The job's own variables never override those of Everstep and of torchrun.
std::vector<std::pair<std::string, std::string>> BuildEnvironment(const SpawnProcess& spawn,
                                                                  const std::string& host);

}  // namespace everstep
