// A job from flags, from a job file, or from a file with some fields overridden by flags. Called on
// the main thread.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "everstep/v1/types.pb.h"
#include "proto/base/status.h"

namespace everstep::cli {

struct JobFlags {
  std::string file;
  std::string name;
  std::string servers;  // "4" or "2:4" (minimum:wanted)
  int servers_min = 0;
  int servers_max = 0;
  int ranks_per_server = 0;
  int pipeline_stages = 0;
  int micro_batches = 0;
  int priority = 0;
  int spares = 1;  // of a temporary local cluster
  int spares_reserved = 0;
  int standbys = 0;
  int restarts_max = 0;
  bool opaque = false;
  int64_t snapshot_every = 0;
  int64_t persist_every = 0;
  int checkpoints_kept = 0;
  std::string working_directory;
  std::vector<std::string> environment;  // NAME=VALUE
  std::vector<std::string> secrets;      // NAME=FILE
  std::string grace;
  std::string request_id;
};

void AddJobFlags(CLI::App* command, JobFlags& flags, bool with_spares);

// The file's job, overridden by the flags given; the program and its arguments are what the command
// line left over, and what stood after --. kInvalidArgument: names the flag or the file's line, the
// value and the remedy.
Result<everstep::v1::JobSpec> MakeJobSpec(const JobFlags& flags, const CLI::App* command,
                                          std::vector<std::string> program);

}  // namespace everstep::cli
