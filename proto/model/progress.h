// The progress page: one cache line of shared memory per rank process. The rank writes it under a seqlock
// (no system call), its agent reads it at any time, also after the rank's death, when it is the proof of how far
// the rank came. The layout is ABI between libeverstep and everstep-agent of one protocol version.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "proto/base/ids.h"
#include "proto/model/lineage.h"

namespace everstep {

inline constexpr uint32_t kProtocolVersion = 1;

// Phases of a step on a rank (docs/protocol.md section 2), and what comes before and between steps.
enum class RankPhase : uint8_t {
  kStarting = 0,   // not joined yet
  kJoining = 1,    // waits for an assignment (standby, or between generations)
  kRestoring = 2,  // memory is being overwritten: unusable until done
  kReady = 3,      // restored, waits for Resume
  kComputing = 4,
  kReduced = 5,    // complete gradients of step applied+1
  kVoting = 6,
  kApplying = 7,   // the vote of step applied+1 passed; memory is torn until applied
  kFinished = 8,
};

// What the page says, decoded.
struct Progress {
  RankPhase phase = RankPhase::kStarting;
  bool memory_valid = false;       // false before the first restore, while restoring and while applying
  StateId applied;                 // newest state whole in memory
  Generation generation;           // in which the rank steps
  Step vote_passed;                // newest step whose vote this rank saw pass
  uint64_t collective_sequence = 0;  // collectives entered in this generation
  bool operator==(const Progress&) const = default;
};

struct alignas(64) ProgressPage {
  std::atomic<uint32_t> version;   // seqlock: odd while being written
  uint8_t phase;
  uint8_t memory_valid;
  uint16_t reserved;
  int64_t applied_step;
  uint64_t applied_generation;
  uint64_t generation;
  int64_t vote_passed;
  uint64_t collective_sequence;
  uint64_t changed_boottime_ns;    // when phase, step or collective last changed
};
static_assert(sizeof(ProgressPage) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace everstep
