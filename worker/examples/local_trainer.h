// Training in one process: the whole model as one stage, micro-batches one after another. The
// yardstick that the distributed trainer is compared with; used by everstep-train-alone and by
// tests. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "worker/examples/adamw.h"
#include "worker/examples/aligned_buffer.h"
#include "worker/examples/text_data.h"
#include "worker/examples/transformer.h"

namespace everstep::examples {

struct LocalTrainerOptions {
  ModelConfig model;
  AdamWConfig optimizer;
  int64_t micro_batch_count = 1;
  uint64_t seed = 1;
};

struct StepReport {
  double loss = 0;           // mean over the global batch, before the update
  double gradient_norm = 0;  // before clipping
};

// Mean loss over fixed sequences of the validation part. REQUIRES: sequence_count is a multiple of
// the model's sequences_per_micro_batch; a stage with embedding and head.
template <typename Scalar>
double ValidationLoss(const Stage<Scalar>& stage, std::span<const Scalar> parameters,
                      const TextData& data, int64_t sequence_count,
                      ForwardContext<Scalar>& context);

template <typename Scalar>
class LocalTrainer {
 public:
  // `data` outlives the trainer. INVALID_ARGUMENT, FAILED_PRECONDITION: as Stage::Create.
  static Result<std::unique_ptr<LocalTrainer>> Create(const LocalTrainerOptions& options,
                                                      const TextData& data);

  // Effect: trains the global batch of the next step and updates the parameters.
  StepReport TrainStep();
  Step next_step() const { return next_step_; }

  double Validate(int64_t sequence_count) {
    return ValidationLoss<Scalar>(stage_, parameters_.span(), data_, sequence_count, context_);
  }
  std::string Digest() const;
  const Stage<Scalar>& stage() const { return stage_; }
  std::span<const Scalar> parameters() const { return parameters_.span(); }

 private:
  LocalTrainer(const LocalTrainerOptions& options, Stage<Scalar> stage, const TextData& data);

  LocalTrainerOptions options_;
  const TextData& data_;
  Stage<Scalar> stage_;
  ForwardContext<Scalar> context_;
  AlignedBuffer<Scalar> parameters_, gradients_, m_, v_;
  Step next_step_{0};
};

}  // namespace everstep::examples
