// The commit vote (protocol.md section 2): all ranks of the job agree that a step's gradients are
// complete everywhere before any of them applies it. A binomial tree up and down, 2 log2(ranks)
// messages deep, over a host communicator. Called by the training thread.
//
// The result counts only if it equals, field by field, what this rank expects for exactly this
// generation and step with every rank counted once. Buffers are new and zeroed in every vote, so
// nothing left over can pass.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "worker/collective/communicator.h"

namespace everstep::collective {

struct VoteBallot {
  Generation generation;
  Step step;
  int64_t protected_step_min = 0;       // result: minimum
  uint64_t pending_generation_max = 0;  // result: maximum
  uint64_t flags_or = 0;                // result: bitwise or; the top bit is kVoteDigestsDiffer
  uint64_t digest_low = 0;              // result: equal everywhere, or kVoteDigestsDiffer is set
  uint64_t digest_high = 0;
};

inline constexpr uint64_t kVoteOutOfRange =
    1;  // exact reduction: redo the step with raised exponents
inline constexpr uint64_t kVoteNotFinite = 2;                      // a gradient is NaN or infinite
inline constexpr uint64_t kVoteDigestsDiffer = uint64_t{1} << 63;  // set by the vote itself

// How the vote learns of an abort. Both functions run with *mutex held, which must be the mutex
// under which aborts are flagged.
struct VoteFence {
  std::mutex* mutex = nullptr;
  std::function<bool()> abort_flagged;
  // Called just before the vote returns OK, under the same hold of the mutex as the last look at
  // the flag: the place to mark the rank as applying. May be empty.
  std::function<void()> passed;
};

// Contributes `mine` and returns the combined ballot. OK means: apply.
// kAborted: an abort was flagged before the contribution (nothing was contributed, the communicator
// is aborted so that
//   nobody waits for it) or before the return; or the communicator ended.
// kInternal: some rank voted for another generation or step, or the counts are off; the
// communicator is aborted. kDeadlineExceeded: as Communicator::Run.
Result<VoteBallot> Vote(Communicator& communicator, const VoteBallot& mine, const VoteFence& fence);

}  // namespace everstep::collective
