// Copies the registered state into staging memory (worker/wire/staging_layout.h). Owned by Session; Take runs on the
// training thread, Keep under the session's mutex from either thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "proto/base/status.h"
#include "proto/model/lineage.h"
#include "worker/client/state_registry.h"
#include "worker/wire/staging_layout.h"

namespace everstep::client {

class StagingWriter {
 public:
  StagingWriter() = default;
  ~StagingWriter();
  StagingWriter(const StagingWriter&) = delete;
  StagingWriter& operator=(const StagingWriter&) = delete;

  // Adopts the descriptor and writes an empty superblock. UNAVAILABLE: it can't be mapped.
  Status Open(int fd, ProcessId process, uint64_t bytes_max);
  bool open() const { return superblock_ != nullptr; }
  void set_bytes_max(uint64_t bytes) { bytes_max_ = bytes; }

  // Snapshots at or above `protected_step` stay. Thread-safe.
  void Keep(Step protected_step);
  // Those above `state` are off the chain and stand in nobody's way; so is another generation's of the same step.
  void Discard(StateId state);

  // Copies and hashes; the slot's header is written last. Returns what to tell the agent.
  // RESOURCE_EXHAUSTED: every slot must stay, or the file would exceed its limit. FAILED_PRECONDITION: not open.
  Result<SnapshotStaged> Take(const StateRegistry& registry, StateId state, ShardIndex shard, Generation generation);

 private:
  struct Held {
    bool valid = false;
    StateId state;
  };

  int FreeSlot() const;
  Status Place(StagingSlot& slot, uint64_t bytes);
  Status Map(uint64_t bytes);

  int fd_ = -1;
  uint64_t bytes_max_ = 0;
  uint64_t file_bytes_ = 0;
  std::byte* base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  StagingSuperblock* superblock_ = nullptr;  // a mapping of its own, so that growth does not move it
  HashingCopier copier_;

  mutable std::mutex mutex_;
  std::array<Held, kStagingSlots> held_;     // guarded by mutex_
  Step protected_step_;                      // guarded by mutex_
};

}  // namespace everstep::client
