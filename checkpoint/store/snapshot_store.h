// Where snapshots survive processes and reboots: one shard of one state per entry, its bytes as content-addressed
// chunks that are stored once. Used by SnapshotKeeper's worker threads. Implementations are thread-safe; calls block
// (disk), so no loop thread calls them.
//
// Statuses, the same for every implementation:
//   RESOURCE_EXHAUSTED  the disk is full, or a limit
//   DATA_LOSS           a checksum did not match what was stored
//   UNAVAILABLE         a disk operation failed
//   NOT_FOUND           no such snapshot
//   INVALID_ARGUMENT    a description that contradicts itself
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

struct StoredSnapshot {
  SnapshotInfo info;                   // tier is kStored
  std::vector<TensorInfo> tensors;
  bool operator==(const StoredSnapshot&) const = default;
};

class SnapshotStore {
 public:
  virtual ~SnapshotStore() = default;

  // Stores one shard; durable when OK is returned, invisible otherwise. The same content again is OK.
  // ALREADY_EXISTS: another content is stored under this state and shard.
  // REQUIRES: info.digest is the digest of bytes (checked: INVALID_ARGUMENT).
  virtual Status Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                     std::span<const std::byte> bytes) = 0;

  // What is stored, without its bytes.
  virtual Result<StoredSnapshot> Find(const JobUid& job, StateId state, ShardIndex shard) = 0;

  // The bytes, verified: each chunk and the whole. On an error `out` holds garbage.
  // INVALID_ARGUMENT: out.size() is not the snapshot's bytes.
  virtual Status Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) = 0;

  // All snapshots, by job, state, shard; entries whose manifest can't be read are left out and counted by Damaged().
  virtual Result<std::vector<std::pair<JobUid, SnapshotInfo>>> List() = 0;

  // Forgets a snapshot and frees what nobody else refers to. What does not exist is OK.
  virtual Status Delete(const JobUid& job, StateId state, ShardIndex shard) = 0;

  // Manifests that could not be read when the store opened.
  virtual size_t Damaged() const = 0;

  // Find and Read in one.
  Result<std::pair<StoredSnapshot, std::vector<std::byte>>> Get(const JobUid& job, StateId state, ShardIndex shard);
};

// What every Put checks before it touches anything.
Status ValidatePut(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                   std::span<const std::byte> bytes);

}  // namespace everstep::checkpoint
