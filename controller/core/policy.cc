#include "controller/core/policy.h"

#include <fmt/format.h>

namespace everstep {
namespace {

std::string Text(Duration d) {
  if (d.count() % 1000000000 == 0) return fmt::format("{}s", d.count() / 1000000000);
  return fmt::format("{}ms", ToMilliseconds(d));
}

void CheckRange(std::vector<std::string>& problems, const char* field, Duration value, Duration low, Duration high) {
  if (value < low || value > high) {
    problems.push_back(fmt::format("{}: {} is outside {} to {}; choose a value in that range", field, Text(value),
                                   Text(low), Text(high)));
  }
}

}  // namespace

std::vector<std::string> ValidatePolicy(const Policy& p) {
  std::vector<std::string> problems;
  CheckRange(problems, "heartbeat_interval", p.heartbeat_interval, Milliseconds(20), Seconds(10));
  CheckRange(problems, "lease", p.lease, Milliseconds(100), Seconds(600));
  CheckRange(problems, "probe_timeout", p.probe_timeout, Milliseconds(10), Seconds(30));
  CheckRange(problems, "recovery_budget", p.recovery_budget, Seconds(1), Seconds(3600));
  CheckRange(problems, "process_start_timeout", p.process_start_timeout, Seconds(1), Seconds(3600));
  CheckRange(problems, "adoption_grace", p.adoption_grace, Milliseconds(200), Seconds(600));
  CheckRange(problems, "mass_silence_hold", p.mass_silence_hold, Milliseconds(200), Seconds(3600));
  CheckRange(problems, "join_settle", p.join_settle, Duration(0), Seconds(600));
  CheckRange(problems, "regrow_delay", p.regrow_delay, Duration(0), Seconds(3600));
  if (p.lease < 4 * p.heartbeat_interval) {
    problems.push_back(fmt::format("lease: {} is below four heartbeat intervals ({}); raise lease or lower "
                                   "heartbeat_interval", Text(p.lease), Text(4 * p.heartbeat_interval)));
  }
  if (p.mass_silence_hold < 2 * p.lease) {
    problems.push_back(fmt::format("mass_silence_hold: {} is below two leases ({}); raise it",
                                   Text(p.mass_silence_hold), Text(2 * p.lease)));
  }
  if (p.adoption_grace < 2 * p.lease && p.lease <= Seconds(2)) {
    problems.push_back(fmt::format("adoption_grace: {} is below two leases ({}); raise it, or agents that are alive "
                                   "may be declared dead after a controller restart",
                                   Text(p.adoption_grace), Text(2 * p.lease)));
  }
  if (p.servers_max < 1 || p.servers_max > 100000) {
    problems.push_back(fmt::format("servers_max: {} is outside 1 to 100000", p.servers_max));
  }
  if (p.jobs_max < 1 || p.jobs_max > 100000) {
    problems.push_back(fmt::format("jobs_max: {} is outside 1 to 100000", p.jobs_max));
  }
  if (p.recoveries_kept < 1 || p.recoveries_kept > 200) {
    problems.push_back(fmt::format("recoveries_kept: {} is outside 1 to 200", p.recoveries_kept));
  }
  if (p.events_kept < 1 || p.events_kept > 100000) {
    problems.push_back(fmt::format("events_kept: {} is outside 1 to 100000", p.events_kept));
  }
  return problems;
}

std::vector<std::pair<std::string, std::string>> DescribePolicy(const Policy& p) {
  return {{"heartbeat_interval", Text(p.heartbeat_interval)},
          {"lease", Text(p.lease)},
          {"probe_timeout", Text(p.probe_timeout)},
          {"recovery_budget", Text(p.recovery_budget)},
          {"process_start_timeout", Text(p.process_start_timeout)},
          {"adoption_grace", Text(p.adoption_grace)},
          {"mass_silence_hold", Text(p.mass_silence_hold)},
          {"join_settle", Text(p.join_settle)},
          {"regrow_delay", Text(p.regrow_delay)},
          {"servers_max", fmt::format("{}", p.servers_max)},
          {"jobs_max", fmt::format("{}", p.jobs_max)},
          {"recoveries_kept", fmt::format("{}", p.recoveries_kept)},
          {"events_kept", fmt::format("{}", p.events_kept)},
          {"collect_timeout (derived)", Text(p.collect_timeout())},
          {"assign_timeout (derived)", Text(p.assign_timeout())},
          {"restore_timeout (derived)", Text(p.restore_timeout())},
          {"resume_timeout (derived)", Text(p.resume_timeout())}};
}

}  // namespace everstep
