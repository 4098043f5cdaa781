// State ids and the chain of a job (docs/protocol.md section 1). Plain data plus one rule: which states belong to
// the job's single history. Used by the controller's ledger and by the checkpoint's commit protocol.
#pragma once

#include <compare>
#include <vector>

#include "proto/base/ids.h"

namespace everstep {

// The state after `step`, reached in `generation`. {0, 0} is the initial state, which every rank can compute.
struct StateId {
  Step step;
  Generation generation;
  auto operator<=>(const StateId&) const = default;
};

// Generation `generation` started from the state after step `start`.
struct ChainLink {
  Generation generation;
  Step start;
  auto operator<=>(const ChainLink&) const = default;
};

// The chain. (t, g) is on it iff g is a link and start_g < t <= the lowest start of all later links.
// Links whose every step was cut off by a later, lower start are dropped, so that starts rise strictly and the next
// link's start is the lowest of all later ones.
// Invariant: generations and starts both rise strictly along links().
class Lineage {
 public:
  // A new generation starts. REQUIRES: generation is above every generation so far; start >= 0.
  void Append(ChainLink link);
  bool OnChain(StateId id) const;
  // The state id on the chain after `step`: {0,0} for step 0. REQUIRES: a link starts below `step`.
  StateId AtStep(Step step) const;
  Generation newest() const { return links_.empty() ? Generation(0) : links_.back().generation; }
  const std::vector<ChainLink>& links() const { return links_; }
  static Lineage FromLinks(std::vector<ChainLink> links);
  bool operator==(const Lineage&) const = default;

 private:
  std::vector<ChainLink> links_;
};

}  // namespace everstep
