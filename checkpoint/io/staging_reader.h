// Reads the staging memory of one rank process (worker/wire/staging_layout.h) without trusting it: the rank may be
// writing, may be dead, may be buggy. The file can't shrink (sealed), every offset is checked against its size, and
// what a slot says counts only when its sequence did not move and its digest matches. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "checkpoint/io/memory_region.h"
#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

// A read-only view of one slot's buffer. The bytes may change under the reader; StagingReader::Unchanged tells.
class StagedView {
 public:
  StagedView(void* mapping, size_t mapping_bytes, size_t skip, size_t bytes)
      : mapping_(mapping), mapping_bytes_(mapping_bytes), skip_(skip), bytes_(bytes) {}
  ~StagedView();
  StagedView(const StagedView&) = delete;
  StagedView& operator=(const StagedView&) = delete;
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(mapping_) + skip_, bytes_};
  }

 private:
  void* mapping_;
  size_t mapping_bytes_;
  size_t skip_;
  size_t bytes_;
};

class StagingReader {
 public:
  struct Slot {
    uint32_t index = 0;
    uint64_t sequence = 0;
    StateId state;
    ShardIndex shard;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    Digest128 digest{};
  };

  // Takes the descriptor. FAILED_PRECONDITION: not staging memory of this process, or another layout, or it can't be
  // sealed against shrinking.
  static Result<std::shared_ptr<StagingReader>> Open(UniqueFd fd, ProcessId process);
  ~StagingReader();
  StagingReader(const StagingReader&) = delete;
  StagingReader& operator=(const StagingReader&) = delete;

  // ABORTED: never written, or being written now. DATA_LOSS: it points outside the file. INVALID_ARGUMENT: no such
  // slot.
  Result<Slot> ReadSlot(uint32_t index) const;
  bool Unchanged(const Slot& slot) const;
  // RESOURCE_EXHAUSTED: no address space.
  Result<std::shared_ptr<StagedView>> View(const Slot& slot) const;

  // The slot, if it holds this state and its bytes hash to its digest.
  // ABORTED: it holds another one by now. DATA_LOSS: the digest does not match. Else as ReadSlot.
  Result<Slot> Verify(uint32_t index, StateId state, ShardIndex shard) const;

 private:
  StagingReader() = default;
  UniqueFd fd_;
  const void* superblock_ = nullptr;
};

}  // namespace everstep::checkpoint
