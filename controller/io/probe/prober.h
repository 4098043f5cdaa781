// Asks a host whether an agent's port is open: a connection refused by a live host is proof that the agent is dead.
// One thread for all probes; results come back on it. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "controller/core/event.h"
#include "proto/base/time.h"

namespace everstep {

inline constexpr size_t kProbesMax = 4096;

class Prober {
 public:
  Prober();
  ~Prober();

  // Calls `done` once, on the prober's thread: refused, connected, or timed out (also for any other error, which proves
  // nothing). Beyond kProbesMax at once: timed out at once.
  void Probe(const std::string& address, Duration timeout, std::function<void(ProbeOutcome)> done);
  // Ends the thread; probes under way are dropped without an answer. Idempotent.
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep
