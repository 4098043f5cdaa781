// The bytes of a peer-to-peer snapshot fetch, one per TCP connection, numbers little-endian:
//
//   reader -> server   frame { "EVSQ", u16 version, u32 body bytes }, body: job, generation, state, shard, tier, digest
//   server -> reader   frame { "EVSR", u16 version, u32 body bytes }, body: status, message, generation, snapshot,
//                      tensors; then, when the status is OK, the snapshot's bytes
//
// Each body ends with its own XXH3-64, so that noise is told from a message before anything in it is believed. The
// server ends a transfer whose source changes by closing; the reader counts bytes and compares the digest.
// Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/assignment.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

inline constexpr uint16_t kTransferVersion = 1;
inline constexpr size_t kTransferFrameBytes = 10;
inline constexpr size_t kTransferRequestBytesMax = 8192;
inline constexpr size_t kTransferResponseBytesMax = 16u << 20;

struct TransferRequest {
  JobUid job;
  // Of the reader's assignment; a server that knows a higher one refuses with ABORTED, one that knows only lower ones
  // answers UNAVAILABLE while its copy may still change (staged by a rank that lives). 0: a background copy, ordered
  // by the controller; fenced by its exact digest instead.
  Generation generation;
  StateId state;
  ShardIndex shard;
  SnapshotTier tier = SnapshotTier::kStaged;  // preferred; the server may use another copy of the same state
  Digest128 digest{};                         // all zero: not known. REQUIRES: known when generation is 0
  bool operator==(const TransferRequest&) const = default;
};

struct TransferResponse {
  Status status;
  Generation generation;                      // that the server knows; for people, nobody adopts it
  SnapshotInfo info;
  std::vector<TensorInfo> tensors;
  bool operator==(const TransferResponse&) const = default;
};

std::string EncodeTransferRequest(const TransferRequest& request);
std::string EncodeTransferResponse(const TransferResponse& response);

// The body's size. INVALID_ARGUMENT: not such a frame, another version, or a size out of range.
Result<size_t> DecodeRequestFrame(std::string_view frame);
Result<size_t> DecodeResponseFrame(std::string_view frame);
// INVALID_ARGUMENT: a body that we could not have sent.
Result<TransferRequest> DecodeRequestBody(std::string_view body);
Result<TransferResponse> DecodeResponseBody(std::string_view body);

}  // namespace everstep::checkpoint
