#include "worker/examples/transformer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/prng.h"
#include "worker/examples/adamw.h"
#include "worker/examples/cpu_check.h"
#include "worker/examples/text_data.h"

namespace everstep::examples {
namespace {

// Sizes that are no multiple of any packet, so that every tail is taken.
ModelConfig OddConfig() {
  return {.layer_count = 3,
          .width = 24,
          .head_count = 2,
          .mlp_width = 40,
          .sequence_length = 11,
          .sequences_per_micro_batch = 2};
}

TokenBatch RandomTokens(const ModelConfig& config, uint64_t seed) {
  Prng prng(seed);
  TokenBatch batch;
  for (int64_t i = 0; i < config.TokensPerMicroBatch(); ++i) {
    batch.inputs.push_back(static_cast<uint8_t>(prng.UpTo(255)));
    batch.targets.push_back(static_cast<uint8_t>(prng.UpTo(255)));
  }
  return batch;
}

template <typename Scalar>
std::vector<Scalar> RandomParameters(const Stage<Scalar>& stage) {
  std::vector<Scalar> parameters(static_cast<size_t>(stage.parameter_count()));
  stage.Initialize(3, parameters);
  // Gains start at one; move them, or a mistake in their gradient could hide.
  Prng prng(4);
  for (const TensorInfo& tensor : stage.tensors()) {
    if (tensor.decayed) continue;
    for (int64_t i = 0; i < tensor.count; ++i) {
      parameters[static_cast<size_t>(tensor.offset + i)] +=
          static_cast<Scalar>(prng.Between(-300, 300)) / Scalar(1000);
    }
  }
  return parameters;
}

template <typename Scalar>
Stage<Scalar> StageOf(const ModelConfig& config, int64_t index, int64_t count) {
  return Stage<Scalar>::Create(config, PipelineStage(config, index, count).value()).value();
}

template <typename Scalar>
bool SameBits(std::span<const Scalar> a, std::span<const Scalar> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

template <typename Scalar>
struct PassResult {
  double loss = 0;
  std::vector<Scalar> gradients;
};

template <typename Scalar>
PassResult<Scalar> RunWhole(const Stage<Scalar>& stage, std::span<const Scalar> parameters,
                            const TokenBatch& tokens, ForwardContext<Scalar>& context) {
  PassResult<Scalar> result;
  result.gradients.resize(parameters.size());
  stage.Forward(parameters, tokens, {}, context);
  result.loss = context.loss();
  stage.Backward(parameters, tokens, {}, Scalar(0.5), context, result.gradients);
  return result;
}

template <typename Scalar>
class TransformerTest : public testing::Test {};
using Scalars = testing::Types<float, double>;
TYPED_TEST_SUITE(TransformerTest, Scalars);

TEST(TransformerGradientTest, AgreesWithFiniteDifferencesForEveryTensor) {
  const ModelConfig config = OddConfig();
  const Stage<double> stage = StageOf<double>(config, 0, 1);
  std::vector<double> parameters = RandomParameters(stage);
  const TokenBatch tokens = RandomTokens(config, 5);
  ForwardContext<double> context(stage);
  const PassResult<double> pass = RunWhole<double>(stage, parameters, tokens, context);

  constexpr double kStepWidth = 1e-4;
  const auto loss_at = [&](double& parameter, double value) {
    const double before = std::exchange(parameter, value);
    stage.Forward(parameters, tokens, {}, context);
    parameter = before;
    return 0.5 * context.loss();
  };
  for (const TensorInfo& tensor : stage.tensors()) {
    // The elements that matter most, by gradient, and some others (zero gradients must be zero
    // too).
    std::vector<size_t> order(static_cast<size_t>(tensor.count));
    std::iota(order.begin(), order.end(), static_cast<size_t>(tensor.offset));
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::abs(pass.gradients[a]) > std::abs(pass.gradients[b]);
    });
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < order.size(); i += i < 24 ? 1 : order.size() / 16 + 1) {
      double& parameter = parameters[order[i]];
      const double x = parameter;
      // Fourth order: the error of the formula stays below that of the arithmetic.
      const double numeric =
          (8 * (loss_at(parameter, x + kStepWidth) - loss_at(parameter, x - kStepWidth)) -
           (loss_at(parameter, x + 2 * kStepWidth) - loss_at(parameter, x - 2 * kStepWidth))) /
          (12 * kStepWidth);
      error += std::pow(numeric - pass.gradients[order[i]], 2);
      size += std::pow(numeric, 2);
    }
    EXPECT_GT(size, 0) << tensor.name;
    EXPECT_LT(std::sqrt(error / size), 1e-5) << tensor.name;
    std::printf("%-32s relative error %.1e\n", tensor.name.c_str(), std::sqrt(error / size));
  }
}

TYPED_TEST(TransformerTest, PipelineComputesTheSameBitsAsOneStage) {
  using Scalar = TypeParam;
  for (const ModelConfig& config : {OddConfig(), FindPreset("tiny").value().model}) {
    const TokenBatch tokens = RandomTokens(config, 6);
    const Stage<Scalar> whole = StageOf<Scalar>(config, 0, 1);
    const std::vector<Scalar> parameters = RandomParameters(whole);
    ForwardContext<Scalar> whole_context(whole);
    const PassResult<Scalar> expected = RunWhole<Scalar>(whole, parameters, tokens, whole_context);
    const std::vector<double> expected_sums =
        TensorSquareSums<Scalar>(whole.tensors(), expected.gradients);

    for (int64_t stage_count = 2; stage_count <= config.layer_count; ++stage_count) {
      std::vector<Stage<Scalar>> stages;
      std::vector<ForwardContext<Scalar>> contexts;
      std::vector<std::vector<Scalar>> parts;
      size_t at = 0;
      for (int64_t i = 0; i < stage_count; ++i) {
        stages.push_back(StageOf<Scalar>(config, i, stage_count));
        contexts.emplace_back(stages.back());
        const size_t count = static_cast<size_t>(stages.back().parameter_count());
        parts.emplace_back(parameters.begin() + static_cast<int64_t>(at),
                           parameters.begin() + static_cast<int64_t>(at + count));
        at += count;
      }
      ASSERT_EQ(at, parameters.size());

      std::span<const Scalar> activation;
      for (size_t i = 0; i < stages.size(); ++i) {
        stages[i].Forward(parts[i], tokens, activation, contexts[i]);
        activation = contexts[i].output();
      }
      EXPECT_TRUE(activation.empty());
      EXPECT_EQ(contexts.back().loss(), expected.loss);

      std::vector<std::vector<Scalar>> gradients(stages.size());
      std::span<const Scalar> gradient;
      for (size_t i = stages.size(); i-- > 0;) {
        gradients[i].resize(parts[i].size());
        stages[i].Backward(parts[i], tokens, gradient, Scalar(0.5), contexts[i], gradients[i]);
        gradient = contexts[i].input_gradient();
      }
      EXPECT_TRUE(gradient.empty());

      std::vector<Scalar> joined;
      std::vector<double> sums;
      for (size_t i = 0; i < stages.size(); ++i) {
        joined.insert(joined.end(), gradients[i].begin(), gradients[i].end());
        const auto part = TensorSquareSums<Scalar>(stages[i].tensors(), gradients[i]);
        sums.insert(sums.end(), part.begin(), part.end());
      }
      EXPECT_TRUE(SameBits<Scalar>(joined, expected.gradients)) << stage_count << " stages";
      EXPECT_EQ(sums, expected_sums);
      EXPECT_EQ(GlobalNorm(sums), GlobalNorm(expected_sums));
    }
  }
}

TYPED_TEST(TransformerTest, StagesStartWithTheirPartOfTheWholeModel) {
  using Scalar = TypeParam;
  const ModelConfig config = OddConfig();
  const Stage<Scalar> whole = StageOf<Scalar>(config, 0, 1);
  std::vector<Scalar> expected(static_cast<size_t>(whole.parameter_count()));
  whole.Initialize(9, expected);
  std::vector<Scalar> joined;
  std::vector<std::string> names;
  for (int64_t i = 0; i < 3; ++i) {
    const Stage<Scalar> stage = StageOf<Scalar>(config, i, 3);
    std::vector<Scalar> part(static_cast<size_t>(stage.parameter_count()));
    stage.Initialize(9, part);
    joined.insert(joined.end(), part.begin(), part.end());
    for (const TensorInfo& tensor : stage.tensors()) names.push_back(tensor.name);
  }
  EXPECT_TRUE(SameBits<Scalar>(joined, expected));
  std::vector<std::string> expected_names;
  for (const TensorInfo& tensor : whole.tensors()) expected_names.push_back(tensor.name);
  EXPECT_EQ(names, expected_names);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());

  std::vector<Scalar> other(expected.size());
  whole.Initialize(10, other);
  EXPECT_FALSE(SameBits<Scalar>(other, expected));
}

TYPED_TEST(TransformerTest, ResultsDoNotDependOnAddresses) {
  using Scalar = TypeParam;
  for (const ModelConfig& config : {OddConfig(), FindPreset("small").value().model}) {
    const Stage<Scalar> stage = StageOf<Scalar>(config, 0, 1);
    const std::vector<Scalar> parameters = RandomParameters(stage);
    const TokenBatch tokens = RandomTokens(config, 8);
    ForwardContext<Scalar> context(stage);
    const PassResult<Scalar> expected = RunWhole<Scalar>(stage, parameters, tokens, context);

    for (const int64_t shift : {1, 2, 3, 5, 8, 13}) {
      const size_t count = parameters.size();
      AlignedBuffer<Scalar> moved_parameters(static_cast<int64_t>(count) + 16);
      AlignedBuffer<Scalar> moved_gradients(static_cast<int64_t>(count) + 16);
      const auto p = moved_parameters.span().subspan(static_cast<size_t>(shift), count);
      const auto g = moved_gradients.span().subspan(static_cast<size_t>(16 - shift), count);
      std::copy(parameters.begin(), parameters.end(), p.begin());
      ForwardContext<Scalar> moved(stage, shift);
      // The context carries the remains of another micro-batch.
      stage.Forward(p, RandomTokens(config, 99), {}, moved);
      stage.Forward(p, tokens, {}, moved);
      EXPECT_EQ(moved.loss(), expected.loss) << "shift " << shift;
      stage.Backward(p, tokens, {}, Scalar(0.5), moved, g);
      EXPECT_TRUE(SameBits<Scalar>(g, expected.gradients)) << "shift " << shift;
    }
  }
}

TYPED_TEST(TransformerTest, BackwardAddsToTheGradientBuffer) {
  using Scalar = TypeParam;
  const ModelConfig config = OddConfig();
  const Stage<Scalar> stage = StageOf<Scalar>(config, 0, 1);
  const std::vector<Scalar> parameters = RandomParameters(stage);
  const TokenBatch tokens = RandomTokens(config, 8);
  ForwardContext<Scalar> context(stage);
  const PassResult<Scalar> once = RunWhole<Scalar>(stage, parameters, tokens, context);
  std::vector<Scalar> sum(parameters.size(), Scalar(1));
  stage.Forward(parameters, tokens, {}, context);
  stage.Backward(parameters, tokens, {}, Scalar(0.5), context, sum);
  double largest = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    const double difference = double(sum[i]) - 1.0 - double(once.gradients[i]);
    largest = std::max(largest, std::abs(difference));
  }
  EXPECT_LT(largest, sizeof(Scalar) == 4 ? 2e-6 : 1e-14);
}

TYPED_TEST(TransformerTest, LaterBytesDoNotChangeEarlierActivations) {
  using Scalar = TypeParam;
  const ModelConfig config = OddConfig();
  const Stage<Scalar> first = StageOf<Scalar>(config, 0, 3);
  const std::vector<Scalar> parameters = RandomParameters(first);
  TokenBatch tokens = RandomTokens(config, 8);
  ForwardContext<Scalar> context(first);
  first.Forward(parameters, tokens, {}, context);
  const std::vector<Scalar> before(context.output().begin(), context.output().end());
  const size_t changed = 7;  // position 7 of the first sequence
  tokens.inputs[changed] ^= 1;
  first.Forward(parameters, tokens, {}, context);
  const size_t width = static_cast<size_t>(config.width);
  for (size_t row = 0; row < tokens.inputs.size(); ++row) {
    const bool same = std::equal(before.begin() + static_cast<int64_t>(row * width),
                                 before.begin() + static_cast<int64_t>((row + 1) * width),
                                 context.output().begin() + static_cast<int64_t>(row * width));
    const bool may_change = row >= changed && row < static_cast<size_t>(config.sequence_length);
    EXPECT_EQ(same, !may_change) << "row " << row;
  }
}

TEST(TransformerConfigTest, LayersAreCutEvenlyAndCompletely) {
  ModelConfig config = OddConfig();
  config.layer_count = 7;
  int64_t next = 0;
  for (int64_t i = 0; i < 3; ++i) {
    const StageRange range = PipelineStage(config, i, 3).value();
    EXPECT_EQ(range.first_layer, next);
    EXPECT_EQ(range.has_embedding, i == 0);
    EXPECT_EQ(range.has_head, i == 2);
    EXPECT_EQ(range.layer_count, i == 0 ? 3 : 2);
    next += range.layer_count;
  }
  EXPECT_EQ(next, 7);
  EXPECT_EQ(PipelineStage(config, 0, 8).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PipelineStage(config, 3, 3).status().code(), StatusCode::kInvalidArgument);
}

TEST(TransformerConfigTest, RefusesImpossibleSizesByName) {
  const auto message_for = [](auto change) {
    ModelConfig config = OddConfig();
    change(config);
    const Status status = ValidateModelConfig(config);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  const auto starts = [](const std::string& message, const std::string& with) {
    return message.starts_with(with) ? testing::AssertionSuccess()
                                     : testing::AssertionFailure() << message;
  };
  EXPECT_TRUE(starts(message_for([](ModelConfig& c) { c.layer_count = 0; }), "layer_count is 0"));
  EXPECT_TRUE(starts(message_for([](ModelConfig& c) { c.width = 4; }), "width is 4"));
  EXPECT_TRUE(starts(message_for([](ModelConfig& c) { c.width = 25; }),
                     "head_count is 2: it must divide width, which is 25"));
  EXPECT_TRUE(starts(message_for([](ModelConfig& c) { c.head_count = 24; }), "head_count is 24"));
  EXPECT_TRUE(
      starts(message_for([](ModelConfig& c) { c.sequence_length = 1; }), "sequence_length is 1"));
  EXPECT_TRUE(starts(message_for([](ModelConfig& c) { c.sequences_per_micro_batch = 0; }),
                     "sequences_per_micro_batch is 0"));
  const StageRange headless{.first_layer = 0, .layer_count = 3, .has_embedding = true};
  EXPECT_EQ(Stage<float>::Create(OddConfig(), headless).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(TransformerConfigTest, PresetsHaveTheirStatedSizes) {
  const auto count = [](const char* name) {
    const ModelConfig config = FindPreset(name).value().model;
    const Stage<float> stage = StageOf<float>(config, 0, 1);
    EXPECT_EQ(stage.parameter_count(), ParameterCount(config));
    return stage.parameter_count();
  };
  EXPECT_EQ(count("tiny"), 42'144);
  EXPECT_EQ(count("small"), 498'528);
  EXPECT_EQ(count("base"), 4'149'792);
  EXPECT_EQ(count("large"), 19'208'704);
  EXPECT_EQ(FindPreset("huge").status().code(), StatusCode::kInvalidArgument);
}

TEST(TransformerConfigTest, ThisProcessorIsAccepted) {
  EXPECT_TRUE(CheckProcessor().ok()) << CheckProcessor().ToString();
}

}  // namespace
}  // namespace everstep::examples
