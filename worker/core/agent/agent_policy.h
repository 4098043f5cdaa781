// The agent's limits and waits. Plain data; defaults are what everstep-agent runs with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/base/time.h"

namespace everstep {

struct AgentPolicy {
  size_t outbox_facts_max = 4096;           // unacknowledged facts kept for the controller
  size_t outbox_progress_facts_max = 1024;  // of them, facts that people watch but nothing depends on
  size_t processes_max = 256;               // rank processes alive at once
  size_t gone_processes_max = 1024;         // remembered, so that a repeated spawn or kill is answered, not obeyed
  size_t connections_max = 512;             // of rank processes, accepted at once
  int32_t lines_per_second_max = 1000;       // forwarded per process; the log file has all
  uint64_t staging_bytes_max = uint64_t{8} << 30;  // that one rank may grow its staging memory to
  Duration hello_timeout = Seconds(10);     // without an answer to AgentHello the stream is opened again
  Duration refused_pause = Seconds(1);      // before registering anew after Refuse; doubles
  Duration refused_pause_max = Seconds(30);
  Duration socket_loss_grace = Seconds(2);  // a joined rank without socket can't be commanded: killed after this
  Duration unkillable_after = Seconds(10);  // from SIGKILL; then its device can't be used
  Duration stop_grace = Seconds(5);         // of rank processes when the agent itself is asked to end
  Duration stop_flush_max = Milliseconds(500);  // for the controller to acknowledge the last facts
};

}  // namespace everstep
