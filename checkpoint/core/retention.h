// Which checkpoints stay: the newest k complete ones and every pinned one. Called by whoever owns a list of
// checkpoints (a store's sweep, the agent's keeper). Pure functions.
#pragma once

#include <cstddef>
#include <vector>

#include "proto/model/lineage.h"

namespace everstep::checkpoint {

struct RetentionEntry {
  StateId state;
  bool complete = false;   // all shards are verified
  bool pinned = false;     // an operator or a restore needs it
  bool on_chain = true;    // false: it can never be restored
  bool operator==(const RetentionEntry&) const = default;
};

// The states to drop, oldest first. Kept are: pinned ones; the newest `complete_kept` complete ones on the chain;
// incomplete ones on the chain newer than the newest complete one (they may still complete). At least one complete
// one stays even when `complete_kept` is 0. Entries may come in any order and name one state several times (one per
// shard); such a state is complete only if all its entries are, and pinned if any is.
std::vector<StateId> ChooseDropped(const std::vector<RetentionEntry>& entries, size_t complete_kept);

}  // namespace everstep::checkpoint
