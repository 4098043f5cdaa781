#include "checkpoint/core/retention.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep::checkpoint {
namespace {

StateId At(int64_t step, uint64_t generation = 1) { return {Step(step), Generation(generation)}; }
RetentionEntry Complete(int64_t step) { return {At(step), true, false, true}; }

TEST(Retention, KeepsTheNewestCompleteOnes) {
  EXPECT_EQ(ChooseDropped({Complete(10), Complete(40), Complete(20), Complete(30)}, 2),
            (std::vector<StateId>{At(10), At(20)}));
}

TEST(Retention, KeepsPinnedOnesForever) {
  RetentionEntry pinned = Complete(10);
  pinned.pinned = true;
  EXPECT_EQ(ChooseDropped({pinned, Complete(20), Complete(30)}, 1), std::vector<StateId>{At(20)});
}

TEST(Retention, KeepsWhatMayStillCompleteAndDropsWhatNeverWill) {
  RetentionEntry early = Complete(15);
  early.complete = false;
  RetentionEntry late = Complete(35);
  late.complete = false;
  EXPECT_EQ(ChooseDropped({Complete(10), early, Complete(20), Complete(30), late}, 3), std::vector<StateId>{At(15)});
}

TEST(Retention, DropsWhatTheChainExcludes) {
  RetentionEntry off = Complete(40);
  off.on_chain = false;
  EXPECT_EQ(ChooseDropped({Complete(30), off}, 3), std::vector<StateId>{At(40)});
}

TEST(Retention, NeverDropsTheLastCompleteOne) {
  EXPECT_EQ(ChooseDropped({Complete(10), Complete(20)}, 0), std::vector<StateId>{At(10)});
}

TEST(Retention, JudgesAStateByAllItsShards) {
  RetentionEntry missing = Complete(20);
  missing.complete = false;
  EXPECT_EQ(ChooseDropped({Complete(20), missing, Complete(10), Complete(30)}, 2), std::vector<StateId>{At(20)});
}

TEST(Retention, HoldsItsPromisesOnRandomInputs) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Prng random(seed);
    std::vector<RetentionEntry> entries;
    for (uint64_t i = random.UpTo(12); i-- > 0;) {
      entries.push_back({At(random.Between(1, 6), 1 + random.UpTo(2)), random.Chance(2, 3), random.Chance(1, 6),
                         random.Chance(4, 5)});
    }
    const size_t kept = random.UpTo(4);
    const std::vector<StateId> dropped = ChooseDropped(entries, kept);
    EXPECT_TRUE(std::is_sorted(dropped.begin(), dropped.end()));
    const std::set<StateId> gone(dropped.begin(), dropped.end());
    EXPECT_EQ(gone.size(), dropped.size());
    std::set<StateId> complete;
    for (const RetentionEntry& entry : entries) {
      bool whole = true;
      bool pinned = false;
      for (const RetentionEntry& other : entries) {
        if (other.state != entry.state) continue;
        whole &= other.complete && other.on_chain;
        pinned |= other.pinned;
      }
      if (pinned) {
        EXPECT_FALSE(gone.contains(entry.state));
      }
      if (whole) complete.insert(entry.state);
    }
    size_t newer = 0;
    for (auto it = complete.rbegin(); it != complete.rend(); ++it, ++newer) {
      if (newer < std::max<size_t>(kept, 1)) {
        EXPECT_FALSE(gone.contains(*it));
      }
    }
  }
}

}  // namespace
}  // namespace everstep::checkpoint
