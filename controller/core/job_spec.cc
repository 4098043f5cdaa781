#include "controller/core/job_spec.h"

#include <algorithm>

#include <fmt/format.h>

namespace everstep {

namespace {
constexpr size_t kNameMax = 63;
constexpr size_t kTextMax = 64 * 1024;
constexpr size_t kListMax = 4096;

bool LegalName(const std::string& name) {
  if (name.empty() || name.size() > kNameMax || name.front() == '-' || name.back() == '-') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
}
}  // namespace

std::vector<std::string> ValidateJobSpec(const JobSpec& s) {
  std::vector<std::string> problems;
  auto range = [&](const char* field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
      problems.push_back(fmt::format("{}: {} is outside {} to {}; choose a value in that range", field, value, low, high));
    }
  };
  if (!LegalName(s.name)) {
    problems.push_back(fmt::format("name: \"{}\" is not a name; use 1 to 63 of a-z, 0-9 and '-', no '-' at either end",
                                   s.name.substr(0, 80)));
  }
  if (s.program.empty()) {
    problems.push_back("program: empty; give the absolute path of the program, the same on each server");
  } else if (s.program.front() != '/') {
    problems.push_back(fmt::format("program: \"{}\" is not absolute; give the path from the root", s.program.substr(0, 200)));
  }
  if (!s.working_directory.empty() && s.working_directory.front() != '/') {
    problems.push_back(fmt::format("working_directory: \"{}\" is not absolute; give the path from the root",
                                   s.working_directory.substr(0, 200)));
  }
  if (s.arguments.size() > kListMax) problems.push_back(fmt::format("arguments: more than {}", kListMax));
  if (s.environment.size() > kListMax) problems.push_back(fmt::format("environment: more than {}", kListMax));
  size_t text = s.program.size();
  for (const std::string& a : s.arguments) text += a.size();
  for (const auto& [k, v] : s.environment) text += k.size() + v.size();
  if (text > kTextMax) problems.push_back(fmt::format("arguments and environment: {} bytes; at most {}", text, kTextMax));
  range("servers_min", s.servers_min, 1, 16384);
  range("servers_wanted", s.servers_wanted, 1, 16384);
  range("servers_max", s.servers_max, 0, 16384);
  range("ranks_per_server", s.ranks_per_server, 1, 64);
  range("pipeline_stages", s.pipeline_stages, 1, 1024);
  range("micro_batch_count", s.micro_batch_count, 0, 1000000);
  range("priority", s.priority, -1000, 1000);
  range("spares_reserved", s.spares_reserved, 0, 16384);
  range("standbys_wanted", s.standbys_wanted, 0, 64);
  range("restarts_max", s.restarts_max, 0, 1000000);
  range("snapshot_interval_steps", s.snapshot_interval_steps, 0, 1000000000);
  range("persist_interval_steps", s.persist_interval_steps, 0, 1000000000);
  range("checkpoints_kept", s.checkpoints_kept, 1, 10000);
  if (s.termination_grace < Duration(0) || s.termination_grace > Seconds(3600)) {
    problems.push_back("termination_grace: outside 0s to 3600s; choose a value in that range");
  }
  if (s.servers_min > s.servers_wanted) {
    problems.push_back(fmt::format("servers_min: {} is above servers_wanted ({}); lower it or raise servers_wanted",
                                   s.servers_min, s.servers_wanted));
  }
  if (s.servers_max != 0 && s.servers_max < s.servers_wanted) {
    problems.push_back(fmt::format("servers_max: {} is below servers_wanted ({}); raise it or leave it out", s.servers_max,
                                   s.servers_wanted));
  }
  if (s.ranks_per_server >= 1 && s.pipeline_stages >= 1 && s.servers_wanted >= 1) {
    const int64_t world = static_cast<int64_t>(s.servers_wanted) * s.ranks_per_server;
    if (world < s.pipeline_stages) {
      problems.push_back(fmt::format("pipeline_stages: {} stages need as many ranks, the job has {}; raise servers_wanted",
                                     s.pipeline_stages, world));
    } else if (world % s.pipeline_stages != 0) {
      problems.push_back(fmt::format("pipeline_stages: {} ranks are no multiple of {} stages; change servers_wanted or "
                                     "ranks_per_server", world, s.pipeline_stages));
    } else if (s.micro_batch_count > 0 && s.micro_batch_count < world / s.pipeline_stages) {
      problems.push_back(fmt::format("micro_batch_count: {} micro-batches for {} data-parallel replicas; give each at "
                                     "least one", s.micro_batch_count, world / s.pipeline_stages));
    }
  }
  if (s.opaque && s.pipeline_stages > 1) {
    problems.push_back("pipeline_stages: an opaque program lays itself out; leave pipeline_stages at 1");
  }
  return problems;
}

}  // namespace everstep
