// AdamW over flat arrays: learning-rate schedule, global norm clipping and the update. Called by
// the trainers once per optimizer step, after the gradients of all micro-batches are summed. Pure
// functions, any thread.
//
// The norm is summed in blocks that never span tensors, then per tensor, then over tensors in
// global order. So it has the same bits for one stage and for many, whose TensorSquareSums are
// joined in stage order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/ids.h"
#include "worker/examples/transformer.h"

namespace everstep::examples {

inline constexpr int64_t kNormBlockElements = 4096;

struct AdamWConfig {
  double learning_rate = 1e-3;       // the peak, reached at the end of the warm-up
  double final_rate_fraction = 0.1;  // of the peak, reached at decay_step_count
  int64_t warmup_step_count = 0;
  int64_t decay_step_count = 1;  // of the whole schedule, warm-up included
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // on tensors with `decayed`
  double gradient_norm_max = 1.0;
};

// The configuration the presets are trained with. REQUIRES: step_count ≥ 1
AdamWConfig DefaultAdamW(const TrainingDefaults& defaults, int64_t step_count);

// Linear warm-up, then a cosine down to the final fraction, then flat. `step`: number of steps
// applied before this one. Pure and free of the C library's functions, so its bits are the same
// everywhere.
double LearningRate(const AdamWConfig& config, Step step);

// Σ g² of each block of kNormBlockElements, in index order; the last block may be shorter.
template <typename Scalar>
std::vector<double> BlockSquareSums(std::span<const Scalar> gradients);
// Per tensor, in table order: the sum of its blocks.
template <typename Scalar>
std::vector<double> TensorSquareSums(const std::vector<TensorInfo>& tensors,
                                     std::span<const Scalar> gradients);
// √Σ over all tensors of the model in global order.
double GlobalNorm(std::span<const double> tensor_square_sums);
// 1, or what brings the norm down to the maximum. A norm that is not finite is passed on as NaN.
double ClipScale(const AdamWConfig& config, double global_norm);

// Effect: one update of parameters, m and v in place. `clip_scale` multiplies the gradients.
// REQUIRES: four arrays of the table's size.
template <typename Scalar>
void ApplyAdamW(const AdamWConfig& config, const std::vector<TensorInfo>& tensors, Step step,
                double clip_scale, std::span<const Scalar> gradients, std::span<Scalar> parameters,
                std::span<Scalar> m, std::span<Scalar> v);

}  // namespace everstep::examples
