// Fetches one snapshot from another agent into sealed memory. Called on the keeper's worker threads; blocks, bounded
// by its deadlines and by a stop token. Thread-safe function.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "checkpoint/io/memory_region.h"
#include "checkpoint/io/transfer_protocol.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::checkpoint {

struct FetchOptions {
  uint64_t bytes_max = uint64_t{64} << 30;  // a snapshot said to be larger is refused
  Duration connect_timeout = Seconds(2);
  Duration answer_timeout = Seconds(2);     // copies in memory are answered at once
  Duration stored_answer_timeout = Seconds(30);  // a stored copy is read from disk before the answer
  Duration stall_timeout = Seconds(3);      // for one MiB
};

// How far a fetch came, for whoever decides whether to try again.
struct FetchProgress {
  bool connected = false;
};

struct FetchedSnapshot {
  SnapshotInfo info;                        // as the server says: its tier, its name
  std::vector<TensorInfo> tensors;
  std::shared_ptr<MemoryRegion> region;     // sealed, verified against info.digest
};

// The snapshot named by the request, whole and verified.
//   ABORTED: the reader's generation is stale; final.
//   UNAVAILABLE: the server can't be reached, knows only lower generations, or the transfer broke off: retry.
//   NOT_FOUND: it holds no copy. DATA_LOSS: the bytes do not match the digest, or the server says so of its copy.
//   DEADLINE_EXCEEDED: nothing came for too long. RESOURCE_EXHAUSTED: too large, or no memory.
//   FAILED_PRECONDITION: the copy has another digest than the request. INTERNAL: the server does not speak the
//   protocol. CANCELLED: stopped.
Result<FetchedSnapshot> FetchSnapshot(const std::string& address, const TransferRequest& request,
                                      const FetchOptions& options, std::stop_token stop = {},
                                      FetchProgress* progress = nullptr);

}  // namespace everstep::checkpoint
