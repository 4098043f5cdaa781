// Decisions after failures: each option where it is the right one, movement, restraint, and properties of random losses.
#include "controller/core/planner/replan.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "controller/core/planner/report.h"
#include "tests/unit/planner/clusters.h"

namespace everstep::planner {
namespace {

const Tables& Built() { return BuiltInTables(); }

CostModel Model(const Cluster& cluster, const Job& job) {
  auto model = CostModel::Create(cluster, job, Built(), {});
  EXPECT_TRUE(model.ok()) << model.status().message();
  return std::move(model).value();
}

// A plan of `job` that runs on `cluster`.
ReplanInput StartOn(const Cluster& cluster, const Job& job) {
  const CostModel model = Model(cluster, job);
  SearchLimits limits;
  limits.work_budget = 300'000;
  const auto plan = MakePlan(model, limits);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  ReplanInput input;
  input.work_budget = 300'000;
  input.running.layout = plan->layout;
  for (const PlanServer& s : cluster.servers) input.running.servers.push_back(s.id);
  input.running.step_seconds = plan->evaluation.step_seconds;
  input.running.steps_since_change = 1000;
  return input;
}
Cluster Without(Cluster cluster, const std::set<std::string>& names) {
  std::erase_if(cluster.servers, [&](const PlanServer& s) { return names.contains(s.id.value); });
  return cluster;
}
Cluster Join(Cluster cluster, const std::vector<PlanServer>& more) {
  cluster.servers.insert(cluster.servers.end(), more.begin(), more.end());
  return cluster;
}
const ReplanOption& Option(const Replan& replan, OptionKind kind) {
  const auto at = std::find_if(replan.options.begin(), replan.options.end(), [&](const auto& o) { return o.kind == kind; });
  EXPECT_NE(at, replan.options.end()) << OptionName(kind);
  return *at;
}

// 4 servers of 8, one stage each for 4-wide groups, with a spare of the same model.
Job ThirteenBillion() {
  Job job = NamedJob("gpt3-13b", 64);
  job.tensor_parallel = 4;
  job.pipeline_stages = 2;
  job.data_parallel = 4;
  return job;
}

TEST(ReplanTest, ASpareOfTheSameModelIsSwappedInAndOthersKeepTheirState) {
  const Cluster cluster = Alike(4, "A100-80", 8);
  const Job job = ThirteenBillion();
  ReplanInput input = StartOn(cluster, job);
  const Cluster after = Join(Without(cluster, {"s1"}), {MakeServer("spare", "A100-80", 8)});
  const CostModel model = Model(after, job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  EXPECT_EQ(replan->choice().kind, OptionKind::kSwap) << replan->message;
  EXPECT_EQ(replan->groups_lost, 2);
  EXPECT_EQ(replan->choice().groups_moved, 2);
  EXPECT_EQ(replan->choice().groups_kept, 6);
  EXPECT_GT(replan->choice().bytes_moved, 0);
  EXPECT_NEAR(replan->choice().throughput, replan->throughput_before, replan->throughput_before * 0.02);
  EXPECT_TRUE(CheckPlan(model, AsPlan(replan->choice())).ok());
}

TEST(ReplanTest, WithoutASpareTheJobShrinksAndMovesNothing) {
  const Cluster cluster = Alike(4, "A100-80", 8);
  Job job = ThirteenBillion();
  job.data_parallel = 0;
  ReplanInput input = StartOn(cluster, job);
  // Each server holds one whole pipeline.
  ASSERT_EQ(input.running.layout.data_parallel, 4);
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t s = 0; s < 2; ++s) input.running.layout.slots[input.running.layout.At(r, s)] = {r, 4 * s};
  }
  input.horizon_seconds = 60;
  const CostModel model = Model(Without(cluster, {"s1"}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  const ReplanOption& shrink = Option(*replan, OptionKind::kShrink);
  ASSERT_TRUE(shrink.possible) << shrink.reason;
  EXPECT_EQ(shrink.bytes_moved, 0);
  EXPECT_EQ(shrink.layout.data_parallel, 3);
  EXPECT_EQ(replan->choice().kind, OptionKind::kShrink) << replan->message;
  EXPECT_FALSE(Option(*replan, OptionKind::kSwap).possible);
  EXPECT_NE(Option(*replan, OptionKind::kSwap).reason.find("0 groups of 4 devices are free, 2 were lost"), std::string::npos);
}

TEST(ReplanTest, AServerThatHeldStagesOfTwoPipelinesCostsOneWhenASurvivorMoves) {
  const Cluster cluster = Alike(4, "A100-80", 8);
  Job job = ThirteenBillion();
  job.data_parallel = 0;
  ReplanInput input = StartOn(cluster, job);
  ASSERT_EQ(input.running.layout.data_parallel, 4);
  // Each server holds one stage of two pipelines.
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t s = 0; s < 2; ++s) input.running.layout.slots[input.running.layout.At(r, s)] = {r / 2 * 2 + s, r % 2 * 4};
  }
  const CostModel model = Model(Without(cluster, {"s1"}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  EXPECT_EQ(Option(*replan, OptionKind::kShrink).layout.data_parallel, 2);
  const ReplanOption& moved = Option(*replan, OptionKind::kShrinkAndMove);
  ASSERT_TRUE(moved.possible) << moved.reason;
  EXPECT_EQ(moved.layout.data_parallel, 3);
  EXPECT_EQ(moved.groups_moved, 1);
}

TEST(ReplanTest, APipelineIsMadeOfFreeGroupsOnlyWhereTheyFit) {
  const Cluster cluster = Alike(4, "A100-80", 8);
  Job job = ThirteenBillion();
  job.data_parallel = 0;
  ReplanInput input = StartOn(cluster, job);
  ASSERT_EQ(input.running.layout.data_parallel, 4);
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t s = 0; s < 2; ++s) input.running.layout.slots[input.running.layout.At(r, s)] = {r, 4 * s};
  }
  PlanServer tiny = MakeServer("a-tiny", "A100-80", 8), half = MakeServer("half", "A100-80", 4);
  tiny.memory_bytes = 2e9;
  // One server died: one group that fits is free, and two that do not.
  const CostModel model = Model(Join(Without(cluster, {"s1"}), {tiny, half}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  EXPECT_FALSE(Option(*replan, OptionKind::kSwap).possible);
  EXPECT_NE(Option(*replan, OptionKind::kSwap).reason.find("server a-tiny has"), std::string::npos);
  EXPECT_FALSE(Option(*replan, OptionKind::kShrinkAndMove).possible);
  const CostModel roomy = Model(Join(Without(cluster, {"s1"}), {tiny, half, MakeServer("other", "A100-80", 4)}), job);
  const auto whole = MakeReplan(roomy, input);
  ASSERT_TRUE(whole.ok());
  const ReplanOption& moved = Option(*whole, OptionKind::kShrinkAndMove);
  ASSERT_TRUE(moved.possible) << moved.reason;
  EXPECT_EQ(moved.layout.data_parallel, 4);
  EXPECT_EQ(moved.groups_moved, 2);
}

TEST(ReplanTest, SurvivorsOfBrokenPipelinesAreRecombinedWithoutMoving) {
  // Four pipelines of four one-device servers; two lose a server each, at different stages.
  Cluster cluster = Alike(16, "A100-80", 1);
  Job job = NamedJob("gpt3-6.7b", 64);
  job.tensor_parallel = 1;
  job.pipeline_stages = 4;
  ReplanInput input = StartOn(cluster, job);
  const Layout& l = input.running.layout;
  ASSERT_EQ(l.data_parallel, 4);
  const auto name = [&](int32_t r, int32_t s) {
    return input.running.servers[static_cast<size_t>(l.slots[l.At(r, s)].server)].value;
  };
  const CostModel model = Model(Without(cluster, {name(0, 1), name(2, 1)}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  EXPECT_EQ(Option(*replan, OptionKind::kShrink).layout.data_parallel, 2);  // both lost stage 1
  const CostModel other = Model(Without(cluster, {name(0, 1), name(0, 2)}), job);
  const auto same_pipeline = MakeReplan(other, input);
  ASSERT_TRUE(same_pipeline.ok());
  EXPECT_EQ(Option(*same_pipeline, OptionKind::kShrink).layout.data_parallel, 3);
  const CostModel third = Model(Without(cluster, {name(0, 1), name(2, 2)}), job);
  const auto mixed = MakeReplan(third, input);
  ASSERT_TRUE(mixed.ok());
  const ReplanOption& shrink = Option(*mixed, OptionKind::kShrink);
  EXPECT_EQ(shrink.layout.data_parallel, 3);  // two broken pipelines make one whole
  EXPECT_EQ(shrink.bytes_moved, 0);
  // Six survivors of pipelines 0 and 2 make one pipeline; with moves no more than that.
  EXPECT_FALSE(Option(*mixed, OptionKind::kShrinkAndMove).possible);
  // Both lost stage 1: six survivors make a third pipeline when one of them loads another stage.
  const ReplanOption& moved = Option(*replan, OptionKind::kShrinkAndMove);
  ASSERT_TRUE(moved.possible) << moved.reason;
  EXPECT_EQ(moved.layout.data_parallel, 3);
  EXPECT_EQ(moved.groups_moved, 1);
}

TEST(ReplanTest, ASlowerSpareWithLessMemoryGetsASmallerShare) {
  // The question of the issue: a big server died; there is a smaller one, and slower ones.
  Cluster cluster = Alike(4, "A100-80", 1);
  Job job = NamedJob("gpt2-xl", 64);
  job.tensor_parallel = 1;
  job.pipeline_stages = 1;
  ReplanInput input = StartOn(cluster, job);
  ASSERT_EQ(input.running.layout.data_parallel, 4);
  PlanServer small = MakeServer("small", "A100-40", 1), slow = MakeServer("slow", "A100-40", 1);
  small.speed = 0.5;
  slow.speed = 0.25;
  const CostModel model = Model(Join(Without(cluster, {"s2"}), {slow, small}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  const ReplanOption& swap = Option(*replan, OptionKind::kSwap);
  ASSERT_TRUE(swap.possible) << swap.reason;
  const Layout& l = swap.layout;
  int64_t small_share = 0, other_share = 0;
  for (int32_t r = 0; r < l.data_parallel; ++r) {
    const std::string& id = model.cluster().servers[static_cast<size_t>(l.slots[static_cast<size_t>(r)].server)].id.value;
    EXPECT_NE(id, "slow");
    (id == "small" ? small_share : other_share) = l.shares[static_cast<size_t>(r)];
  }
  EXPECT_GT(small_share, 0);
  EXPECT_LT(small_share, other_share);
  EXPECT_GE(replan->choice().throughput, swap.throughput * (1 - 1e-9));
}

TEST(ReplanTest, WaitingIsChosenWhenTheServerReturnsSoonAndTheRestIsSlow) {
  const Cluster cluster = Alike(2, "A100-80", 8);
  Job job = NamedJob("gpt3-13b", 64);
  job.tensor_parallel = 8;
  ReplanInput input = StartOn(cluster, job);
  const CostModel model = Model(Without(cluster, {"s1"}), job);
  input.wait_seconds = 20;
  auto soon = MakeReplan(model, input);
  ASSERT_TRUE(soon.ok()) << soon.status().message();
  EXPECT_EQ(soon->choice().kind, OptionKind::kWait) << soon->message;
  input.wait_seconds = 36000;
  auto late = MakeReplan(model, input);
  ASSERT_TRUE(late.ok());
  EXPECT_NE(late->choice().kind, OptionKind::kWait) << late->message;
  input.wait_seconds = 0;
  EXPECT_FALSE(Option(*MakeReplan(model, input), OptionKind::kWait).possible);
}

TEST(ReplanTest, ALostStageWithoutAReplicaNeedsACopy) {
  const Cluster cluster = Alike(2, "A100-80", 8);
  Job job = NamedJob("gpt3-13b", 64);
  job.tensor_parallel = 8;
  job.pipeline_stages = 2;
  job.data_parallel = 1;
  job.spread = Spread::kOff;
  ReplanInput input = StartOn(cluster, job);
  const CostModel model = Model(Join(Without(cluster, {"s1"}), {MakeServer("spare", "A100-80", 8)}), job);
  const auto refused = MakeReplan(model, input);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no copy of layers"), std::string::npos) << refused.status().message();
  input.copies = {{ServerId(), 0, model.layer_count(), 40}, {ServerId("s0"), 0, model.layer_count(), 2}};
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  const ReplanOption& swap = Option(*replan, OptionKind::kSwap);
  ASSERT_TRUE(swap.possible);
  // The copy that is two steps behind is taken: detect + connect + transfer + start + two steps.
  EXPECT_NEAR(swap.recovery_seconds,
              input.detect_seconds + input.connect_seconds + input.start_cold_seconds + swap.transfer_seconds +
                  2 * input.running.step_seconds, 1e-6);
}

TEST(ReplanTest, AWarmSpareIsPreferredAndFaster) {
  Cluster cluster = Alike(4, "A100-80", 1);
  Job job = NamedJob("gpt2-xl", 64);
  ReplanInput input = StartOn(cluster, job);
  input.warm = {ServerId("b")};
  const CostModel model =
      Model(Join(Without(cluster, {"s0"}), {MakeServer("a", "A100-80", 1), MakeServer("b", "A100-80", 1)}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  const Layout& l = Option(*replan, OptionKind::kSwap).layout;
  EXPECT_TRUE(std::any_of(l.slots.begin(), l.slots.end(), [&](const Slot& s) {
    return model.cluster().servers[static_cast<size_t>(s.server)].id.value == "b";
  }));
  EXPECT_LT(Option(*replan, OptionKind::kSwap).recovery_seconds, input.start_cold_seconds);
}

TEST(ReplanTest, ASpareOnTheSameLeafIsPreferredWhenItIsNearlyAsFast) {
  Cluster cluster = Alike(4, "A100-80", 1);
  Job job = NamedJob("gpt2-xl", 64);
  ReplanInput input = StartOn(cluster, job);
  PlanServer near = MakeServer("near", "A100-80", 1), far = MakeServer("far", "A100-80", 1);
  near.leaf = "l0";
  near.rack = "r0";
  near.speed = 0.98;
  far.leaf = "l9";
  job.pipeline_stages = input.running.layout.pipeline_stages;
  if (input.running.layout.pipeline_stages == 1) {
    // A replica of one stage has no neighbour; then speed decides.
    const CostModel model = Model(Join(Without(cluster, {"s3"}), {near, far}), job);
    const auto replan = MakeReplan(model, input);
    ASSERT_TRUE(replan.ok());
    EXPECT_TRUE(Option(*replan, OptionKind::kSwap).possible);
  }
  job.pipeline_stages = 2;
  input = StartOn(cluster, job);
  const CostModel model = Model(Join(Without(cluster, {"s3"}), {near, far}), job);
  const auto replan = MakeReplan(model, input);
  ASSERT_TRUE(replan.ok()) << replan.status().message();
  const Layout& l = Option(*replan, OptionKind::kSwap).layout;
  EXPECT_TRUE(std::any_of(l.slots.begin(), l.slots.end(), [&](const Slot& s) {
    return model.cluster().servers[static_cast<size_t>(s.server)].id.value == "near";
  }));
}

TEST(ReplanTest, WithoutALossAPlanIsKeptUnlessChangingPays) {
  Cluster cluster = Alike(4, "A100-80", 1);
  Job job = NamedJob("gpt2-xl", 64);
  ReplanInput input = StartOn(cluster, job);
  auto same = MakeReplan(Model(cluster, job), input);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same->choice().kind, OptionKind::kKeep) << same->message;
  // A little slower: the gain is too small.
  cluster.servers[0].speed = 0.97;
  auto little = MakeReplan(Model(cluster, job), input);
  ASSERT_TRUE(little.ok());
  EXPECT_EQ(little->choice().kind, OptionKind::kKeep) << little->message;
  // Half as fast: shares are cut anew, nothing moves.
  cluster.servers[0].speed = 0.5;
  auto half = MakeReplan(Model(cluster, job), input);
  ASSERT_TRUE(half.ok());
  EXPECT_EQ(half->choice().bytes_moved, 0) << half->message;
  EXPECT_EQ(half->choice().kind, OptionKind::kReshare) << half->message;
  EXPECT_GT(half->choice().throughput, half->options[0].throughput * 1.2);
  // But not right after the last change.
  input.running.steps_since_change = 3;
  auto early = MakeReplan(Model(cluster, job), input);
  ASSERT_TRUE(early.ok());
  EXPECT_EQ(early->choice().kind, OptionKind::kKeep);
  EXPECT_NE(early->message.find("50 must pass"), std::string::npos) << early->message;
}

TEST(ReplanTest, ServersThatJoinAreTakenInWhenTheGainOutweighsTheMove) {
  const Cluster cluster = Alike(2, "A100-80", 8);
  Job job = NamedJob("gpt3-6.7b", 256);
  ReplanInput input = StartOn(cluster, job);
  const Cluster more = Join(cluster, {MakeServer("x0", "A100-80", 8), MakeServer("x1", "A100-80", 8)});
  auto grown = MakeReplan(Model(more, job), input);
  ASSERT_TRUE(grown.ok()) << grown.status().message();
  EXPECT_EQ(grown->choice().kind, OptionKind::kReshape) << grown->message;
  EXPECT_GT(grown->choice().throughput, grown->throughput_before * 1.5);
  input.horizon_seconds = 1;  // the next change comes at once: moving does not pay
  auto kept = MakeReplan(Model(more, job), input);
  ASSERT_TRUE(kept.ok());
  EXPECT_EQ(kept->choice().kind, OptionKind::kKeep) << kept->message;
}

TEST(ReplanTest, BadInputIsRefused) {
  const Cluster cluster = Alike(2, "A100-80", 8);
  const Job job = NamedJob("gpt2-xl", 64);
  const CostModel model = Model(cluster, job);
  const ReplanInput good = StartOn(cluster, job);
  ReplanInput bad = good;
  bad.running.step_seconds = 0;
  EXPECT_EQ(MakeReplan(model, bad).status().code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.running.layout.bounds.back() += 1;
  EXPECT_EQ(MakeReplan(model, bad).status().code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.running.layout.slots[0].server = 77;
  EXPECT_EQ(MakeReplan(model, bad).status().code(), StatusCode::kInvalidArgument);
  bad = good;
  bad.horizon_seconds = -1;
  EXPECT_EQ(MakeReplan(model, bad).status().code(), StatusCode::kInvalidArgument);
}

TEST(ReplanTest, RandomLossesGiveOneValidPlanThatKeepsIncumbentsInPlace) {
  int decisions = 0, refusals = 0;
  for (int number = 0; number < 60; ++number) {
    SCOPED_TRACE(testing::Message() << "case " << number);
    Prng prng(static_cast<uint64_t>(number) + 600);
    Cluster cluster = Alike(static_cast<int>(prng.Between(4, 10)), "A100-80", 1 << prng.Between(0, 2));
    Job job = NamedJob("gpt2-xl", 48);
    job.tensor_parallel = 1;
    job.pipeline_stages = static_cast<int32_t>(prng.Between(1, 3));
    job.shard_optimizer = prng.Chance(1, 4);
    ReplanInput input = StartOn(cluster, job);
    if (prng.Chance(1, 2)) input.copies = {{ServerId(), 0, 50, 10}};
    std::set<std::string> lost;
    for (int64_t i = prng.Between(1, 3); i > 0; --i) lost.insert("s" + std::to_string(prng.UpTo(cluster.servers.size() - 1)));
    Cluster after = Without(cluster, lost);
    for (int64_t i = prng.Between(0, 2); i > 0; --i) {
      PlanServer spare = MakeServer("x" + std::to_string(i), prng.Chance(1, 2) ? "A100-80" : "A100-40", 4);
      spare.speed = static_cast<double>(prng.Between(5, 10)) / 10;
      after.servers.push_back(spare);
    }
    const CostModel model = Model(after, job);
    const auto replan = MakeReplan(model, input);
    const auto again = MakeReplan(model, input);
    ASSERT_EQ(replan.ok(), again.ok());
    if (!replan.ok()) {
      ++refusals;
      EXPECT_EQ(replan.status().code(), StatusCode::kResourceExhausted);
      continue;
    }
    ++decisions;
    EXPECT_EQ(ReplanJson(model, *replan), ReplanJson(model, *again));
    const ReplanOption& chosen = replan->choice();
    ASSERT_TRUE(chosen.possible);
    for (const ReplanOption& o : replan->options) {
      if (!o.possible) {
        EXPECT_FALSE(o.reason.empty()) << OptionName(o.kind);
        continue;
      }
      // The smallest loss, give or take what the model cannot tell apart; then it moves less.
      const double near = 0.01 * input.horizon_seconds * replan->throughput_before;
      EXPECT_LE(chosen.loss_samples, o.loss_samples + near + 1e-6) << OptionName(o.kind);
      if (chosen.loss_samples > o.loss_samples + 1e-6) {
        EXPECT_LT(chosen.bytes_moved, o.bytes_moved) << OptionName(o.kind);
      }
      if (o.layout.slots.empty()) continue;
      const Status valid = CheckPlan(model, AsPlan(o));
      EXPECT_TRUE(valid.ok()) << OptionName(o.kind) << ": " << valid.message();
    }
    if (replan->groups_lost == 0) continue;  // only idle servers died
    // A swap touches the lost places only.
    const ReplanOption& swap = Option(*replan, OptionKind::kSwap);
    if (swap.possible) {
      EXPECT_EQ(swap.groups_moved, replan->groups_lost);
    }
  }
  EXPECT_GT(decisions, 40);
}

}  // namespace
}  // namespace everstep::planner
