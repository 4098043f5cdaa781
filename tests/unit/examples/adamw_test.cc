#include "worker/examples/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "proto/base/prng.h"

namespace everstep::examples {
namespace {

std::vector<double> RandomNumbers(size_t count, uint64_t seed) {
  Prng prng(seed);
  std::vector<double> values(count);
  for (double& value : values)
    value = static_cast<double>(prng.Between(-1'000'000, 1'000'000)) / 1e6;
  return values;
}

AdamWConfig TestConfig() {
  return {.learning_rate = 0.01, .warmup_step_count = 3, .decay_step_count = 20};
}

double ReferenceRate(const AdamWConfig& c, int64_t step) {
  if (step < c.warmup_step_count) {
    return c.learning_rate * double(step + 1) / double(c.warmup_step_count);
  }
  const double progress = std::min(
      1.0, double(step - c.warmup_step_count) / double(c.decay_step_count - c.warmup_step_count));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return c.learning_rate * (c.final_rate_fraction + (1 - c.final_rate_fraction) * cosine);
}

TEST(AdamWTest, LearningRateWarmsUpThenFollowsTheCosine) {
  const AdamWConfig config = TestConfig();
  for (int64_t step = 0; step < 30; ++step) {
    EXPECT_NEAR(LearningRate(config, Step(step)), ReferenceRate(config, step), 1e-14) << step;
  }
  EXPECT_DOUBLE_EQ(LearningRate(config, Step(2)), 0.01);
  EXPECT_NEAR(LearningRate(config, Step(1000)), 0.001, 1e-15);
}

TEST(AdamWTest, UpdatesLikeThePlainFormula) {
  const AdamWConfig config = TestConfig();
  const std::vector<TensorInfo> tensors = {
      {.name = "matrix", .offset = 0, .count = 21, .shape = {3, 7}, .decayed = true},
      {.name = "gain", .offset = 21, .count = 7, .shape = {7}, .decayed = false}};
  std::vector<double> p = RandomNumbers(28, 1), m(28), v(28);
  std::vector<double> rp = p, rm(28), rv(28);
  std::vector<float> fp(p.begin(), p.end()), fm(28), fv(28);
  for (int64_t step = 0; step < 25; ++step) {
    const std::vector<double> g = RandomNumbers(28, static_cast<uint64_t>(100 + step));
    const std::vector<float> fg(g.begin(), g.end());
    ApplyAdamW<double>(config, tensors, Step(step), 0.7, g, p, m, v);
    ApplyAdamW<float>(config, tensors, Step(step), 0.7, fg, fp, fm, fv);
    const double rate = ReferenceRate(config, step);
    for (size_t i = 0; i < 28; ++i) {
      const double gradient = 0.7 * g[i];
      rm[i] = config.beta1 * rm[i] + (1 - config.beta1) * gradient;
      rv[i] = config.beta2 * rv[i] + (1 - config.beta2) * gradient * gradient;
      const double mean = rm[i] / (1 - std::pow(config.beta1, step + 1));
      const double variance = rv[i] / (1 - std::pow(config.beta2, step + 1));
      if (i < 21) rp[i] -= rate * config.weight_decay * rp[i];
      rp[i] -= rate * mean / (std::sqrt(variance) + config.epsilon);
    }
  }
  for (size_t i = 0; i < 28; ++i) {
    EXPECT_NEAR(p[i], rp[i], 1e-13) << i;
    EXPECT_NEAR(m[i], rm[i], 1e-13) << i;
    EXPECT_NEAR(v[i], rv[i], 1e-13) << i;
    EXPECT_NEAR(fp[i], rp[i], 1e-5) << i;
  }
}

TEST(AdamWTest, BlockSumsDoNotDependOnWhereAnArrayIsCut) {
  const std::vector<double> g = RandomNumbers(3 * kNormBlockElements + 17, 2);
  const std::span<const double> all(g);
  const std::vector<double> whole = BlockSquareSums(all);
  ASSERT_EQ(whole.size(), 4u);
  std::vector<double> parts = BlockSquareSums(all.first(kNormBlockElements));
  const std::vector<double> rest = BlockSquareSums(all.subspan(kNormBlockElements));
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
  double plain = 0;
  for (const double x : g) plain += x * x;
  EXPECT_NEAR(whole[0] + whole[1] + whole[2] + whole[3], plain, 1e-9 * plain);
}

TEST(AdamWTest, ClipsOnlyNormsAboveTheMaximum) {
  const std::vector<double> sums = {9.0, 16.0};
  EXPECT_DOUBLE_EQ(GlobalNorm(sums), 5.0);
  AdamWConfig config;
  config.gradient_norm_max = 2.0;
  EXPECT_DOUBLE_EQ(ClipScale(config, 5.0), 0.4);
  EXPECT_DOUBLE_EQ(ClipScale(config, 2.0), 1.0);
  EXPECT_DOUBLE_EQ(ClipScale(config, 0.0), 1.0);
}

TEST(AdamWTest, NormThatIsNotFiniteIsNotHidden) {
  EXPECT_TRUE(std::isnan(ClipScale({}, std::numeric_limits<double>::infinity())));
  EXPECT_TRUE(std::isnan(ClipScale({}, std::numeric_limits<double>::quiet_NaN())));
}

}  // namespace
}  // namespace everstep::examples
