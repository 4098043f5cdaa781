#include "worker/examples/local_trainer.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/unit/examples/test_text.h"

namespace everstep::examples {
namespace {

// The licence texts of a Debian system, or the built-in text elsewhere.
TextData TrainingText(const Preset& preset) {
  if (std::filesystem::is_directory(kDefaultDataPath)) {
    Result<TextData> data = TextData::Load(kDefaultDataPath, preset.model.sequence_length);
    if (data.ok()) return std::move(data).value();
  }
  return TextData::FromBytes(GrammarText(200'000), "built-in", preset.model.sequence_length)
      .value();
}

template <typename Scalar>
std::unique_ptr<LocalTrainer<Scalar>> TinyTrainer(const TextData& data, int64_t step_count,
                                                  uint64_t seed) {
  const Preset preset = FindPreset("tiny").value();
  return LocalTrainer<Scalar>::Create({.model = preset.model,
                                       .optimizer = DefaultAdamW(preset.training, step_count),
                                       .micro_batch_count = preset.training.micro_batch_count,
                                       .seed = seed},
                                      data)
      .value();
}

TEST(LocalTrainerTest, ValidationLossFallsByTwoNatsWithinHundredSteps) {
  const TextData data = TrainingText(FindPreset("tiny").value());
  const auto trainer = TinyTrainer<float>(data, 100, 1);
  const double before = trainer->Validate(32);
  EXPECT_NEAR(before, 5.55, 0.2);  // ln 256: knows nothing yet
  double first = 0;
  double last = 0;
  for (int64_t i = 0; i < 100; ++i) {
    const StepReport report = trainer->TrainStep();
    if (i < 5) first += report.loss / 5;
    if (i >= 95) last += report.loss / 5;
    ASSERT_GT(report.gradient_norm, 0);
  }
  const double after = trainer->Validate(32);
  EXPECT_LT(after, before - 2.0);
  EXPECT_LT(last, first - 2.0);
}

TEST(LocalTrainerTest, LearnsBuiltInGrammarBeyondLetterFrequencies) {
  const TextData data = TextData::FromBytes(GrammarText(100'000), "built-in", 32).value();
  const auto trainer = TinyTrainer<float>(data, 200, 1);
  for (int64_t i = 0; i < 200; ++i) trainer->TrainStep();
  // The text's letters alone are worth about 2.8 nats each.
  EXPECT_LT(trainer->Validate(32), 1.0);
}

template <typename Scalar>
std::string DigestAfter(int64_t step_count, uint64_t seed) {
  const TextData data = TextData::FromBytes(GrammarText(50'000), "built-in", 32).value();
  const auto trainer = TinyTrainer<Scalar>(data, 20, seed);
  for (int64_t i = 0; i < step_count; ++i) trainer->TrainStep();
  return trainer->Digest();
}

TEST(LocalTrainerTest, TwoRunsEndOnTheSameBits) {
  EXPECT_EQ(DigestAfter<float>(20, 5), DigestAfter<float>(20, 5));
  EXPECT_EQ(DigestAfter<double>(5, 5), DigestAfter<double>(5, 5));
  EXPECT_NE(DigestAfter<float>(20, 5), DigestAfter<float>(20, 6));
  EXPECT_NE(DigestAfter<float>(20, 5), DigestAfter<float>(19, 5));
}

TEST(LocalTrainerTest, BothPrecisionsFollowTheSameCurve) {
  const TextData data = TextData::FromBytes(GrammarText(50'000), "built-in", 32).value();
  const auto single = TinyTrainer<float>(data, 20, 5);
  const auto twice = TinyTrainer<double>(data, 20, 5);
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_NEAR(single->TrainStep().loss, twice->TrainStep().loss, 1e-3) << "step " << i;
  }
}

TEST(LocalTrainerTest, RefusesImpossibleMicroBatchCount) {
  const TextData data = TextData::FromBytes(GrammarText(50'000), "built-in", 32).value();
  const Preset preset = FindPreset("tiny").value();
  const auto created =
      LocalTrainer<float>::Create({.model = preset.model, .micro_batch_count = 0}, data);
  EXPECT_EQ(created.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace everstep::examples
