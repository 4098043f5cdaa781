// Plans: what they must keep for any cluster and job, how near they come to exhaustive search, and what they choose where
// the right answer is known.
#include "controller/core/planner/plan.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "controller/core/planner/exact.h"
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

TEST(PlanTest, AnyClusterAndJobGivesAValidPlanOrAReason) {
  int plans = 0, refusals = 0;
  for (int number = 0; number < 400; ++number) {
    SCOPED_TRACE(testing::Message() << "case " << number);
    Prng prng(static_cast<uint64_t>(number) + 1000);
    const Cluster cluster = RandomCluster(prng);
    const Job job = RandomJob(prng, cluster);
    auto model = CostModel::Create(cluster, job, Built(), {});
    if (!model.ok()) {
      EXPECT_EQ(model.status().code(), StatusCode::kInvalidArgument) << model.status().message();
      continue;
    }
    SearchLimits limits;
    limits.work_budget = 200'000;
    const auto plan = MakePlan(*model, limits);
    if (!plan.ok()) {
      ++refusals;
      EXPECT_EQ(plan.status().code(), StatusCode::kResourceExhausted) << plan.status().message();
      EXPECT_FALSE(plan.status().message().empty());
      continue;
    }
    ++plans;
    const Status valid = CheckPlan(*model, *plan);
    EXPECT_TRUE(valid.ok()) << valid.message();
    EXPECT_LE(plan->alternatives.size(), 3u);
    const TimeParts& p = plan->evaluation.parts;
    EXPECT_NEAR(p.compute + p.tensor + p.transfer + p.bubble + p.reduce + p.update, plan->evaluation.step_seconds,
                plan->evaluation.step_seconds * 1e-9);
  }
  EXPECT_GT(plans, 150);
  EXPECT_GT(refusals, 30);
}

// A refusal for memory is true: no layout at all, over all sizes and cuts in order, fits.
TEST(PlanTest, ARefusalForMemoryIsTrue) {
  int checked = 0;
  for (int number = 0; number < 60; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 40);
    Cluster cluster;
    const auto count = prng.Between(1, 4);
    for (int64_t i = 0; i < count; ++i) {
      PlanServer s = MakeServer("n" + std::to_string(i), "cpu", 1, 1e9);
      s.memory_bytes = static_cast<double>(prng.Between(60, 140)) * 1e6;
      cluster.servers.push_back(s);
    }
    std::vector<double> work(static_cast<size_t>(prng.Between(1, 6)), 1.0);
    Job job = ProfileJob(work, 4);
    for (LayerProfile& l : job.profile) l.parameters = static_cast<double>(prng.Between(1, 4)) * 1e6;
    const CostModel model = Model(cluster, job);
    const auto plan = MakePlan(model);
    // By hand: any ordered choice of servers, any cut.
    std::vector<int32_t> order(cluster.servers.size());
    std::iota(order.begin(), order.end(), 0);
    bool fits = false;
    do {
      for (int32_t pp = 1; pp <= std::min<int32_t>(static_cast<int32_t>(count), model.layer_count()); ++pp) {
        Layout layout;
        layout.pipeline_stages = pp;
        std::function<bool(int32_t, int32_t)> cut = [&](int32_t stage, int32_t begin) -> bool {
          if (stage == pp) return begin == model.layer_count();
          for (int32_t end = begin + 1; end <= model.layer_count(); ++end) {
            if (model.MemoryNeeded(layout, stage, begin, end, 4) <=
                    model.servers()[static_cast<size_t>(order[static_cast<size_t>(stage)])].memory &&
                cut(stage + 1, end)) {
              return true;
            }
          }
          return false;
        };
        fits = fits || cut(0, 0);
      }
    } while (!fits && std::next_permutation(order.begin(), order.end()));
    if (plan.ok()) {
      EXPECT_TRUE(fits);
    } else {
      ++checked;
      EXPECT_FALSE(fits) << "case " << number << ": " << plan.status().message();
    }
  }
  EXPECT_GT(checked, 10);
}

TEST(PlanTest, TheSameInputsGiveTheSameBytes) {
  for (int number = 0; number < 20; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 7);
    const Cluster cluster = RandomCluster(prng);
    const Job job = RandomJob(prng, cluster);
    auto model = CostModel::Create(cluster, job, Built(), {});
    if (!model.ok()) continue;
    SearchLimits limits;
    limits.work_budget = 500'000;
    const auto a = MakePlan(*model, limits), b = MakePlan(*model, limits);
    ASSERT_EQ(a.ok(), b.ok());
    if (a.ok()) {
      EXPECT_EQ(PlanJson(*model, *a), PlanJson(*model, *b));
    } else {
      EXPECT_EQ(a.status(), b.status());
    }
  }
}

TEST(PlanTest, RenamingAndReorderingServersChangesTheCostByAtMostOnePercent) {
  for (int number = 0; number < 25; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 90);
    Cluster cluster;
    for (int64_t i = prng.Between(2, 5); i > 0; --i) {
      PlanServer s = MakeServer("n" + std::to_string(i), "cpu", 1, static_cast<double>(prng.Between(1, 10)) * 1e8);
      s.speed = static_cast<double>(prng.Between(1, 4));
      cluster.servers.push_back(s);
    }
    std::vector<double> work;
    for (int64_t i = prng.Between(3, 8); i > 0; --i) work.push_back(static_cast<double>(prng.Between(1, 30)));
    const Job job = ProfileJob(work, 12);
    const auto before = MakePlan(cluster, job, Built());
    for (size_t i = cluster.servers.size(); i > 1; --i) std::swap(cluster.servers[i - 1], cluster.servers[prng.UpTo(i - 1)]);
    for (size_t i = 0; i < cluster.servers.size(); ++i) cluster.servers[i].id = ServerId("x" + std::to_string(i));
    const auto after = MakePlan(cluster, job, Built());
    ASSERT_TRUE(before.ok() && after.ok());
    EXPECT_NEAR(after->evaluation.step_seconds / before->evaluation.step_seconds, 1, 0.01) << "case " << number;
  }
}

// Every shape, every placement of different servers, every cut, with shares by the heap.
double Exhaustive(const CostModel& model) {
  const auto count = static_cast<int32_t>(model.servers().size());
  double best = kInfinite;
  const auto total = static_cast<int32_t>(model.job().global_batch);
  for (int32_t pp = 1; pp <= std::min(count, model.layer_count()); ++pp) {
    for (int32_t dp = 1; dp * pp <= count && dp <= total; ++dp) {
      Layout layout;
      layout.data_parallel = dp;
      layout.pipeline_stages = pp;
      layout.slots.resize(static_cast<size_t>(dp * pp));
      std::vector<std::vector<int32_t>> cuts;
      std::vector<int32_t> bounds(static_cast<size_t>(pp + 1), 0);
      std::function<void(int32_t)> cut = [&](int32_t s) {
        if (s == pp) {
          bounds[static_cast<size_t>(pp)] = model.layer_count();
          cuts.push_back(bounds);
          return;
        }
        for (int32_t b = bounds[static_cast<size_t>(s - 1)] + 1; b <= model.layer_count() - (pp - s); ++b) {
          bounds[static_cast<size_t>(s)] = b;
          cut(s + 1);
        }
      };
      cut(1);
      std::vector<bool> used(static_cast<size_t>(count), false);
      std::function<void(size_t)> place = [&](size_t role) {
        if (role == layout.slots.size()) {
          for (const auto& c : cuts) {
            layout.bounds = c;
            const Evaluation e = model.Evaluate(layout, true);
            if (e.verdict == Verdict::kFits) best = std::min(best, e.step_seconds);
          }
          return;
        }
        for (int32_t i = 0; i < count; ++i) {
          if (used[static_cast<size_t>(i)]) continue;
          // Replicas are alike: the first servers of them rise.
          if (role % static_cast<size_t>(pp) == 0 && role > 0 && i < layout.slots[role - static_cast<size_t>(pp)].server) continue;
          used[static_cast<size_t>(i)] = true;
          layout.slots[role].server = i;
          place(role + 1);
          used[static_cast<size_t>(i)] = false;
        }
      };
      place(0);
    }
  }
  return best;
}

TEST(PlanTest, ReachesNinetyEightPercentOfExhaustiveSearchOnFourUnevenServers) {
  double worst = 1, sum = 0;
  int cases = 0;
  for (int number = 0; number < 25; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 300);
    Cluster cluster;
    for (int i = 0; i < 4; ++i) {
      PlanServer s = MakeServer("n" + std::to_string(i), "cpu", 1, static_cast<double>(prng.Between(1, 20)) * 1e8);
      s.speed = static_cast<double>(prng.Between(10, 40)) / 10;
      if (prng.Chance(1, 2)) s.memory_bytes = static_cast<double>(prng.Between(90, 200)) * 1e6;
      cluster.servers.push_back(s);
    }
    std::vector<double> work;
    for (int64_t i = prng.Between(3, 6); i > 0; --i) work.push_back(static_cast<double>(prng.Between(5, 50)));
    Job job = ProfileJob(work, prng.Between(4, 24), static_cast<double>(prng.Between(1, 30)) * 1e5);
    job.spread = Spread::kOff;
    const CostModel model = Model(cluster, job);
    const double best = Exhaustive(model);
    const auto plan = MakePlan(model);
    ASSERT_EQ(plan.ok(), best < kInfinite) << "case " << number;
    if (!plan.ok()) continue;
    const double ratio = best / plan->evaluation.step_seconds;
    EXPECT_LE(ratio, 1 + 1e-9) << "case " << number;
    worst = std::min(worst, ratio);
    sum += ratio;
    ++cases;
  }
  EXPECT_GE(sum / cases, 0.98);
  EXPECT_GE(worst, 0.98);
}

TEST(PlanTest, SpeedsOneTwoFourTakeSharesOneTwoFour) {
  Cluster cluster = Alike(3, "cpu", 1);
  cluster.servers[1].speed = 2;
  cluster.servers[2].speed = 4;
  Job job = ProfileJob({30}, 70);  // one layer: replicas only
  const auto plan = MakePlan(cluster, job, Built());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->layout.data_parallel, 3);
  for (int32_t r = 0; r < 3; ++r) {
    const double speed = cluster.servers[static_cast<size_t>(plan->layout.slots[static_cast<size_t>(r)].server)].speed;
    EXPECT_NEAR(static_cast<double>(plan->layout.shares[static_cast<size_t>(r)]), 70 * speed / 7, 1);
  }
}

TEST(PlanTest, ASlowLinkIsCrossedAtTheNarrowCut) {
  // Four equal layers; the cut in the middle is wide, and the two around it give the same computation on speeds 1 and 3.
  Cluster cluster = Alike(2, "cpu", 1, 1e7);
  for (PlanServer& s : cluster.servers) s.memory_bytes = 60e6;  // all four layers fit on neither
  cluster.servers[0].speed = 1;
  cluster.servers[1].speed = 1;
  Job job = ProfileJob({10, 10, 10, 10}, 8, 1e3);
  job.pipeline_stages = 2;
  job.profile[1].output_bytes = 5e6;  // wide in the middle
  const CostModel model = Model(cluster, job);
  const auto plan = MakePlan(model);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_NE(plan->layout.bounds[1], 2);
  // With equal computation on either side of two cuts, the narrow one: layers of 10, 5, 5, 10 cut at 2 only; add twins.
  job = ProfileJob({10, 0.001, 10}, 8, 1e3);
  job.pipeline_stages = 2;
  job.profile[0].output_bytes = 5e6;
  const auto twin = MakePlan(cluster, job, Built());
  ASSERT_TRUE(twin.ok()) << twin.status().message();
  EXPECT_EQ(twin->layout.bounds[1], 2);
}

TEST(PlanTest, TensorParallelGroupsStayInsideAServer) {
  Job job = NamedJob("gpt3-13b", 64);
  job.tensor_parallel = 8;
  const CostModel model = Model(Alike(4, "A100-80", 8), job);
  const auto plan = MakePlan(model);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_TRUE(CheckPlan(model, *plan).ok());
  job.tensor_parallel = 16;
  const auto refused = MakePlan(Alike(4, "A100-80", 8), job, Built());
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no server has more than 8 devices"), std::string::npos);
}

TEST(PlanTest, RefusalsSayWhatIsMissing) {
  const auto message = [](const Cluster& cluster, const Job& job) {
    const auto plan = MakePlan(cluster, job, Built());
    EXPECT_FALSE(plan.ok());
    return plan.status().message();
  };
  Job job = NamedJob("gpt3-175b", 64);
  EXPECT_NE(message(Alike(1, "A100-80", 8), job).find("no layout was found that runs the job on these 1 servers"), std::string::npos);
  EXPECT_NE(message(Alike(1, "A100-80", 8), job).find("needs"), std::string::npos);
  job = NamedJob("bert-large", 64);
  EXPECT_NE(message(Alike(2, "V100-32", 8), job).find("without bf16"), std::string::npos);
  job.servers_min = 3;
  EXPECT_NE(message(Alike(2, "A100-80", 8), job).find("2 servers may be used; the job needs at least 3"), std::string::npos);
  job = NamedJob("bert-large", 7);
  job.micro_batch_min = 2;
  job.micro_batch_max = 4;
  EXPECT_NE(message(Alike(2, "A100-80", 8), job).find("no micro-batch of 2 to 4"), std::string::npos);
  job = NamedJob("bert-large", 64);
  job.pipeline_stages = 60;
  EXPECT_NE(message(Alike(16, "A100-80", 8), job).find("the model has 26 layers"), std::string::npos);
  job.pipeline_stages = 4;
  job.data_parallel = 8;
  EXPECT_NE(message(Alike(2, "A100-80", 8), job).find("16 devices may be used; the fixed sizes need 32"), std::string::npos);
  job = NamedJob("bert-large", 4);
  job.data_parallel = 8;
  EXPECT_NE(message(Alike(2, "A100-80", 8), job).find("at most 4 micro-batches"), std::string::npos);
  job = NamedJob("bert-large", 64);
  job.precision = Precision::kFp16;
  EXPECT_TRUE(MakePlan(Alike(2, "V100-32", 8), job, Built()).ok());
}

TEST(PlanTest, RequiredSpreadPutsReplicasOfAStageIntoDifferentDomains) {
  Job job = NamedJob("bert-large", 64);
  job.spread = Spread::kRequired;
  const Cluster cluster = Alike(8, "A100-80", 1);
  const auto plan = MakePlan(cluster, job, Built());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_GE(plan->evaluation.domains_min, 2);
  Cluster one = cluster;
  for (PlanServer& s : one.servers) s.failure_domain = "only";
  const auto refused = MakePlan(one, job, Built());
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("in one failure domain"), std::string::npos);
}

TEST(PlanTest, ObjectivesOfCostAndEnergyNeverCostMoreThanTheFastestPlan) {
  Cluster cluster = Alike(4, "A100-80", 2);
  for (size_t i = 2; i < 4; ++i) cluster.servers[i].price_per_hour = 40;
  Job job = NamedJob("gpt2-xl", 32);
  job.spread = Spread::kOff;
  const auto fastest = MakePlan(cluster, job, Built());
  job.objective = Objective::kCost;
  const auto cheapest = MakePlan(cluster, job, Built());
  job.objective = Objective::kEnergy;
  const auto leanest = MakePlan(cluster, job, Built());
  ASSERT_TRUE(fastest.ok() && cheapest.ok() && leanest.ok());
  EXPECT_LT(cheapest->evaluation.price, fastest->evaluation.price * 0.9);
  EXPECT_LE(leanest->evaluation.joules, fastest->evaluation.joules * 1.0001);
  EXPECT_LE(fastest->evaluation.step_seconds, cheapest->evaluation.step_seconds);
}

TEST(PlanTest, MemoryGrowsWithStageDepthMicroBatchAndFallsWithSharding) {
  Job job = NamedJob("llama2-7b", 64);
  job.recompute = Recompute::kNone;
  const CostModel plain = Model(Alike(4, "A100-80", 8), job);
  Layout layout;
  layout.pipeline_stages = 4;
  layout.data_parallel = 4;
  layout.tensor_parallel = 2;
  EXPECT_GT(plain.MemoryNeeded(layout, 0, 1, 9, 16), plain.MemoryNeeded(layout, 3, 1, 9, 16));
  Layout bigger = layout;
  bigger.micro_batch = 2;
  EXPECT_GT(plain.MemoryNeeded(bigger, 0, 1, 9, 16), plain.MemoryNeeded(layout, 0, 1, 9, 16));
  job.shard_optimizer = true;
  const CostModel sharded = Model(Alike(4, "A100-80", 8), job);
  EXPECT_LT(sharded.MemoryNeeded(layout, 0, 1, 9, 16), plain.MemoryNeeded(layout, 0, 1, 9, 16));
}

TEST(PlanTest, CalibrationOfASlowDeviceMovesWorkAway) {
  Cluster cluster = Alike(2, "cpu", 1);
  cluster.servers[1].device = "T4";
  Job job = ProfileJob({30}, 60);
  job.precision = Precision::kFp16;
  Calibration calibration;
  calibration.Observe("compute/T4", 2, 1);
  const auto plan = MakePlan(cluster, job, Built(), calibration);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan->layout.shares.size(), 2u);
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_NEAR(static_cast<double>(plan->layout.shares[r]), plan->layout.slots[r].server == 1 ? 20 : 40, 1);
  }
}

TEST(PlanTest, ThePicturesNameEveryServerOfASmallPlan) {
  Cluster cluster = Alike(4, "A100-80", 8);
  cluster.servers[2].id = ServerId("<b&d>");
  const CostModel model = Model(cluster, NamedJob("gpt3-13b", 64));
  const auto plan = MakePlan(model);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::string text = PlanText(model, *plan), svg = PlanSvg(model, *plan), json = PlanJson(model, *plan);
  for (const char* name : {"s0", "s1", "<b&d>", "s3"}) {
    EXPECT_NE(text.find(name), std::string::npos) << text;
    EXPECT_NE(json.find(name), std::string::npos);
  }
  EXPECT_NE(svg.find("&lt;b&amp;d&gt;"), std::string::npos);
  EXPECT_EQ(svg.find("<b&d>"), std::string::npos);
  EXPECT_NE(text.find("not chosen:"), std::string::npos);
}

// Pipelines of the known synthetic profile: 96 layers, (i mod 13 + 1) ms forward, (i mod 7 + 1) ms backward.
TEST(PlanTest, CutsOfTheSyntheticProfileAreOptimalByTheTemplateBottleneck) {
  std::vector<double> work;
  for (int i = 0; i < 96; ++i) work.push_back(i % 13 + 1 + i % 7 + 1);
  for (int32_t stages = 1; stages <= 24; ++stages) {
    const auto bounds = CutChain(
        96, stages,
        [&](int32_t, int32_t begin, int32_t end) { return std::accumulate(work.begin() + begin, work.begin() + end, 0.0); },
        [](int32_t, int32_t) { return 0.0; });
    ASSERT_EQ(bounds.size(), static_cast<size_t>(stages + 1));
    double worst = 0;
    for (int32_t s = 0; s < stages; ++s) {
      worst = std::max(worst, std::accumulate(work.begin() + bounds[static_cast<size_t>(s)],
                                              work.begin() + bounds[static_cast<size_t>(s + 1)], 0.0));
    }
    // No bottleneck below it is feasible: greedy filling under worst - 1 needs more stages (times are whole).
    int32_t needed = 1;
    double run = 0;
    for (const double w : work) {
      if (run + w > worst - 1) {
        ++needed;
        run = 0;
      }
      run += w;
    }
    EXPECT_GT(needed, stages);
  }
}

}  // namespace
}  // namespace everstep::planner
