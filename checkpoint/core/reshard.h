// Re-sharding: given the piece of a global tensor that a rank wants and the pieces that exist, what to copy from
// where. Called by restores onto another layout. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

inline constexpr size_t kTensorDimensionsMax = 8;
inline constexpr size_t kCopyRunsMax = 1u << 22;

// One contiguous run of bytes, from available piece `source` into the wanted piece.
struct CopyRun {
  size_t source = 0;              // index of the available piece
  uint64_t source_offset = 0;     // bytes, from the start of that piece's shard buffer
  uint64_t target_offset = 0;     // bytes, from the start of the wanted shard's buffer
  uint64_t bytes = 0;
  bool operator==(const CopyRun&) const = default;
};

// The runs that fill `wanted` completely, each byte from exactly one piece, the first piece in the list preferred,
// in ascending order of target_offset with adjacent runs joined. Pieces of other tensors are passed over.
//   INVALID_ARGUMENT: a piece or `wanted` contradicts itself (dimensions, bounds, bytes), or its dtype or global
//                     shape differs from `wanted`.
//   NOT_FOUND: some elements of `wanted` are in no piece.
//   RESOURCE_EXHAUSTED: more than kCopyRunsMax runs.
Result<std::vector<CopyRun>> PlanReshard(const TensorInfo& wanted, const std::vector<TensorInfo>& available);

// Bytes of one element: "f32" 4, "bf16" 2 …; 0: unknown.
uint64_t DtypeBytes(const std::string& dtype);

}  // namespace everstep::checkpoint
