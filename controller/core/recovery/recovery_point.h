// The recovery point (docs/protocol.md section 1): the greatest step for which every shard has a source on the chain.
// A pure function of what Collect gathered. `shared` executable model: recovery_model.py, recovery_step().
#pragma once

#include <vector>

#include "proto/model/assignment.h"
#include "proto/model/lineage.h"
#include "proto/model/rank_messages.h"

namespace everstep {

struct SurvivorReport {
  ProcessId process;
  ShardIndex shard;
  RankReport report;
};

struct HeldSnapshot {          // a verified copy on a reachable server
  ShardIndex shard;
  StateId state;
};

struct RecoveryInputs {
  Lineage lineage;             // generations whose recovery points are durable
  int32_t shard_count = 1;
  std::vector<SurvivorReport> survivors;   // the decision set
  std::vector<HeldSnapshot> snapshots;     // also proofs
  std::vector<StateId> proofs;             // pages of the dead, manifests: the vote of these states passed
};

inline constexpr size_t kProofsMax = 256;

// Adds a proof unless it is known. When the list is full, what is off the chain goes (it never counts again), then the
// lowest step: only the greatest step on the chain decides.
void AddProof(std::vector<StateId>& proofs, StateId proof, const Lineage& lineage);

enum class SurvivorAction { kKeep, kRollForward, kFetch };

// What a survivor does to reach `point`.
SurvivorAction ActionFor(const RecoveryInputs& inputs, const RankReport& report, Step point);

// The greatest step whose vote is proved to have passed.
Step ProvedStep(const RecoveryInputs& inputs);

// True when `shard` can be brought to the state after `point`: from a survivor or a snapshot. Step 0 always has one.
bool HasSource(const RecoveryInputs& inputs, ShardIndex shard, Step point);

// Never fails: step 0 is always restorable.
StateId DecideRecoveryPoint(const RecoveryInputs& inputs);

}  // namespace everstep
