// What a rank process and its agent say to each other over the unix socket. Plain data; worker/wire encodes it.
// Every message carries the generation it belongs to; a stale one is refused by whoever receives it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/assignment.h"
#include "proto/model/lineage.h"
#include "proto/model/progress.h"

namespace everstep {

using Digest128 = std::array<uint64_t, 2>;  // XXH3-128

// What a rank holds when it left its generation.
struct RankReport {
  bool memory_valid = false;    // false: was restoring, or never had state
  StateId applied;              // whole in memory, when valid
  Generation gradients;         // generation of complete gradients of applied.step + 1; 0: none
  bool operator==(const RankReport&) const = default;
};

// One named tensor of a shard, or a range of it.
struct TensorInfo {
  std::string name;
  std::string dtype;                  // "f32", "f64", "u8" …
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offsets;       // of this piece in the global tensor; empty: whole
  std::vector<int64_t> shape;         // of this piece; empty: global_shape
  uint64_t bytes = 0;
  uint64_t buffer_offset = 0;         // in the staged buffer
  bool operator==(const TensorInfo&) const = default;
};

struct SnapshotInfo {
  StateId state;
  ShardIndex shard;
  SnapshotTier tier = SnapshotTier::kStaged;
  ServerId server;                    // where this copy is
  uint64_t bytes = 0;
  Digest128 digest{};                 // over the whole buffer
  bool operator==(const SnapshotInfo&) const = default;
};

// ---- rank → agent

struct RankHello {                    // first message on the socket
  uint32_t protocol_version = kProtocolVersion;
  ProcessId process;                  // from EVERSTEP_PROCESS_ID
  int64_t pid = 0;
  std::string mesh_address;           // host:port, listening already
};
struct RankJoin {};                   // Join() was called and state is registered: ready for an assignment
struct CollectAnswer {                // Fence(generation) obeyed: communicators aborted, or left at a boundary
  Generation generation;
  RankReport report;
  bool planned = false;               // left after the vote carried the pending generation
};
struct RankConnected { Generation generation; };   // the mesh stands
struct RankReady {                    // restored and digests agreed: waits for Resume
  Generation generation;
  Digest128 shard_digest{};
  uint64_t bytes_restored = 0;
  std::string restored_from;          // "kept", "rolled-forward", "rank 2", "s03 staged" …
};
struct RankFailed {                   // could not enter, or lost, the generation; with the suspected peer if known
  Generation generation;
  Rank suspect{-1};
  StatusCode code = StatusCode::kUnknown;
  std::string message;
};
struct SnapshotStaged {               // the staged slot's header is written
  StateId state;
  ShardIndex shard;
  uint32_t slot = 0;
  uint64_t bytes = 0;
  std::vector<TensorInfo> tensors;
};
struct SnapshotWanted { Generation generation; SnapshotSource source; };  // asks the agent for a copy to read
struct MetricReported {               // a number a person watches: loss, tokens per second
  Step step;
  std::string name;
  double value = 0;
};
struct RankFinished {};               // the program is done; an exit with code 0 follows

using RankToAgent = std::variant<RankHello, RankJoin, CollectAnswer, RankConnected, RankReady, RankFailed,
                                 SnapshotStaged, SnapshotWanted, MetricReported, RankFinished>;

// ---- agent → rank

struct HelloAccepted {
  uint64_t staging_bytes_max = 0;     // the rank may grow its staging memory up to this
};
struct HelloRefused { std::string message; };
struct FenceRank { Generation generation; };            // leave now, answer with CollectAnswer
struct PrepareSwitch { Generation generation; };        // rides in the vote as the pending generation
struct AssignRank { Assignment assignment; Rank rank; };
struct ResumeRank { Generation generation; Step protected_step; };
struct SnapshotProtected { Step step; };                // the job-wide watermark rose
struct SnapshotProvided {             // its bytes are in the file descriptor that comes with the message
  Generation generation;
  StateId state;
  uint64_t bytes = 0;
  Digest128 digest{};
  std::vector<TensorInfo> tensors;
  std::string from;                   // for people
};
struct SnapshotUnavailable { Generation generation; StatusCode code; std::string message; };
struct StopRank { std::string message; };               // the job ends; leave with an error if still running

using AgentToRank = std::variant<HelloAccepted, HelloRefused, FenceRank, PrepareSwitch, AssignRank, ResumeRank,
                                 SnapshotProtected, SnapshotProvided, SnapshotUnavailable, StopRank>;

}  // namespace everstep
