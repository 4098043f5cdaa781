// What the loop needs of the core, so that the loop is tested with a scripted one. Loop-only.
#pragma once

#include <memory>
#include <utility>

#include "controller/core/controller_core.h"

namespace everstep {

class CoreInterface {
 public:
  virtual ~CoreInterface() = default;
  virtual Effects Start(Now now) = 0;
  virtual Effects Step(const Event& event, Now now) = 0;
  virtual Instant NextDeadline() const = 0;
  virtual const LedgerState& ledger() const = 0;
  virtual ClusterView MakeView(Now now) const = 0;
};

// The real one.
class RealCore : public CoreInterface {
 public:
  RealCore(ControllerOptions options, LedgerState ledger)
      : core_(std::move(options), std::move(ledger)) {}
  Effects Start(Now now) override { return core_.Start(now); }
  Effects Step(const Event& event, Now now) override { return core_.Step(event, now); }
  Instant NextDeadline() const override { return core_.NextDeadline(); }
  const LedgerState& ledger() const override { return core_.ledger(); }
  ClusterView MakeView(Now now) const override { return core_.MakeView(now); }

 private:
  ControllerCore core_;
};

}  // namespace everstep
