// The commit vote: what passes, what must never pass, on both backends.
#include "worker/collective/vote.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "tests/unit/collective/world.h"
#include "worker/collective/fake/fake_fabric.h"

namespace everstep::collective {
namespace {

class VoteWorlds : public testing::TestWithParam<int32_t> {
 protected:
  std::vector<std::unique_ptr<Communicator>> Fake() {
    FakeFabric fabric({.size = GetParam()});
    std::vector<std::unique_ptr<Communicator>> ranks;
    for (int32_t rank = 0; rank < GetParam(); ++rank) ranks.push_back(fabric.Connect(Rank(rank)));
    return ranks;
  }
  std::vector<std::unique_ptr<Communicator>> Host() { return HostWorld(GetParam()).Connect(); }
};

VoteBallot Ballot(int32_t rank, int64_t step = 10) {
  return {.generation = Generation(1),
          .step = Step(step),
          .protected_step_min = 100 - rank,
          .pending_generation_max = static_cast<uint64_t>(rank),
          .flags_or = 0,
          .digest_low = 5,
          .digest_high = 6};
}

TEST_P(VoteWorlds, PassesWithMinimumMaximumAndFlagsOfAllRanksStepAfterStep) {
  for (auto& ranks : {Host(), Fake()}) {
    OnRanks(GetParam(), [&](int32_t rank) {
      for (int64_t step = 1; step <= 20; ++step) {
        VoteBallot mine = Ballot(rank, step);
        if (rank == GetParam() - 1 && step == 7) mine.flags_or = kVoteOutOfRange;
        std::mutex mutex;
        int passed = 0;
        const auto result = Vote(*ranks[static_cast<size_t>(rank)], mine,
                                 {&mutex, [] { return false; }, [&] { ++passed; }});
        ASSERT_TRUE(result.ok()) << result.status().ToString();
        EXPECT_EQ(result->step, Step(step));
        EXPECT_EQ(result->protected_step_min, 100 - (GetParam() - 1));
        EXPECT_EQ(result->pending_generation_max, static_cast<uint64_t>(GetParam() - 1));
        EXPECT_EQ(result->flags_or, step == 7 ? kVoteOutOfRange : 0);
        EXPECT_EQ(passed, 1);
      }
    });
  }
}

TEST_P(VoteWorlds, DifferentDigestsPassWithTheFlagThatSaysSo) {
  auto ranks = Fake();
  OnRanks(GetParam(), [&](int32_t rank) {
    VoteBallot mine = Ballot(rank);
    if (rank == GetParam() / 2) mine.digest_high = 99;
    const auto result = Vote(*ranks[static_cast<size_t>(rank)], mine, {});
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->flags_or, GetParam() > 1 ? kVoteDigestsDiffer : 0);
  });
}

TEST_P(VoteWorlds, BallotForAnotherStepNeverPassesAnywhere) {
  if (GetParam() == 1) return;
  for (int32_t odd = 0; odd < GetParam(); ++odd) {
    for (auto& ranks : {Host(), Fake()}) {
      OnRanks(GetParam(), [&](int32_t rank) {
        const auto result =
            Vote(*ranks[static_cast<size_t>(rank)], Ballot(rank, rank == odd ? 9 : 10), {});
        ASSERT_FALSE(result.ok()) << "rank " << rank;
        EXPECT_TRUE(result.status().code() == StatusCode::kInternal ||
                    result.status().code() == StatusCode::kAborted);
      });
    }
  }
}

TEST_P(VoteWorlds, BallotOfAnotherGenerationNeverPassesAnywhere) {
  if (GetParam() == 1) return;
  auto ranks = Fake();
  OnRanks(GetParam(), [&](int32_t rank) {
    VoteBallot mine = Ballot(rank);
    if (rank == GetParam() - 1) mine.generation = Generation(2);
    EXPECT_FALSE(Vote(*ranks[static_cast<size_t>(rank)], mine, {}).ok());
  });
}

// The flag is up before the rank votes: it contributes nothing, so nobody can pass.
TEST_P(VoteWorlds, RankWithAFlaggedAbortContributesNothing) {
  for (int32_t flagged = 0; flagged < GetParam(); ++flagged) {
    for (auto& ranks : {Host(), Fake()}) {
      OnRanks(GetParam(), [&](int32_t rank) {
        bool passed = false;
        std::mutex mutex;
        const auto result = Vote(*ranks[static_cast<size_t>(rank)], Ballot(rank),
                                 {&mutex, [&] { return rank == flagged; }, [&] { passed = true; }});
        EXPECT_EQ(result.status().code(), StatusCode::kAborted);
        EXPECT_FALSE(passed);
      });
    }
  }
}

// The flag rises between contribution and result: this rank must not apply although the result says
// so.
TEST_P(VoteWorlds, AbortFlaggedDuringTheVoteKeepsThisRankFromApplying) {
  auto ranks = Fake();
  OnRanks(GetParam(), [&](int32_t rank) {
    std::mutex mutex;
    int looks = 0;
    bool passed = false;
    const auto result =
        Vote(*ranks[static_cast<size_t>(rank)], Ballot(rank),
             {&mutex, [&] { return rank == 0 && ++looks == 2; }, [&] { passed = true; }});
    if (rank == 0) {
      EXPECT_EQ(result.status().code(), StatusCode::kAborted);
      EXPECT_FALSE(passed);
      EXPECT_EQ(looks, 2);
    } else {
      // The others hold either the result or the news of the abort: the step is undecided, which
      // Collect resolves.
      EXPECT_EQ(passed, result.ok());
    }
  });
}

TEST_P(VoteWorlds, FlagIsReadUnderTheMutex) {
  auto ranks = Fake();
  OnRanks(GetParam(), [&](int32_t rank) {
    std::mutex mutex;
    int looks = 0;
    const auto held = [&] {
      bool free = false;
      std::thread([&] {
        free = mutex.try_lock();
        if (free) mutex.unlock();
      }).join();
      return !free;
    };
    const auto result = Vote(*ranks[static_cast<size_t>(rank)], Ballot(rank),
                             {&mutex,
                              [&] {
                                EXPECT_TRUE(held());
                                ++looks;
                                return false;
                              },
                              [&] { EXPECT_TRUE(held()); }});
    EXPECT_TRUE(result.ok());
    EXPECT_EQ(looks, 2);
  });
}

// Kill each rank at each of its messages: if anybody passes, every rank had contributed.
TEST_P(VoteWorlds, DeathAtAnyMessageNeverLetsAVoteWithoutABallotPass) {
  for (int32_t victim = 0; victim < GetParam(); ++victim) {
    for (int kill_at = 0; kill_at < 4; ++kill_at) {
      FakeFabric fabric({.size = GetParam()});
      std::vector<std::unique_ptr<Communicator>> ranks;
      for (int32_t rank = 0; rank < GetParam(); ++rank) ranks.push_back(fabric.Connect(Rank(rank)));
      std::atomic<int> sent_by_victim{0};
      std::atomic<int> delivered_up{0};
      fabric.SetMessageHook([&](Rank from, Rank to, uint64_t) {
        if (from.value == victim && sent_by_victim++ == kill_at) {
          fabric.Kill(from, FakeDeath::kConnectionsClose);
        } else if (from > to) {
          ++delivered_up;
        }
      });
      std::atomic<int> passed{0};
      OnRanks(GetParam(), [&](int32_t rank) {
        if (Vote(*ranks[static_cast<size_t>(rank)], Ballot(rank), {}).ok()) ++passed;
      });
      if (passed > 0) {
        EXPECT_EQ(delivered_up.load(), GetParam() - 1);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, VoteWorlds, testing::Values(1, 2, 3, 4, 5, 8),
                         [](const auto& info) { return "Ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace everstep::collective
