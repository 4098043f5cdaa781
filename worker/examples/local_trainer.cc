#include "worker/examples/local_trainer.h"

#include <utility>
#include <vector>

#include "proto/base/check.h"
#include "worker/examples/digest.h"

namespace everstep::examples {

template <typename Scalar>
double ValidationLoss(const Stage<Scalar>& stage, std::span<const Scalar> parameters,
                      const TextData& data, int64_t sequence_count,
                      ForwardContext<Scalar>& context) {
  const int64_t each = stage.config().sequences_per_micro_batch;
  EVERSTEP_CHECK(sequence_count > 0 && sequence_count % each == 0);
  const std::vector<int64_t> offsets = data.ValidationOffsets(sequence_count);
  double sum = 0;
  for (int64_t at = 0; at < sequence_count; at += each) {
    const TokenBatch batch = data.BatchAt(
        std::span(offsets).subspan(static_cast<size_t>(at), static_cast<size_t>(each)));
    stage.Forward(parameters, batch, {}, context);
    sum += context.loss();
  }
  return sum / static_cast<double>(sequence_count / each);
}

template <typename Scalar>
Result<std::unique_ptr<LocalTrainer<Scalar>>> LocalTrainer<Scalar>::Create(
    const LocalTrainerOptions& options, const TextData& data) {
  if (options.micro_batch_count < 1 || options.micro_batch_count > kMicroBatchCountMax) {
    return InvalidArgument("micro_batch_count is " + std::to_string(options.micro_batch_count) +
                           ": choose a value from 1 to " + std::to_string(kMicroBatchCountMax));
  }
  EVERSTEP_ASSIGN_OR_RETURN(const StageRange whole, PipelineStage(options.model, 0, 1));
  EVERSTEP_ASSIGN_OR_RETURN(Stage<Scalar> stage, Stage<Scalar>::Create(options.model, whole));
  return std::unique_ptr<LocalTrainer>(new LocalTrainer(options, std::move(stage), data));
}

template <typename Scalar>
LocalTrainer<Scalar>::LocalTrainer(const LocalTrainerOptions& options, Stage<Scalar> stage,
                                   const TextData& data)
    : options_(options),
      data_(data),
      stage_(std::move(stage)),
      context_(stage_),
      parameters_(stage_.parameter_count()),
      gradients_(stage_.parameter_count()),
      m_(stage_.parameter_count()),
      v_(stage_.parameter_count()) {
  stage_.Initialize(options_.seed, parameters_.span());
}

template <typename Scalar>
StepReport LocalTrainer<Scalar>::TrainStep() {
  StepReport report;
  gradients_.Clear();
  const Scalar weight = Scalar(1) / static_cast<Scalar>(options_.micro_batch_count);
  for (int64_t i = 0; i < options_.micro_batch_count; ++i) {
    const TokenBatch batch = data_.BatchAt(data_.SampleOffsets(
        options_.seed, next_step_, i, options_.model.sequences_per_micro_batch));
    stage_.Forward(parameters_.span(), batch, {}, context_);
    report.loss += context_.loss();
    stage_.Backward(parameters_.span(), batch, {}, weight, context_, gradients_.span());
  }
  report.loss /= static_cast<double>(options_.micro_batch_count);
  const std::vector<double> sums = TensorSquareSums<Scalar>(stage_.tensors(), gradients_.span());
  report.gradient_norm = GlobalNorm(sums);
  ApplyAdamW<Scalar>(options_.optimizer, stage_.tensors(), next_step_,
                     ClipScale(options_.optimizer, report.gradient_norm), gradients_.span(),
                     parameters_.span(), m_.span(), v_.span());
  next_step_ = next_step_.Next();
  return report;
}

template <typename Scalar>
std::string LocalTrainer<Scalar>::Digest() const {
  return ParameterDigest<Scalar>(parameters_.span());
}

template double ValidationLoss<float>(const Stage<float>&, std::span<const float>, const TextData&,
                                      int64_t, ForwardContext<float>&);
template double ValidationLoss<double>(const Stage<double>&, std::span<const double>,
                                       const TextData&, int64_t, ForwardContext<double>&);
template class LocalTrainer<float>;
template class LocalTrainer<double>;

}  // namespace everstep::examples
