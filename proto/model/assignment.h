// Who does what in one generation of a job: made by the controller, durable before anybody hears of it, obeyed by
// agents and ranks. Plain data.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/model/lineage.h"

namespace everstep {

// Proves membership of one generation on every rank-to-rank connection.
using Token = std::array<uint8_t, 16>;

// A shard is what one (tp, pp) coordinate holds; data-parallel replicas hold the same shard.
using ShardIndex = StrongNumber<struct ShardIndexTag, int32_t>;

enum class RestoreAction : uint8_t {
  kInitialize,        // step 0: compute the initial state
  kKeep,              // memory already is the recovery point
  kRollForward,       // apply the complete gradients in memory
  kFetchFromRank,     // receive from source_rank over the new mesh
  kFetchFromSnapshot, // read a snapshot of the recovery point through the agent
};

enum class SnapshotTier : uint8_t { kStaged, kPeer, kStored };

struct SnapshotSource {
  ServerId server;
  SnapshotTier tier = SnapshotTier::kStaged;
  std::string transfer_address;  // of the agent that holds it
  StateId state;
  ShardIndex shard;
  bool operator==(const SnapshotSource&) const = default;
};

struct RankAssignment {
  Rank rank;
  ServerId server;
  DeviceIndex device;
  ProcessId process;
  int32_t dp = 0, tp = 0, pp = 0;          // coordinate
  int32_t local_rank = 0;                  // among the job's ranks on this server
  int32_t micro_batch_first = 0;           // of the global batch: [first, first + count)
  int32_t micro_batch_count = 0;
  std::string mesh_address;                // host:port of the rank's mesh listener
  RestoreAction action = RestoreAction::kInitialize;
  Rank source_rank{-1};                    // kFetchFromRank
  std::vector<SnapshotSource> sources;     // kFetchFromSnapshot, nearest first
  bool operator==(const RankAssignment&) const = default;
  ShardIndex shard() const { return ShardIndex(pp); }
};

struct Assignment {
  JobUid job;
  std::string job_name;
  Generation generation;
  StateId recovery_point;
  Token token{};
  int32_t dp_size = 1, tp_size = 1, pp_size = 1;
  int32_t micro_batch_count = 0;           // of the global batch, constant through every change
  std::vector<RankAssignment> ranks;       // index = rank
  bool operator==(const Assignment&) const = default;
};

}  // namespace everstep
