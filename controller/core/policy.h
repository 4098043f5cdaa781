// Every number that an operator can turn, with default and legal range, and the timeouts derived from the one
// recovery budget. Plain data; validated by ValidatePolicy, which reports all problems at once.
#pragma once

#include <string>
#include <vector>

#include "proto/base/time.h"

namespace everstep {

struct Policy {
  // ---- set by the operator
  Duration heartbeat_interval = Milliseconds(250);   // 20 ms … 10 s
  Duration lease = Milliseconds(1500);               // at least 4 heartbeat intervals
  Duration probe_timeout = Milliseconds(300);        // silent server: how long its stream and port may stay mute
  Duration recovery_budget = Seconds(30);            // 1 s … 1 h: from the fence to Resume
  Duration process_start_timeout = Seconds(60);      // from spawn to Join; outside the budget when there is no standby
  Duration adoption_grace = Seconds(5);              // a restarted controller waits this long for agents to report
  Duration mass_silence_hold = Seconds(6);           // at least 2 leases
  Duration join_settle = Milliseconds(500);          // a first plan waits this long for more servers to register
  Duration regrow_delay = Seconds(2);                // a new server must stay healthy this long before a job grows
  int servers_max = 20000;
  int jobs_max = 1000;
  int recoveries_kept = 200;
  int events_kept = 2000;

  // ---- derived
  Duration collect_timeout() const { return recovery_budget / 20; }    // at most 1.5 s by default
  Duration assign_timeout() const { return recovery_budget / 4; }      // standbys are warm: Assign to Connected
  Duration restore_timeout() const { return recovery_budget / 2; }
  Duration resume_timeout() const { return recovery_budget / 8; }
};

// All problems, one sentence each, naming the field, the value and the remedy. Empty: legal.
std::vector<std::string> ValidatePolicy(const Policy& policy);

// The effective table, one "name value" line each, derived values included.
std::vector<std::pair<std::string, std::string>> DescribePolicy(const Policy& policy);

}  // namespace everstep
