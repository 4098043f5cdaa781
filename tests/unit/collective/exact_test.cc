// Exact reduction: the same bits for every split, the stated error, ranges, and values that are no
// numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "proto/base/prng.h"
#include "tests/unit/collective/world.h"
#include "worker/collective/exact/exact_reducer.h"
#include "worker/collective/fake/fake_fabric.h"
#include "worker/collective/reduce_kernels.h"

namespace everstep::collective {
namespace {

constexpr size_t kMicroBatches = 64;
const std::vector<size_t> kTensors = {5, 1024, 3000, 1, 0, 20'001};

size_t TotalElements() {
  size_t total = 0;
  for (const size_t elements : kTensors) total += elements;
  return total;
}

// Gradient of one micro-batch: a pure function, as protocol.md demands of samples. `range_bits`:
// spread of magnitudes.
std::vector<float> Gradient(uint64_t step, uint64_t micro_batch, int range_bits = 23) {
  Prng prng(step * 1000 + micro_batch);
  std::vector<float> values(TotalElements());
  for (float& value : values) {
    const auto mantissa = static_cast<float>(prng.Between(-(1 << 23), 1 << 23));
    value = std::ldexp(mantissa, -23 - static_cast<int>(prng.Between(0, range_bits)) - 6);
  }
  return values;
}

std::vector<std::unique_ptr<Communicator>> FakeWorld(int32_t size) {
  FakeFabric fabric({.size = size});
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int32_t rank = 0; rank < size; ++rank) ranks.push_back(fabric.Connect(Rank(rank)));
  return ranks;
}

// Which rank computes which micro-batch. Several shapes of unevenness, some with ranks that have
// none.
int32_t Owner(size_t micro_batch, int32_t size, int shape) {
  switch (shape) {
    case 0: return static_cast<int32_t>(micro_batch) % size;
    case 1: return static_cast<int32_t>(micro_batch * static_cast<size_t>(size) / kMicroBatches);
    case 2: return micro_batch < 50 ? 0 : size - 1;
    default: return static_cast<int32_t>((micro_batch * micro_batch + 3) % 7) % size;
  }
}

struct Outcome {
  std::vector<float> gradient;
  std::vector<int16_t> exponents;
};

// Two steps, the second with exponents from the first; redone with raised ones if need be. Checks
// that all ranks agree.
Outcome TwoSteps(std::vector<std::unique_ptr<Communicator>> ranks, int shape,
                 const std::function<std::vector<float>(uint64_t, uint64_t)>& gradient) {
  const auto size = static_cast<int32_t>(ranks.size());
  std::vector<Outcome> outcomes(ranks.size());
  OnRanks(size, [&](int32_t rank) {
    Communicator& communicator = *ranks[static_cast<size_t>(rank)];
    ExactReducer reducer(kTensors, kMicroBatches, DataType::kF32);
    std::vector<float> mean(TotalElements());
    for (uint64_t step = 1; step <= 2; ++step) {
      for (int attempt = 0;; ++attempt) {
        ASSERT_LT(attempt, 2) << "one redo must be enough";
        reducer.BeginStep();
        // Each rank in another order, for good measure.
        for (size_t i = 0; i < kMicroBatches; ++i) {
          const size_t micro_batch = rank % 2 == 0 ? i : kMicroBatches - 1 - i;
          if (Owner(micro_batch, size, shape) == rank)
            reducer.Accumulate(gradient(step, micro_batch).data());
        }
        ASSERT_EQ(reducer.Finish(communicator, mean.data()), OkStatus());
        uint8_t flag = reducer.out_of_range() ? 1 : 0;
        ASSERT_EQ(communicator.AllReduce(&flag, &flag, 1, DataType::kU8, ReduceOp::kBitOr),
                  OkStatus());
        if (flag == 0) break;
        ASSERT_EQ(reducer.RaiseExponents(communicator), OkStatus());
      }
      EXPECT_FALSE(reducer.not_finite());
      reducer.UpdateExponents();
    }
    outcomes[static_cast<size_t>(rank)] = {
        mean, {reducer.exponents().begin(), reducer.exponents().end()}};
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(std::memcmp(outcome.gradient.data(), outcomes[0].gradient.data(),
                          outcome.gradient.size() * 4),
              0);
    EXPECT_EQ(outcome.exponents, outcomes[0].exponents);
  }
  return outcomes[0];
}

TEST(ExactReduction, AnySplitOfTheMicroBatchesOverAnyRanksGivesTheSameBits) {
  const auto gradient = [](uint64_t step, uint64_t micro_batch) {
    return Gradient(step, micro_batch);
  };
  const Outcome one = TwoSteps(FakeWorld(1), 0, gradient);
  for (int32_t size = 2; size <= 5; ++size) {
    for (int shape = 0; shape < 4; ++shape) {
      const Outcome other = TwoSteps(FakeWorld(size), shape, gradient);
      ASSERT_EQ(std::memcmp(one.gradient.data(), other.gradient.data(), one.gradient.size() * 4), 0)
          << size << " ranks, shape " << shape;
      ASSERT_EQ(one.exponents, other.exponents);
    }
  }
  const Outcome host = TwoSteps(HostWorld(3).Connect(), 3, gradient);
  EXPECT_EQ(std::memcmp(one.gradient.data(), host.gradient.data(), one.gradient.size() * 4), 0);
}

TEST(ExactReduction, OutOfRangeStepIsRedoneWithTheSameBitsForEverySplit) {
  // Step 2 is 2^20 times larger than step 1 in a few micro-batches only: past the headroom.
  const auto gradient = [](uint64_t step, uint64_t micro_batch) {
    std::vector<float> values = Gradient(step, micro_batch);
    if (step == 2 && micro_batch % 13 == 5) {
      for (size_t i = 2000; i < values.size(); i += 3) values[i] *= 1048576.0f;
    }
    return values;
  };
  const Outcome one = TwoSteps(FakeWorld(1), 0, gradient);
  for (int32_t size = 2; size <= 5; ++size) {
    const Outcome other = TwoSteps(FakeWorld(size), size % 4, gradient);
    ASSERT_EQ(std::memcmp(one.gradient.data(), other.gradient.data(), one.gradient.size() * 4), 0)
        << size;
    ASSERT_EQ(one.exponents, other.exponents);
  }
}

TEST(ExactReduction, ErrorAgainstDoublePrecisionIsThatOfOneRounding) {
  for (const int range_bits : {0, 8, 16, 23, 30}) {
    ExactReducer reducer(kTensors, kMicroBatches, DataType::kF32);
    auto ranks = FakeWorld(1);
    std::vector<float> mean(TotalElements());
    double exact_error = 0;
    double float_error = 0;
    for (uint64_t step = 1; step <= 2; ++step) {  // the second step has exponents that fit
      std::vector<double> reference(TotalElements());
      std::vector<float> sequential(TotalElements());
      reducer.BeginStep();
      for (size_t micro_batch = 0; micro_batch < kMicroBatches; ++micro_batch) {
        const std::vector<float> values = Gradient(step, micro_batch, range_bits);
        reducer.Accumulate(values.data());
        for (size_t i = 0; i < values.size(); ++i) {
          reference[i] += values[i];
          sequential[i] += values[i];
        }
      }
      ASSERT_EQ(reducer.Finish(*ranks[0], mean.data()), OkStatus());
      ASSERT_FALSE(reducer.out_of_range());
      double exact_sum = 0;
      double float_sum = 0;
      double norm = 0;
      for (size_t i = 0; i < mean.size(); ++i) {
        const double expected = reference[i] / kMicroBatches;
        exact_sum += (mean[i] - expected) * (mean[i] - expected);
        float_sum += (static_cast<double>(sequential[i]) / kMicroBatches - expected) *
                     (static_cast<double>(sequential[i]) / kMicroBatches - expected);
        norm += expected * expected;
      }
      exact_error = std::sqrt(exact_sum / norm);
      float_error = std::sqrt(float_sum / norm);
      reducer.UpdateExponents();
    }
    std::printf("range 2^%d in a block: relative error %.1e exact, %.1e sequential f32\n",
                range_bits, exact_error, float_error);
    EXPECT_LT(exact_error, 3.5e-8);
    EXPECT_LT(exact_error, float_error);
  }
}

TEST(ExactReduction, DetectsOutOfRangePerMicroBatchWhateverTheSumIs) {
  const std::vector<size_t> tensors = {4};
  ExactReducer reducer(tensors, 4, DataType::kF32);
  const std::vector<float> fits = {255.9f, -255.9f, 0, 1};
  const std::vector<float> too_large = {256.0f, 0, 0, 0};  // 2^8, the initial exponent
  reducer.BeginStep();
  for (int i = 0; i < 4; ++i) reducer.Accumulate(fits.data());
  EXPECT_FALSE(reducer.out_of_range());
  reducer.BeginStep();
  reducer.Accumulate(too_large.data());
  EXPECT_TRUE(reducer.out_of_range());
  reducer.BeginStep();
  EXPECT_FALSE(reducer.out_of_range());
  auto ranks = FakeWorld(1);
  EXPECT_EQ(reducer.RaiseExponents(*ranks[0]).code(), StatusCode::kFailedPrecondition);
}

TEST(ExactReduction, ReportsValuesThatAreNoNumbersAndNeverConvertsThem) {
  auto ranks = FakeWorld(1);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    ExactReducer reducer(kTensors, kMicroBatches, DataType::kF32);
    std::vector<float> values = Gradient(1, 0);
    reducer.BeginStep();
    reducer.Accumulate(values.data());
    EXPECT_FALSE(reducer.not_finite());
    values[4000] = bad;
    reducer.Accumulate(values.data());
    EXPECT_TRUE(reducer.not_finite());
    EXPECT_FALSE(reducer.out_of_range());
    reducer.BeginStep();
    EXPECT_FALSE(reducer.not_finite());
  }
}

TEST(ExactReduction, BlocksThatWereZeroCanBecomeNonZeroUnderTheFloor) {
  const std::vector<size_t> tensors = {2048};
  ExactReducer reducer(tensors, 1, DataType::kF32);
  auto ranks = FakeWorld(1);
  std::vector<float> values(2048, 0.0f);
  std::vector<float> mean(2048);
  values[0] = 1.0f;  // exponent 1; the second block is zero
  reducer.BeginStep();
  reducer.Accumulate(values.data());
  ASSERT_EQ(reducer.Finish(*ranks[0], mean.data()), OkStatus());
  reducer.UpdateExponents();
  EXPECT_EQ(reducer.exponents()[0], 1 + ExactReducer::kHeadroomBits);
  EXPECT_EQ(reducer.exponents()[1], 1 - ExactReducer::kFloorBits + ExactReducer::kHeadroomBits);
  values[1024] = std::ldexp(1.0f, -9);  // fits under the floor with headroom
  reducer.BeginStep();
  reducer.Accumulate(values.data());
  EXPECT_FALSE(reducer.out_of_range());
  ASSERT_EQ(reducer.Finish(*ranks[0], mean.data()), OkStatus());
  EXPECT_EQ(mean, values);
  // A step of zeros leaves exponents alone.
  const std::vector<float> zeros(2048, 0.0f);
  const std::vector<int16_t> before(reducer.exponents().begin(), reducer.exponents().end());
  reducer.BeginStep();
  reducer.Accumulate(zeros.data());
  ASSERT_EQ(reducer.Finish(*ranks[0], mean.data()), OkStatus());
  reducer.UpdateExponents();
  EXPECT_EQ(std::vector<int16_t>(reducer.exponents().begin(), reducer.exponents().end()), before);
}

TEST(ExactReduction, ExponentsDoNotDependOnTheDivisor) {
  auto ranks = FakeWorld(1);
  std::vector<std::vector<int16_t>> exponents;
  for (const double divisor : {0.0, 1.0, 4096.0}) {
    ExactReducer reducer(kTensors, kMicroBatches, DataType::kF32);
    std::vector<float> out(TotalElements());
    reducer.BeginStep();
    for (size_t i = 0; i < kMicroBatches; ++i) reducer.Accumulate(Gradient(1, i).data());
    ASSERT_EQ(reducer.Finish(*ranks[0], out.data(), divisor), OkStatus());
    reducer.UpdateExponents();
    exponents.emplace_back(reducer.exponents().begin(), reducer.exponents().end());
  }
  EXPECT_EQ(exponents[0], exponents[1]);  // powers of two apart: exactly equal
  EXPECT_EQ(exponents[0], exponents[2]);
}

TEST(ExactReduction, TakesHalfBFloat16AndDoubleGradientsTensorByTensor) {
  const std::vector<size_t> tensors = {1500, 7};
  auto ranks = FakeWorld(2);
  OnRanks(2, [&](int32_t rank) {
    for (const DataType type : {DataType::kF16, DataType::kBF16, DataType::kF64}) {
      ExactReducer reducer(tensors, 2, type);
      std::vector<std::byte> values(1507 * ElementBytes(type));
      std::vector<double> expected(1507);
      for (size_t i = 0; i < expected.size(); ++i) {
        double sum = 0;
        for (int32_t from = 0; from < 2; ++from) {
          const auto value =
              static_cast<float>((static_cast<int>(i) % 200 - 100) * (from == 0 ? 0.5 : 0.125));
          double stored = value;
          if (type == DataType::kF16) stored = HalfToFloat(FloatToHalf(value));
          if (type == DataType::kBF16) stored = BFloat16ToFloat(FloatToBFloat16(value));
          sum += stored;
          if (from != rank) continue;
          if (type == DataType::kF64) reinterpret_cast<double*>(values.data())[i] = value;
          if (type == DataType::kF16)
            reinterpret_cast<uint16_t*>(values.data())[i] = FloatToHalf(value);
          if (type == DataType::kBF16)
            reinterpret_cast<uint16_t*>(values.data())[i] = FloatToBFloat16(value);
        }
        expected[i] = sum / 2;
      }
      reducer.BeginStep();
      reducer.AccumulateTensor(1, values.data() + 1500 * ElementBytes(type));
      reducer.AccumulateTensor(0, values.data());
      std::vector<float> narrow(1507);
      std::vector<double> wide(1507);
      void* out = type == DataType::kF64 ? static_cast<void*>(wide.data())
                                         : static_cast<void*>(narrow.data());
      ASSERT_EQ(reducer.Finish(*ranks[static_cast<size_t>(rank)], out), OkStatus());
      EXPECT_FALSE(reducer.out_of_range());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(type == DataType::kF64 ? wide[i] : static_cast<double>(narrow[i]), expected[i])
            << DataTypeName(type) << " " << i;
      }
    }
  });
}

TEST(ExactReduction, RestoredExponentsGiveTheSameBits) {
  auto ranks = FakeWorld(1);
  ExactReducer reducer(kTensors, kMicroBatches, DataType::kF32);
  std::vector<float> first(TotalElements());
  const auto run = [&](ExactReducer& r, uint64_t step, std::vector<float>& out) {
    r.BeginStep();
    for (size_t i = 0; i < kMicroBatches; ++i) r.Accumulate(Gradient(step, i).data());
    ASSERT_EQ(r.Finish(*ranks[0], out.data()), OkStatus());
    r.UpdateExponents();
  };
  run(reducer, 1, first);
  const std::vector<int16_t> saved(reducer.exponents().begin(), reducer.exponents().end());
  run(reducer, 2, first);
  ExactReducer replacement(kTensors, kMicroBatches, DataType::kF32);
  std::copy(saved.begin(), saved.end(), replacement.exponents().begin());
  std::vector<float> second(TotalElements());
  run(replacement, 2, second);
  EXPECT_EQ(std::memcmp(first.data(), second.data(), first.size() * 4), 0);
}

}  // namespace
}  // namespace everstep::collective
