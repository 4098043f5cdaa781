// The environment a rank finds itself in, and the one assignment of a world without controller and agent. Pure, but for
// reading the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/assignment.h"

namespace everstep::client {

struct RankEnvironment {
  std::string agent_socket;            // empty: static
  ProcessId process;
  int page_fd = -1;
  int staging_fd = -1;
  int64_t snapshot_every = 0;          // steps; the job's wish, taken by Commit; 0: the program decides
  std::string host = "127.0.0.1";      // of the mesh listener
  int32_t static_rank = 0;
  std::vector<std::string> static_world = {"127.0.0.1:0"};
  int32_t static_stages = 1;
};

// `get`: std::getenv, or a test's. INVALID_ARGUMENT: names the variable, its value and the remedy.
Result<RankEnvironment> ReadEnvironment(const char* (*get)(const char* name));

// Rank r holds stage r % stages of replica r / stages; micro-batches are shared as evenly as they go, earlier replicas
// taking the remainder. Generation 1, from the initial state.
Assignment StaticAssignment(const RankEnvironment& environment, int32_t micro_batch_count);

}  // namespace everstep::client
