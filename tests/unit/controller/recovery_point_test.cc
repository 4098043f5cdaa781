// The recovery point, rule by rule, and against a second implementation written after the executable model's
// recovery_step(): there a state is its whole history, and nothing is looked up in a chain.
#include "controller/core/recovery/recovery_point.h"

#include <optional>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep {
namespace {

StateId Id(int64_t step, uint64_t generation) { return {Step(step), Generation(generation)}; }

RecoveryInputs Inputs(int32_t shards = 1, std::vector<ChainLink> links = {{Generation(1), Step(0)}}) {
  RecoveryInputs inputs;
  inputs.shard_count = shards;
  inputs.lineage = Lineage::FromLinks(std::move(links));
  return inputs;
}

SurvivorReport Holds(int shard, StateId applied, uint64_t gradients = 0) {
  return {ProcessId(1), ShardIndex(shard), {true, applied, Generation(gradients)}};
}
SurvivorReport HoldsNothing(int shard) { return {ProcessId(1), ShardIndex(shard), {}}; }

TEST(RecoveryPointTest, WithoutAnythingItIsTheInitialState) {
  EXPECT_EQ(DecideRecoveryPoint(Inputs()), Id(0, 0));
  RecoveryInputs inputs = Inputs();
  inputs.survivors = {HoldsNothing(0)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(0, 0));
}

TEST(RecoveryPointTest, ASurvivorThatAppliedAStepProvesIt) {
  RecoveryInputs inputs = Inputs();
  inputs.survivors = {Holds(0, Id(6, 1)), Holds(0, Id(5, 1), 1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 1));
  EXPECT_EQ(ActionFor(inputs, inputs.survivors[0].report, Step(6)), SurvivorAction::kKeep);
  EXPECT_EQ(ActionFor(inputs, inputs.survivors[1].report, Step(6)), SurvivorAction::kRollForward);
}

TEST(RecoveryPointTest, CompleteGradientsWithoutProofAreDiscarded) {
  RecoveryInputs inputs = Inputs();
  inputs.survivors = {Holds(0, Id(5, 1), 1), Holds(0, Id(5, 1), 1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(5, 1));
  EXPECT_EQ(ActionFor(inputs, inputs.survivors[0].report, Step(5)), SurvivorAction::kKeep);
}

TEST(RecoveryPointTest, ThePageOfTheDeadIsAProof) {
  RecoveryInputs inputs = Inputs();
  inputs.survivors = {Holds(0, Id(5, 1), 1)};
  inputs.proofs = {Id(6, 1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 1));
  inputs.survivors = {Holds(0, Id(5, 1))};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(5, 1)) << "a proof is no source";
}

TEST(RecoveryPointTest, TheListOfProofsIsBoundedAndKeepsTheOneThatDecides) {
  const Lineage lineage = Lineage::FromLinks({{Generation(1), Step(0)}, {Generation(2), Step(5)}});
  std::vector<StateId> proofs;
  AddProof(proofs, {Step(9), Generation(2)}, lineage);
  AddProof(proofs, {Step(9), Generation(2)}, lineage);
  AddProof(proofs, {Step(0), Generation(2)}, lineage);
  ASSERT_EQ(proofs.size(), 1u) << "one fact is one proof, and step 0 needs none";
  // Pages that tell of steps which a later generation left behind.
  for (int64_t step = 6; step < 2000; ++step) {
    AddProof(proofs, {Step(step), Generation(1)}, lineage);
    ASSERT_LE(proofs.size(), kProofsMax);
  }
  RecoveryInputs inputs;
  inputs.lineage = lineage;
  inputs.proofs = proofs;
  EXPECT_EQ(ProvedStep(inputs), Step(9));
  // All of them on the chain: the greatest stays.
  for (int64_t step = 10; step < 1000; ++step) AddProof(proofs, {Step(step), Generation(2)}, lineage);
  for (int64_t step = 1; step < 5; ++step) AddProof(proofs, {Step(step), Generation(1)}, lineage);
  EXPECT_EQ(proofs.size(), kProofsMax);
  inputs.proofs = proofs;
  EXPECT_EQ(ProvedStep(inputs), Step(999));
}

TEST(RecoveryPointTest, AProofOffTheChainProvesNothing) {
  RecoveryInputs inputs = Inputs(1, {{Generation(1), Step(0)}, {Generation(2), Step(5)}});
  inputs.survivors = {Holds(0, Id(5, 1), 2)};
  inputs.proofs = {Id(6, 1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(5, 1));
  inputs.proofs = {Id(6, 2)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 2));
}

TEST(RecoveryPointTest, AnEarlierRecoveryPointIsAProof) {
  // Generation 2 started from 6, some rolled forward and died; this one still holds the gradients of 6.
  RecoveryInputs inputs = Inputs(1, {{Generation(1), Step(0)}, {Generation(2), Step(6)}});
  inputs.survivors = {Holds(0, Id(5, 1), 1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 1)) << "a rolled-forward step carries the generation of its gradients";
}

TEST(RecoveryPointTest, MemoryOffTheChainIsNoSource) {
  RecoveryInputs inputs = Inputs(1, {{Generation(1), Step(0)}, {Generation(2), Step(3)}});
  inputs.survivors = {Holds(0, Id(4, 1))};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(0, 0));
  inputs.survivors.push_back(Holds(0, Id(3, 1)));
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(3, 1));
  EXPECT_EQ(ActionFor(inputs, inputs.survivors[0].report, Step(3)), SurvivorAction::kFetch);
}

TEST(RecoveryPointTest, GradientsOffTheChainAreNoSource) {
  RecoveryInputs inputs = Inputs(1, {{Generation(1), Step(0)}, {Generation(2), Step(5)}});
  inputs.survivors = {Holds(0, Id(5, 1), 1)};
  inputs.proofs = {Id(6, 2)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(5, 1)) << "they were computed in another history of step 6";
}

TEST(RecoveryPointTest, TheNewestSnapshotBoundsTheLoss) {
  RecoveryInputs inputs = Inputs();
  inputs.snapshots = {{ShardIndex(0), Id(3, 1)}, {ShardIndex(0), Id(4, 1)}, {ShardIndex(0), Id(9, 7)}};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(4, 1));
}

TEST(RecoveryPointTest, EveryShardNeedsASourceOfTheSameState) {
  RecoveryInputs inputs = Inputs(2);
  inputs.survivors = {Holds(0, Id(6, 1)), Holds(1, Id(5, 1))};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(0, 0)) << "neither step has sources for both shards";
  inputs.snapshots = {{ShardIndex(0), Id(5, 1)}};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(5, 1));
  inputs.survivors[1] = Holds(1, Id(5, 1), 1);
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 1)) << "stage 0 proves the vote, stage 1 rolls forward";
}

TEST(RecoveryPointTest, AShardWithoutAnySourceSendsAllBack) {
  RecoveryInputs inputs = Inputs(2);
  inputs.survivors = {Holds(0, Id(6, 1)), HoldsNothing(1)};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(0, 0));
  EXPECT_TRUE(HasSource(inputs, ShardIndex(1), Step(0)));
  EXPECT_FALSE(HasSource(inputs, ShardIndex(1), Step(6)));
}

TEST(RecoveryPointTest, ASnapshotIsAlsoAProof) {
  RecoveryInputs inputs = Inputs(2);
  inputs.survivors = {Holds(0, Id(5, 1), 1)};
  inputs.snapshots = {{ShardIndex(1), Id(6, 1)}};
  EXPECT_EQ(DecideRecoveryPoint(inputs), Id(6, 1));
}

// ---- against the model: a content is the list of generations in which its steps were applied.

using Content = std::vector<uint64_t>;

StateId IdOf(const Content& c) { return Id(static_cast<int64_t>(c.size()), c.empty() ? 0 : c.back()); }

struct ModelRank {
  int shard;
  Content memory;
  bool valid;
  uint64_t gradients;
};

// The greatest step whose true history every shard has at hand, or can reach by one proved apply.
Content ModelPoint(const Content& line, int shards, const std::vector<ModelRank>& ranks,
                   const std::vector<std::pair<int, Content>>& snapshots, const std::vector<Content>& proofs, size_t start) {
  auto prefix = [](const Content& c, size_t n) { return Content(c.begin(), c.begin() + static_cast<std::ptrdiff_t>(n)); };
  for (size_t step = line.size(); step > 0; --step) {
    const Content goal = prefix(line, step);
    auto proves = [&](const Content& c) { return c.size() >= step && prefix(c, step) == goal; };
    // What is off the chain at its own end proves nothing to anybody who sees labels only.
    auto on_line = [&](const Content& c) { return c.size() <= line.size() && c == prefix(line, c.size()); };
    bool proof = start >= step;
    for (const ModelRank& r : ranks) proof |= r.valid && on_line(r.memory) && proves(r.memory);
    for (const auto& [shard, c] : snapshots) proof |= on_line(c) && proves(c);
    for (const Content& c : proofs) proof |= on_line(c) && proves(c);
    bool all = true;
    for (int s = 0; s < shards && all; ++s) {
      bool source = false;
      for (const auto& [shard, c] : snapshots) source |= shard == s && c == goal;
      for (const ModelRank& r : ranks) {
        if (r.shard != s || !r.valid) continue;
        source |= r.memory == goal;
        Content next = r.memory;
        next.push_back(r.gradients);
        source |= r.gradients != 0 && proof && next == goal;
      }
      all = source;
    }
    if (all) return goal;
  }
  return {};
}

TEST(RecoveryPointTest, EqualsTheModelOnRandomCases) {
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    Prng prng(seed);
    // A history of generations, each starting somewhere in what the ones before it had applied.
    std::vector<ChainLink> links;
    Content chain;                     // the true history up to the newest start
    std::vector<Content> past = {{}};  // contents that existed at some time
    const auto generations = static_cast<uint64_t>(prng.Between(1, 4));
    for (uint64_t g = 1; g <= generations; ++g) {
      const auto start = static_cast<size_t>(prng.UpTo(chain.size()));
      chain.resize(start);
      links.push_back({Generation(g), Step(static_cast<int64_t>(start))});
      const auto steps = prng.Between(0, 3);
      for (int64_t i = 0; i < steps; ++i) {
        chain.push_back(g);
        past.push_back(chain);
      }
    }
    Content line(chain.begin(), chain.begin() + links.back().start.value);
    while (line.size() < 14) line.push_back(generations);
    const int shards = static_cast<int>(prng.Between(1, 2));
    RecoveryInputs inputs = Inputs(shards, links);
    std::vector<ModelRank> ranks;
    const auto count = prng.UpTo(5);
    auto any = [&] { return past[prng.UpTo(past.size() - 1)]; };
    for (uint64_t i = 0; i < count; ++i) {
      ModelRank r{static_cast<int>(prng.UpTo(static_cast<uint64_t>(shards - 1))), any(), prng.Chance(4, 5),
                  prng.Chance(1, 2) ? static_cast<uint64_t>(prng.Between(1, static_cast<int64_t>(generations))) : 0};
      // Gradients belong to a generation that could run on this memory.
      if (r.gradients != 0 && !r.memory.empty()) r.gradients = std::max(r.gradients, r.memory.back());
      ranks.push_back(r);
      inputs.survivors.push_back({ProcessId(i), ShardIndex(r.shard), {r.valid, IdOf(r.memory), Generation(r.gradients)}});
    }
    std::vector<std::pair<int, Content>> snapshots;
    for (uint64_t i = prng.UpTo(3); i > 0; --i) {
      snapshots.emplace_back(static_cast<int>(prng.UpTo(static_cast<uint64_t>(shards - 1))), any());
      if (snapshots.back().second.empty()) continue;
      inputs.snapshots.push_back({ShardIndex(snapshots.back().first), IdOf(snapshots.back().second)});
    }
    std::vector<Content> proofs;
    for (uint64_t i = prng.UpTo(2); i > 0; --i) {
      proofs.push_back(any());
      inputs.proofs.push_back(IdOf(proofs.back()));
    }
    const Content expected =
        ModelPoint(line, shards, ranks, snapshots, proofs, static_cast<size_t>(links.back().start.value));
    ASSERT_EQ(DecideRecoveryPoint(inputs), IdOf(expected)) << "seed " << seed;
    for (int s = 0; s < shards; ++s) {
      ASSERT_TRUE(HasSource(inputs, ShardIndex(s), DecideRecoveryPoint(inputs).step)) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace everstep
