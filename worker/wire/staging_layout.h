// The layout of a rank's staging memory: a memory file made by the agent, inherited by the rank (EVERSTEP_STAGING_FD),
// written by the rank's library and read by the agent, also after the rank died. One file per rank process. It only
// grows. Plain data of fixed width, little-endian; ABI between libeverstep and everstep-agent of one protocol version.
//
//   offset 0      StagingSuperblock, with its table of kStagingSlots slots
//   offset 4096   regions, each belonging to one slot: the shard's buffer, then (64-byte aligned) its tensor table
//
// A slot is written in this order, so that a reader never takes a torn one for whole:
//   1. sequence becomes odd                         (release)
//   2. the buffer, then the tensor table: one frame of worker/wire's codec (SnapshotStaged, with its length), which
//      names state, shard, slot, bytes and tensors
//   3. state, shard, generation, sizes, digest
//   4. sequence becomes even                        (release)
// A reader copies the slot, checks that the sequence was even and not 0, reads the bytes, checks that the sequence is
// unchanged, and compares the digest: XXH3-128 over the buffer's `byte_count` bytes, taken while they were copied.
//
// The rank never overwrites the two newest slots, nor one at or above the job's protected watermark.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace everstep {

inline constexpr uint64_t kStagingMagic = 0x3147545350545345u;  // "ESTPSTG1"
inline constexpr uint32_t kStagingVersion = 1;
inline constexpr uint32_t kStagingSlots = 4;
inline constexpr uint64_t kStagingHeaderBytes = 4096;

struct StagingSlot {
  std::atomic<uint64_t> sequence;   // 0: never written; odd: being written
  int64_t state_step;
  uint64_t state_generation;
  uint64_t generation;              // in which the rank stepped when it took the snapshot
  int32_t shard;
  uint32_t tensor_count;
  uint64_t byte_offset;             // of the buffer, from the start of the file
  uint64_t byte_count;
  uint64_t table_offset;            // of the tensor table, from the start of the file
  uint64_t table_bytes;
  uint64_t digest[2];               // low, high
  uint64_t region_offset;           // the rank's own bookkeeping
  uint64_t region_bytes;
  uint64_t taken_boottime_ns;
  uint64_t reserved[2];
};
static_assert(sizeof(StagingSlot) == 128);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct StagingSuperblock {
  uint64_t magic;
  uint32_t version;
  uint32_t slot_count;
  uint64_t process;                 // ProcessId of the rank
  uint64_t reserved[5];
  StagingSlot slots[kStagingSlots];
};
static_assert(sizeof(StagingSuperblock) <= kStagingHeaderBytes);
static_assert(offsetof(StagingSuperblock, slots) == 64);

}  // namespace everstep
