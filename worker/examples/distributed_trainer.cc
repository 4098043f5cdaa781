#include "worker/examples/distributed_trainer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>
#include <utility>

#include "worker/examples/digest.h"
#include "worker/examples/local_trainer.h"

namespace everstep::examples {
namespace {

using collective::DataType;
using collective::ReduceOp;

constexpr uint32_t kBackwardGroupFirst = 1;  // ids of this program's own groups

template <typename Scalar>
constexpr DataType TypeOf() {
  return sizeof(Scalar) == 4 ? DataType::kF32 : DataType::kF64;
}

// A failed collective means that the membership changes; the program's own errors pass through.
bool MeansRejoin(const Status& status) {
  switch (status.code()) {
    case StatusCode::kAborted:
    case StatusCode::kUnavailable:
    case StatusCode::kDeadlineExceeded:
    case StatusCode::kInternal: return true;
    default: return false;
  }
}

}  // namespace

template <typename Scalar>
DistributedTrainer<Scalar>::DistributedTrainer(const DistributedTrainerOptions& options,
                                               const TextData& data, Session& session, StepLog& log)
    : options_(options), data_(data), session_(session), log_(log) {
  session_.SetLayout([this](const Assignment& assignment, const RankAssignment& mine) {
    return LayOut(assignment, mine);
  });
  session_.SetInitialize([this] { return Initialize(); });
  session_.SetApply([this](Step step) { return Apply(step); });
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::LayOut(const Assignment& assignment, const RankAssignment& mine) {
  stage_tensor_first_.clear();
  tensor_count_ = 0;
  for (int32_t i = 0; i < assignment.pp_size; ++i) {
    EVERSTEP_ASSIGN_OR_RETURN(const StageRange range,
                              PipelineStage(options_.model, i, assignment.pp_size));
    EVERSTEP_ASSIGN_OR_RETURN(const Stage<Scalar> stage,
                              Stage<Scalar>::Create(options_.model, range));
    stage_tensor_first_.push_back(tensor_count_);
    tensor_count_ += static_cast<int64_t>(stage.tensors().size());
  }
  EVERSTEP_ASSIGN_OR_RETURN(const StageRange range,
                            PipelineStage(options_.model, mine.pp, assignment.pp_size));
  const int64_t micro_batches =
      assignment.micro_batch_count > 0 ? assignment.micro_batch_count : options_.micro_batch_count;
  if (micro_batches != micro_batches_) shard_ = Shard();
  micro_batches_ = micro_batches;
  const auto in_flight = static_cast<size_t>(assignment.pp_size - mine.pp);
  if (shard_.stage == nullptr || shard_.range != range) {
    shard_ = Shard();
    shard_.range = range;
    EVERSTEP_ASSIGN_OR_RETURN(Stage<Scalar> stage, Stage<Scalar>::Create(options_.model, range));
    shard_.stage = std::make_unique<Stage<Scalar>>(std::move(stage));
    const int64_t count = shard_.stage->parameter_count();
    shard_.parameters = AlignedBuffer<Scalar>(count);
    shard_.m = AlignedBuffer<Scalar>(count);
    shard_.v = AlignedBuffer<Scalar>(count);
    shard_.reducer = MakeReducer<Scalar>(options_.reduction, shard_.stage->tensors(), micro_batches_);
  }
  while (shard_.contexts.size() < in_flight) shard_.contexts.emplace_back(*shard_.stage);
  return Register();
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::Register() {
  session_.ClearTensors();
  const char* const dtype = sizeof(Scalar) == 4 ? "f32" : "f64";
  for (const TensorInfo& tensor : shard_.stage->tensors()) {
    const auto add = [&](const char* kind, AlignedBuffer<Scalar>& buffer) {
      return session_.RegisterTensor(fmt::format("{}/{}", kind, tensor.name), dtype, tensor.shape, {}, {},
                                     buffer.data() + tensor.offset,
                                     static_cast<size_t>(tensor.count) * sizeof(Scalar));
    };
    EVERSTEP_RETURN_IF_ERROR(add("parameter", shard_.parameters));
    EVERSTEP_RETURN_IF_ERROR(add("adam_m", shard_.m));
    EVERSTEP_RETURN_IF_ERROR(add("adam_v", shard_.v));
  }
  for (const ReducerState& state : shard_.reducer->state()) {
    const int64_t shape[] = {static_cast<int64_t>(state.count)};
    EVERSTEP_RETURN_IF_ERROR(
        session_.RegisterTensor(state.name, state.dtype, shape, {}, {}, state.data, state.bytes));
  }
  const int64_t one[] = {1};
  return session_.RegisterTensor("trainer/last_loss", "f64", one, {}, {}, &last_loss_, sizeof last_loss_);
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::Initialize() {
  shard_.stage->Initialize(options_.seed, shard_.parameters.span());
  shard_.m.Clear();
  shard_.v.Clear();
  shard_.reducer->ResetState();
  last_loss_ = 0;
  return OkStatus();
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::Apply(Step step) {
  ApplyAdamW<Scalar>(options_.optimizer, shard_.stage->tensors(), Step(step.value - 1), clip_scale_,
                     shard_.reducer->gradients(), shard_.parameters.span(), shard_.m.span(),
                     shard_.v.span());
  shard_.reducer->Adopt();
  last_loss_ = loss_;
  log_.Write(committing_ ? StepEvent::kApplied : StepEvent::kRolledForward, step, computed_generation_,
             loss_);
  computed_ = Step(0);
  return OkStatus();
}

template <typename Scalar>
void DistributedTrainer<Scalar>::DiscardIfUndecided() {
  if (computed_ == Step(0)) return;
  log_.Write(StepEvent::kDiscarded, computed_, computed_generation_, loss_);
  computed_ = Step(0);
}

template <typename Scalar>
void DistributedTrainer<Scalar>::Announce(Step step) {
  if (place_.dp != 0 || place_.tp != 0 || place_.pp != 0 || step <= announced_) return;
  announced_ = step;
  fmt::print("step {} loss {:.9g}\n", step.value, last_loss_);
  std::fflush(stdout);
  session_.ReportMetric(step, "loss", last_loss_);
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::Warm() {
  if (session_.is_static()) return OkStatus();  // its place is known at once
  Assignment guess;
  guess.micro_batch_count = static_cast<int32_t>(options_.micro_batch_count);
  EVERSTEP_RETURN_IF_ERROR(LayOut(guess, RankAssignment()));
  // One micro-batch on whatever is in memory, so that every page and code path has been touched.
  EVERSTEP_RETURN_IF_ERROR(Initialize());
  const TokenBatch tokens = Batch(Step(1), 0);
  shard_.reducer->Begin();
  for (ForwardContext<Scalar>& context : shard_.contexts) {
    shard_.stage->Forward(shard_.parameters.span(), tokens, {}, context);
    shard_.stage->Backward(shard_.parameters.span(), tokens, {}, shard_.reducer->weight(), context,
                           shard_.reducer->micro_batch());
  }
  shard_.reducer->Accumulate();
  shard_.reducer->Begin();
  return OkStatus();
}

template <typename Scalar>
Result<TrainingResult> DistributedTrainer<Scalar>::Run() {
  EVERSTEP_RETURN_IF_ERROR(Warm());
  while (true) {
    EVERSTEP_ASSIGN_OR_RETURN(place_, session_.Join());
    DiscardIfUndecided();
    if (place_.micro_batch_total == 0) {
      const auto total = static_cast<int32_t>(options_.micro_batch_count);
      const int32_t each = total / place_.dp_size, more = total % place_.dp_size;
      place_.micro_batch_first = place_.dp * each + std::min(place_.dp, more);
      place_.micro_batch_count = each + (place_.dp < more ? 1 : 0);
    }
    fmt::print(stderr, "generation {} rank {} of {} dp {} pp {} micro-batches {}..{} step {} {}\n",
               place_.generation.value, place_.rank.value, place_.world_size, place_.dp, place_.pp,
               place_.micro_batch_first, place_.micro_batch_first + place_.micro_batch_count,
               place_.state.step.value, place_.restored_from);
    // A line that the leader before this one may not have printed any more.
    if (place_.state.step > Step(0)) Announce(place_.state.step);

    Result<bool> trained = TrainGeneration();
    if (!trained.ok() && !MeansRejoin(trained.status())) return trained.status();
    if (!trained.ok() || !*trained) continue;
    Result<TrainingResult> result = Conclude();
    if (result.ok()) {
      const Status finished = session_.Finish();
      if (finished.ok()) return result;
      if (!MeansRejoin(finished)) return finished;
    } else if (!MeansRejoin(result.status())) {
      return result.status();
    }
  }
}

template <typename Scalar>
Result<bool> DistributedTrainer<Scalar>::TrainGeneration() {
  backward_group_.reset();
  if (place_.pp_size > 1) {
    std::vector<Rank> pipeline(static_cast<size_t>(place_.pp_size));
    const int32_t mine = place_.rank.value;
    EVERSTEP_RETURN_IF_ERROR(
        session_.pp_group().AllGather(&mine, pipeline.data(), 1, DataType::kI32));
    EVERSTEP_ASSIGN_OR_RETURN(
        backward_group_,
        session_.CreateGroup(pipeline, kBackwardGroupFirst + static_cast<uint32_t>(place_.dp)));
  }
  Step step = place_.next_step;
  while (step <= Step(options_.step_count)) {
    std::this_thread::sleep_until(next_step_at_);
    next_step_at_ = std::chrono::steady_clock::now() + options_.step_time_min;
    EVERSTEP_RETURN_IF_ERROR(session_.BeginStep(step));
    EVERSTEP_RETURN_IF_ERROR(ComputeGradients(step));
    VoteExtras extras;
    EVERSTEP_RETURN_IF_ERROR(shard_.reducer->Reduce(session_.dp_group(), extras));
    EVERSTEP_RETURN_IF_ERROR(Agree(extras));
    EVERSTEP_RETURN_IF_ERROR(session_.GradientsComplete(step));
    computed_ = step;
    computed_generation_ = place_.generation;
    log_.Write(StepEvent::kComputed, step, computed_generation_, loss_);

    committing_ = true;
    const Result<CommitOutcome> outcome = session_.Commit(step, extras);
    committing_ = false;
    EVERSTEP_RETURN_IF_ERROR(outcome.status());
    switch (*outcome) {
      case CommitOutcome::kRedo:
        DiscardIfUndecided();
        EVERSTEP_RETURN_IF_ERROR(shard_.reducer->Raise(session_.dp_group()));
        continue;
      case CommitOutcome::kNotFinite:
        return FailedPrecondition(fmt::format("step {}: the loss or a gradient is not finite", step.value));
      case CommitOutcome::kApplied:
      case CommitOutcome::kSwitch: break;
    }
    Announce(step);
    if (*outcome == CommitOutcome::kSwitch) return false;
    if (options_.snapshot_every > 0 && step.value % options_.snapshot_every == 0) {
      const Status taken = session_.Snapshot();
      if (!taken.ok() && taken.code() != StatusCode::kResourceExhausted && MeansRejoin(taken)) return taken;
    }
    step = step.Next();
  }
  return true;
}

template <typename Scalar>
TokenBatch DistributedTrainer<Scalar>::Batch(Step step, int64_t micro_batch) const {
  return data_.BatchAt(data_.SampleOffsets(options_.seed, Step(step.value - 1), micro_batch,
                                           options_.model.sequences_per_micro_batch));
}

// 1F1B: a stage runs ahead by as many forward passes as there are stages behind it, then alternates.
// Activations and their gradients travel in different groups, each with its own order, and sends
// don't block: so a stage that sends forward and one that sends backward never wait for each other.
template <typename Scalar>
Status DistributedTrainer<Scalar>::ComputeGradients(Step step) {
  struct Slot {
    TokenBatch tokens;
    std::shared_ptr<collective::Work> output_sent, gradient_sent;
  };
  Shard& s = shard_;
  const int32_t stage = place_.pp, last = place_.pp_size - 1;
  const int64_t count = place_.micro_batch_count;
  const int64_t ahead = std::min<int64_t>(count, last - stage);
  const auto activation_count =
      static_cast<size_t>(options_.model.TokensPerMicroBatch() * options_.model.width);
  const Scalar weight = shard_.reducer->weight();
  std::vector<Slot> slots(static_cast<size_t>(ahead) + 1);
  std::vector<Scalar> input(stage > 0 ? activation_count : 0);
  std::vector<Scalar> output_gradient(stage < last ? activation_count : 0);
  const auto wait = [](std::shared_ptr<collective::Work>& work) {
    if (!work) return OkStatus();
    return std::exchange(work, nullptr)->Wait();
  };

  // Asked before each layer: a rank that computes on for nothing keeps everybody waiting.
  const Cancelled over = [this] { return session_.generation_over(); };
  const Status left = Aborted("the generation is over");

  agreed_.assign(static_cast<size_t>(micro_batches_ + tensor_count_), 0.0);
  s.reducer->Begin();
  const auto forward = [&](int64_t i) -> Status {
    Slot& slot = slots[static_cast<size_t>(i) % slots.size()];
    ForwardContext<Scalar>& context = s.contexts[static_cast<size_t>(i) % slots.size()];
    EVERSTEP_RETURN_IF_ERROR(wait(slot.gradient_sent));
    const int64_t micro_batch = place_.micro_batch_first + i;
    if (stage == 0 || stage == last) slot.tokens = Batch(step, micro_batch);
    if (stage > 0) {
      EVERSTEP_RETURN_IF_ERROR(session_.pp_group().Receive(input.data(), activation_count,
                                                           TypeOf<Scalar>(), Rank(stage - 1)));
    }
    if (!s.stage->Forward(s.parameters.span(), slot.tokens, input, context, over)) return left;
    if (stage == last) {
      agreed_[static_cast<size_t>(micro_batch)] = context.loss();
    } else {
      slot.output_sent = session_.pp_group().SendAsync(context.output().data(), activation_count,
                                                       TypeOf<Scalar>(), Rank(stage + 1));
    }
    return OkStatus();
  };
  const auto backward = [&](int64_t i) -> Status {
    Slot& slot = slots[static_cast<size_t>(i) % slots.size()];
    ForwardContext<Scalar>& context = s.contexts[static_cast<size_t>(i) % slots.size()];
    if (stage < last) {
      EVERSTEP_RETURN_IF_ERROR(backward_group_->Receive(output_gradient.data(), activation_count,
                                                        TypeOf<Scalar>(), Rank(stage + 1)));
      EVERSTEP_RETURN_IF_ERROR(wait(slot.output_sent));
    }
    if (!s.stage->Backward(s.parameters.span(), slot.tokens, output_gradient, weight, context,
                           s.reducer->micro_batch(), over)) {
      return left;
    }
    if (stage > 0) {
      slot.gradient_sent = backward_group_->SendAsync(context.input_gradient().data(), activation_count,
                                                      TypeOf<Scalar>(), Rank(stage - 1));
    }
    s.reducer->Accumulate();
    return OkStatus();
  };

  Status status = OkStatus();
  for (int64_t i = 0; i < ahead && status.ok(); ++i) status = forward(i);
  for (int64_t i = 0; i < count && status.ok(); ++i) {
    if (i + ahead < count) status = forward(i + ahead);
    if (status.ok()) status = backward(i);
  }
  for (Slot& slot : slots) {  // also after a failure: their buffers live in this function and the contexts
    for (auto* work : {&slot.output_sent, &slot.gradient_sent}) {
      if (Status sent = wait(*work); !sent.ok() && status.ok()) status = std::move(sent);
    }
  }
  return status;
}

template <typename Scalar>
Status DistributedTrainer<Scalar>::Agree(VoteExtras& extras) {
  // Each place of the array is filled by one rank and zero elsewhere, so the sum is the same bits however
  // it is ordered.
  if (place_.dp == 0) {
    const std::vector<double> sums =
        TensorSquareSums<Scalar>(shard_.stage->tensors(), shard_.reducer->gradients());
    std::copy(sums.begin(), sums.end(),
              agreed_.begin() + micro_batches_ + stage_tensor_first_[static_cast<size_t>(place_.pp)]);
  }
  EVERSTEP_RETURN_IF_ERROR(session_.world().AllReduce(agreed_.data(), agreed_.data(), agreed_.size(),
                                                      DataType::kF64, ReduceOp::kSum));
  double loss = 0;
  for (int64_t i = 0; i < micro_batches_; ++i) loss += agreed_[static_cast<size_t>(i)];
  loss_ = loss / static_cast<double>(micro_batches_);
  const double norm = GlobalNorm(std::span(agreed_).subspan(static_cast<size_t>(micro_batches_)));
  clip_scale_ = ClipScale(options_.optimizer, norm);
  if (!std::isfinite(loss_) || !std::isfinite(norm)) extras.not_finite = true;
  return OkStatus();
}

template <typename Scalar>
Result<TrainingResult> DistributedTrainer<Scalar>::Conclude() {
  TrainingResult result;
  if (place_.dp != 0 || place_.tp != 0) return result;
  EVERSTEP_ASSIGN_OR_RETURN(const StageRange range, PipelineStage(options_.model, 0, 1));
  EVERSTEP_ASSIGN_OR_RETURN(const Stage<Scalar> whole, Stage<Scalar>::Create(options_.model, range));
  std::vector<size_t> counts;
  for (int32_t i = 0; i < place_.pp_size; ++i) {
    EVERSTEP_ASSIGN_OR_RETURN(const StageRange part, PipelineStage(options_.model, i, place_.pp_size));
    EVERSTEP_ASSIGN_OR_RETURN(const Stage<Scalar> stage, Stage<Scalar>::Create(options_.model, part));
    counts.push_back(static_cast<size_t>(stage.parameter_count()));
  }
  AlignedBuffer<Scalar> parameters(place_.pp == 0 ? whole.parameter_count() : 0);
  if (place_.pp_size > 1) {
    EVERSTEP_RETURN_IF_ERROR(session_.pp_group().GatherV(shard_.parameters.data(), parameters.data(),
                                                         counts, TypeOf<Scalar>(), Rank(0)));
    if (place_.pp != 0) return result;
  } else {
    std::copy_n(shard_.parameters.data(), shard_.parameters.size(), parameters.data());
  }
  result.reports = true;
  result.digest = ParameterDigest<Scalar>(std::as_const(parameters).span());
  if (options_.validation_sequence_count > 0) {
    ForwardContext<Scalar> context(whole);
    result.validation_loss = ValidationLoss<Scalar>(whole, std::as_const(parameters).span(), data_,
                                                    options_.validation_sequence_count, context);
  }
  return result;
}

template class DistributedTrainer<float>;
template class DistributedTrainer<double>;

}  // namespace everstep::examples
