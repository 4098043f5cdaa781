#include "worker/core/agent/environment.h"

#include <map>

namespace everstep {

std::vector<std::pair<std::string, std::string>> BuildEnvironment(const SpawnProcess& spawn,
                                                                  const std::string& host) {
  std::map<std::string, std::string> variables = spawn.spec.environment;
  variables["EVERSTEP_PROCESS_ID"] = std::to_string(spawn.process.value);
  variables["EVERSTEP_JOB"] = spawn.job.value;
  variables["EVERSTEP_JOB_NAME"] = spawn.spec.name;
  variables["EVERSTEP_HOST"] = host;
  variables["EVERSTEP_STANDBY"] = std::to_string(spawn.standby ? 1 : 0);
  variables["EVERSTEP_DEVICE"] = std::to_string(spawn.device.value);
  variables["EVERSTEP_RESTART_COUNT"] = std::to_string(spawn.restart_count);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(spawn.restart_count);
  if (spawn.spec.snapshot_interval_steps > 0) {
    variables["EVERSTEP_SNAPSHOT_EVERY"] = std::to_string(spawn.spec.snapshot_interval_steps);
  }
  if (spawn.spec.opaque) {
    // Its place is known before it starts, and it reads it as a torchrun program does.
    variables["RANK"] = std::to_string(spawn.rank.value);
    variables["WORLD_SIZE"] = std::to_string(spawn.world_size);
    variables["LOCAL_RANK"] = std::to_string(spawn.local_rank);
    variables["LOCAL_WORLD_SIZE"] = std::to_string(spawn.local_world_size);
    variables["GROUP_RANK"] =
        std::to_string(spawn.local_world_size > 0 ? spawn.rank.value / spawn.local_world_size : 0);
    variables["MASTER_ADDR"] = spawn.master_address;
    variables["MASTER_PORT"] = std::to_string(spawn.master_port);
    variables["EVERSTEP_GENERATION"] = std::to_string(spawn.generation.value);
  }
  return {variables.begin(), variables.end()};
}

}  // namespace everstep
