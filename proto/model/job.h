// What a user asks for. Plain data; validated by ValidateJobSpec (controller/core/planner).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/time.h"

namespace everstep {

struct JobSpec {
  std::string name;
  std::string program;                            // absolute path, the same on each server
  std::vector<std::string> arguments;
  std::string working_directory;                  // empty: a directory of the agent's own for each process
  std::map<std::string, std::string> environment;
  std::map<std::string, std::string> secret_files;  // environment variable -> file on the server that holds its value
  int32_t servers_min = 1;
  int32_t servers_wanted = 1;
  int32_t servers_max = 0;                        // 0: servers_wanted
  int32_t ranks_per_server = 1;
  int32_t pipeline_stages = 1;                    // world size is a multiple of it
  int32_t micro_batch_count = 0;                  // of one global batch; 0: the program shares out work itself
  int32_t priority = 0;                           // higher first
  int32_t spares_reserved = 0;
  int32_t standbys_wanted = 1;                    // warm processes kept on spares
  int32_t restarts_max = 100;                     // failures of the job's own processes, over its life
  bool opaque = false;                            // the program never joins; see docs
  Duration termination_grace = Seconds(5);
  int64_t snapshot_interval_steps = 0;            // 0: the program decides
  int64_t persist_interval_steps = 0;             // write a manifest to the stores every n steps; 0: never
  int32_t checkpoints_kept = 3;
  bool operator==(const JobSpec&) const = default;
};

// The user-visible state of a job. The recovery phase is separate (RecoveryPhase).
enum class JobState : uint8_t {
  kPending,             // waits for its first capacity
  kStarting,            // its first generation is being formed
  kRunning,
  kRecovering,
  kWaitingForCapacity,  // parked below its minimum
  kSucceeded, kFailed, kCancelled,
};

// Exit codes of `everstep run` and `wait job` (docs/cli.md).
enum class JobExit : int32_t {
  kDone = 0, kUsage = 64, kUserSignal = 70, kNoCapacity = 71, kCancelled = 73, kDataLoss = 74, kInfrastructure = 75,
};

enum class RecoveryPhase : uint8_t {
  kNone, kDetect, kDecide, kFence, kCollect, kPlan, kAssign, kRestore, kConnect, kResume,
};

}  // namespace everstep
