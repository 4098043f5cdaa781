#include "worker/collective/vote.h"

#include <fmt/format.h>

#include <algorithm>
#include <type_traits>

namespace everstep::collective {
namespace {

constexpr uint64_t kUpMagic = 0x455356544c555031;    // towards the root
constexpr uint64_t kDownMagic = 0x455356544c444e31;  // the result

// What travels. Fixed layout, zeroed before each use.
struct VoteMessage {
  uint64_t magic = 0;
  uint64_t generation = 0;
  int64_t step = 0;
  uint64_t voters = 0;    // ranks whose ballots are in here
  uint64_t disagree = 0;  // not 0: some ballot was for something else
  int64_t protected_step_min = 0;
  uint64_t pending_generation_max = 0;
  uint64_t flags_or = 0;
  uint64_t digest_low = 0;
  uint64_t digest_high = 0;
};
static_assert(std::is_trivially_copyable_v<VoteMessage> && sizeof(VoteMessage) == 80);

void Combine(VoteMessage& mine, const VoteMessage& other) {
  if (other.magic != kUpMagic || other.generation != mine.generation || other.step != mine.step)
    mine.disagree = 1;
  mine.disagree |= other.disagree;
  mine.voters += other.voters;
  mine.protected_step_min = std::min(mine.protected_step_min, other.protected_step_min);
  mine.pending_generation_max = std::max(mine.pending_generation_max, other.pending_generation_max);
  mine.flags_or |= other.flags_or;
  if (mine.digest_low != other.digest_low || mine.digest_high != other.digest_high)
    mine.flags_or |= kVoteDigestsDiffer;
}

bool Flagged(const VoteFence& fence) { return fence.abort_flagged && fence.abort_flagged(); }

}  // namespace

Result<VoteBallot> Vote(Communicator& communicator, const VoteBallot& mine,
                        const VoteFence& fence) {
  const int32_t rank = communicator.rank().value;
  const int32_t size = communicator.world_size();
  const auto receive = [&](VoteMessage& message, int32_t from) {
    message = VoteMessage();
    return communicator.Receive(&message, sizeof(message), DataType::kU8, Rank(from));
  };
  const auto send = [&](const VoteMessage& message, int32_t to) {
    return communicator.Send(&message, sizeof(message), DataType::kU8, Rank(to));
  };
  const auto refuse = [&](std::string why) {
    Status status = Aborted(std::move(why));
    communicator.Abort(status);
    return status;
  };

  VoteMessage total{.magic = kUpMagic,
                    .generation = mine.generation.value,
                    .step = mine.step.value,
                    .voters = 1,
                    .protected_step_min = mine.protected_step_min,
                    .pending_generation_max = mine.pending_generation_max,
                    .flags_or = mine.flags_or & ~kVoteDigestsDiffer,
                    .digest_low = mine.digest_low,
                    .digest_high = mine.digest_high};
  // The children's ballots first: until they are here this rank has contributed nothing.
  int32_t distance = 1;
  for (; distance < size && (rank & distance) == 0; distance *= 2) {
    if (rank + distance >= size) continue;
    VoteMessage child;
    EVERSTEP_RETURN_IF_ERROR(receive(child, rank + distance));
    Combine(total, child);
  }
  {
    // After this look the ballot may leave. An abort flagged later is answered (Collect) only once
    // the communicator is confirmed to be aborted, so the ballot was then sent before that answer,
    // or never will be.
    std::unique_lock<std::mutex> lock;
    if (fence.mutex != nullptr) lock = std::unique_lock(*fence.mutex);
    if (Flagged(fence)) {
      if (lock.owns_lock()) lock.unlock();
      return refuse("an abort was flagged before this rank voted");
    }
  }
  VoteMessage result;
  if (rank == 0) {
    result = total;
    result.magic = kDownMagic;
  } else {
    EVERSTEP_RETURN_IF_ERROR(send(total, rank - distance));
    EVERSTEP_RETURN_IF_ERROR(receive(result, rank - distance));
  }
  for (int32_t child = distance / 2; child >= 1; child /= 2) {
    if (rank + child < size) EVERSTEP_RETURN_IF_ERROR(send(result, rank + child));
  }

  if (result.magic != kDownMagic || result.generation != mine.generation.value ||
      result.step != mine.step.value || result.disagree != 0 ||
      result.voters != static_cast<uint64_t>(size)) {
    Status status = Internal(
        fmt::format("the vote on step {} of generation {} has {} of {} ballots, some for another "
                    "step or generation: {}",
                    mine.step.value, mine.generation.value, result.voters, size, result.disagree));
    communicator.Abort(status);
    return status;
  }
  std::unique_lock<std::mutex> lock;
  if (fence.mutex != nullptr) lock = std::unique_lock(*fence.mutex);
  if (Flagged(fence)) {
    if (lock.owns_lock()) lock.unlock();
    return refuse("an abort was flagged while the vote was under way");
  }
  if (fence.passed) fence.passed();
  VoteBallot combined = mine;
  combined.protected_step_min = result.protected_step_min;
  combined.pending_generation_max = result.pending_generation_max;
  combined.flags_or = result.flags_or;
  return combined;
}

}  // namespace everstep::collective
