// The chain of a job (docs/protocol.md section 1).
#include "proto/model/lineage.h"

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep {
namespace {

StateId Id(int64_t step, uint64_t generation) { return {Step(step), Generation(generation)}; }
ChainLink Link(uint64_t generation, int64_t start) { return {Generation(generation), Step(start)}; }

TEST(LineageTest, AnEmptyChainHasTheInitialStateOnly) {
  const Lineage lineage;
  EXPECT_TRUE(lineage.OnChain(Id(0, 0)));
  EXPECT_FALSE(lineage.OnChain(Id(1, 1)));
  EXPECT_EQ(lineage.newest(), Generation(0));
}

TEST(LineageTest, AGenerationsStepsEndWhereTheNextOneStarts) {
  const Lineage lineage = Lineage::FromLinks({Link(1, 0), Link(2, 5)});
  EXPECT_TRUE(lineage.OnChain(Id(5, 1)));
  EXPECT_FALSE(lineage.OnChain(Id(6, 1)));
  EXPECT_FALSE(lineage.OnChain(Id(5, 2))) << "the state it started from carries the older generation";
  EXPECT_TRUE(lineage.OnChain(Id(6, 2)));
  EXPECT_FALSE(lineage.OnChain(Id(6, 3)));
}

// Generation 2 starts at 1 and loses its source, 3 starts at 0 and runs step 1 again, 4 would mix the two histories if
// only the next start counted.
TEST(LineageTest, TheLowestStartOfAllLaterGenerationsCounts) {
  const Lineage lineage = Lineage::FromLinks({Link(1, 0), Link(2, 1), Link(3, 0), Link(4, 1)});
  EXPECT_FALSE(lineage.OnChain(Id(1, 1)));
  EXPECT_FALSE(lineage.OnChain(Id(2, 2)));
  EXPECT_TRUE(lineage.OnChain(Id(1, 3)));
  EXPECT_FALSE(lineage.OnChain(Id(2, 3)));
  EXPECT_TRUE(lineage.OnChain(Id(2, 4)));
}

TEST(LineageTest, FindsTheStateAfterAStep) {
  const Lineage lineage = Lineage::FromLinks({Link(1, 0), Link(2, 5), Link(4, 8)});
  EXPECT_EQ(lineage.AtStep(Step(0)), Id(0, 0));
  EXPECT_EQ(lineage.AtStep(Step(5)), Id(5, 1));
  EXPECT_EQ(lineage.AtStep(Step(6)), Id(6, 2));
  EXPECT_EQ(lineage.AtStep(Step(8)), Id(8, 2));
  EXPECT_EQ(lineage.AtStep(Step(100)), Id(100, 4));
}

TEST(LineageDeathTest, GenerationsRise) {
  Lineage lineage = Lineage::FromLinks({Link(3, 2)});
  EXPECT_DEATH(lineage.Append(Link(3, 4)), "CHECK failed");
}

// The rule as it is written, over the full history.
bool OnChainByDefinition(const std::vector<ChainLink>& history, StateId id) {
  if (id.step.value == 0) return true;
  for (size_t i = 0; i < history.size(); ++i) {
    if (history[i].generation != id.generation) continue;
    if (id.step <= history[i].start) return false;
    for (size_t later = i + 1; later < history.size(); ++later) {
      if (id.step > history[later].start) return false;
    }
    return true;
  }
  return false;
}

TEST(LineageTest, EqualsItsDefinitionOnRandomHistories) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    Prng prng(seed);
    std::vector<ChainLink> history;
    Lineage lineage;
    uint64_t generation = 0;
    const auto length = prng.Between(1, 8);
    for (int64_t i = 0; i < length; ++i) {
      generation += static_cast<uint64_t>(prng.Between(1, 2));
      history.push_back(Link(generation, i == 0 ? 0 : prng.Between(0, 6)));
      lineage.Append(history.back());
    }
    for (uint64_t g = 0; g <= generation + 1; ++g) {
      for (int64_t t = 0; t <= 8; ++t) {
        ASSERT_EQ(lineage.OnChain(Id(t, g)), OnChainByDefinition(history, Id(t, g))) << "seed " << seed << ": (" << t << ", "
                                                                                    << g << ")";
      }
    }
    for (int64_t t = 0; t <= 8; ++t) {
      ASSERT_TRUE(OnChainByDefinition(history, lineage.AtStep(Step(t)))) << "seed " << seed;
    }
    ASSERT_EQ(Lineage::FromLinks(lineage.links()), lineage);
    ASSERT_EQ(lineage.newest(), history.back().generation);
  }
}

}  // namespace
}  // namespace everstep
