// The controller's decisions: Step(event, now) -> effects, and NextDeadline(). One object owned by the loop thread
// (or by the simulator); it has no clock, socket, file or OS randomness. It wires the modules of this folder:
// detector -> membership -> planner -> recovery -> ledger -> view.
#pragma once

#include <memory>

#include "controller/core/effect.h"
#include "controller/core/event.h"
#include "controller/core/ledger/record.h"
#include "controller/core/policy.h"
#include "controller/core/view/view.h"
#include "proto/base/time.h"

namespace everstep {

struct ControllerOptions {
  Policy policy;
  std::string heartbeat_address;     // told to agents
  uint64_t seed = 1;                 // tokens, uids; the shell draws it from the OS
};

class ControllerCore {
 public:
  // Starts from a replayed ledger (empty for a new cluster). The effects of Start() begin a new term.
  ControllerCore(ControllerOptions options, LedgerState ledger);
  ~ControllerCore();

  // Must be called once, before any Step.
  Effects Start(Now now);
  Effects Step(const Event& event, Now now);
  // The instant at which TimeAdvanced must be fed at the latest; kNever when nothing is due.
  Instant NextDeadline() const;

  const LedgerState& ledger() const;
  ClusterView MakeView(Now now) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep
