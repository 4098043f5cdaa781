#include "worker/examples/adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "proto/base/check.h"
#include "worker/examples/kernels.h"

namespace everstep::examples {
namespace {

// cos(π · x) for x in [0, 1], by its series around 0.
double CosineOfHalfTurns(double x) {
  if (x > 0.5) return -CosineOfHalfTurns(1 - x);
  const double angle = 3.14159265358979323846 * x;
  double term = 1;
  double sum = 1;
  for (int n = 1; n <= 10; ++n) {
    term *= -angle * angle / ((2 * n - 1) * (2 * n));
    sum += term;
  }
  return sum;
}

// base^exponent by squaring.
double Power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace

AdamWConfig DefaultAdamW(const TrainingDefaults& defaults, int64_t step_count) {
  EVERSTEP_CHECK(step_count >= 1);
  AdamWConfig config;
  config.learning_rate = defaults.learning_rate;
  config.warmup_step_count = std::min(defaults.warmup_step_count, step_count);
  config.decay_step_count = step_count;
  return config;
}

double LearningRate(const AdamWConfig& config, Step step) {
  const double t = static_cast<double>(step.value);
  const double warmup = static_cast<double>(config.warmup_step_count);
  if (t < warmup) return config.learning_rate * (t + 1) / warmup;
  const double span = static_cast<double>(config.decay_step_count) - warmup;
  const double progress = span > 0 ? std::min(1.0, (t - warmup) / span) : 1.0;
  const double fraction = config.final_rate_fraction + (1 - config.final_rate_fraction) * 0.5 *
                                                           (1 + CosineOfHalfTurns(progress));
  return config.learning_rate * fraction;
}

template <typename Scalar>
std::vector<double> BlockSquareSums(std::span<const Scalar> gradients) {
  std::vector<double> sums;
  const int64_t count = static_cast<int64_t>(gradients.size());
  for (int64_t at = 0; at < count; at += kNormBlockElements) {
    sums.push_back(
        kernels::SquareSum(gradients.data() + at, std::min(kNormBlockElements, count - at)));
  }
  return sums;
}

template <typename Scalar>
std::vector<double> TensorSquareSums(const std::vector<TensorInfo>& tensors,
                                     std::span<const Scalar> gradients) {
  std::vector<double> sums;
  for (const TensorInfo& tensor : tensors) {
    double sum = 0;
    for (const double block : BlockSquareSums(gradients.subspan(
             static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.count)))) {
      sum += block;
    }
    sums.push_back(sum);
  }
  return sums;
}

double GlobalNorm(std::span<const double> tensor_square_sums) {
  double sum = 0;
  for (const double tensor : tensor_square_sums) sum += tensor;
  return std::sqrt(sum);
}

double ClipScale(const AdamWConfig& config, double global_norm) {
  if (!std::isfinite(global_norm)) return std::numeric_limits<double>::quiet_NaN();
  return global_norm > config.gradient_norm_max ? config.gradient_norm_max / global_norm : 1.0;
}

template <typename Scalar>
void ApplyAdamW(const AdamWConfig& config, const std::vector<TensorInfo>& tensors, Step step,
                double clip_scale, std::span<const Scalar> gradients, std::span<Scalar> parameters,
                std::span<Scalar> m, std::span<Scalar> v) {
  const double rate = LearningRate(config, step);
  const int64_t applied = step.value + 1;
  for (const TensorInfo& tensor : tensors) {
    EVERSTEP_CHECK(tensor.offset + tensor.count <= static_cast<int64_t>(parameters.size()) &&
                   gradients.size() == parameters.size() && m.size() == parameters.size() &&
                   v.size() == parameters.size());
    const kernels::AdamWCoefficients<Scalar> coefficients{
        .gradient_scale = static_cast<Scalar>(clip_scale),
        .beta1 = static_cast<Scalar>(config.beta1),
        .beta2 = static_cast<Scalar>(config.beta2),
        .step_size = static_cast<Scalar>(rate / (1 - Power(config.beta1, applied))),
        .variance_scale = static_cast<Scalar>(1 / (1 - Power(config.beta2, applied))),
        .epsilon = static_cast<Scalar>(config.epsilon),
        .keep = static_cast<Scalar>(tensor.decayed ? 1 - rate * config.weight_decay : 1.0)};
    kernels::AdamWUpdate<Scalar>(coefficients, gradients.data() + tensor.offset,
                                 parameters.data() + tensor.offset, m.data() + tensor.offset,
                                 v.data() + tensor.offset, tensor.count);
  }
}

#define EVERSTEP_INSTANTIATE(S)                                                                 \
  template std::vector<double> BlockSquareSums<S>(std::span<const S>);                          \
  template std::vector<double> TensorSquareSums<S>(const std::vector<TensorInfo>&,              \
                                                   std::span<const S>);                         \
  template void ApplyAdamW<S>(const AdamWConfig&, const std::vector<TensorInfo>&, Step, double, \
                              std::span<const S>, std::span<S>, std::span<S>, std::span<S>)

EVERSTEP_INSTANTIATE(float);
EVERSTEP_INSTANTIATE(double);

}  // namespace everstep::examples
