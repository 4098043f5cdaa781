#include "worker/examples/transformer.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/prng.h"
#include "worker/examples/cpu_check.h"
#include "worker/examples/kernels.h"

namespace everstep::examples {
namespace {

using kernels::Write;

// FNV-1a: a tensor's own stream of initial values.
uint64_t HashOf(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

template <typename Scalar>
kernels::View<const Scalar> Matrix(const Scalar* data, int64_t rows, int64_t columns) {
  return {data, rows, columns, columns};
}
template <typename Scalar>
kernels::View<Scalar> MutableMatrix(Scalar* data, int64_t rows, int64_t columns) {
  return {data, rows, columns, columns};
}

}  // namespace

Result<StageRange> PipelineStage(const ModelConfig& config, int64_t stage_index,
                                 int64_t stage_count) {
  if (stage_count < 1 || stage_count > config.layer_count) {
    return InvalidArgument(
        fmt::format("pipeline stages are {}: choose from 1 to the model's {} layers", stage_count,
                    config.layer_count));
  }
  if (stage_index < 0 || stage_index >= stage_count) {
    return InvalidArgument(fmt::format("pipeline stage index is {}: choose from 0 to {}",
                                       stage_index, stage_count - 1));
  }
  const int64_t each = config.layer_count / stage_count;
  const int64_t rest = config.layer_count % stage_count;
  return StageRange{.first_layer = stage_index * each + std::min(stage_index, rest),
                    .layer_count = each + (stage_index < rest ? 1 : 0),
                    .has_embedding = stage_index == 0,
                    .has_head = stage_index == stage_count - 1};
}

template <typename Scalar>
ForwardContext<Scalar>::ForwardContext(const Stage<Scalar>& stage, int64_t misalignment_elements) {
  const ModelConfig& c = stage.config();
  const int64_t tokens = c.TokensPerMicroBatch();
  // First pass: sizes. Second pass: addresses.
  int64_t used = 0;
  Scalar* base = nullptr;
  const auto take = [&](int64_t count) {
    Scalar* at = base == nullptr ? nullptr : base + used;
    constexpr int64_t kLine = AlignedBuffer<Scalar>::kAlignmentBytes / sizeof(Scalar);
    used += (count + kLine - 1) / kLine * kLine;
    return at;
  };
  const auto place = [&] {
    used = misalignment_elements;
    for (Layer& layer : layers_) {
      layer.input = take(tokens * c.width);
      layer.normed = take(tokens * c.width);
      layer.rms = take(tokens);
      layer.qkv = take(tokens * 3 * c.width);
      layer.probabilities =
          take(c.sequences_per_micro_batch * c.head_count * c.sequence_length * c.sequence_length);
      layer.mixed = take(tokens * c.width);
      layer.middle = take(tokens * c.width);
      layer.middle_normed = take(tokens * c.width);
      layer.middle_rms = take(tokens);
      layer.up = take(tokens * c.mlp_width);
      layer.active = take(tokens * c.mlp_width);
    }
    last_ = take(tokens * c.width);
    if (stage.range().has_head) {
      last_normed_ = take(tokens * c.width);
      last_rms_ = take(tokens);
      logits_ = take(tokens * kVocabularySize);
    }
    gradient_ = take(tokens * c.width);
    branch_ = take(tokens * c.width);
    wide_ = take(tokens * std::max(c.mlp_width, 3 * c.width));
    square_ = take(c.sequence_length * c.sequence_length);
  };
  layers_.resize(static_cast<size_t>(stage.range().layer_count));
  place();
  memory_ = AlignedBuffer<Scalar>(used);
  base = memory_.data();
  place();
}

template <typename Scalar>
Result<Stage<Scalar>> Stage<Scalar>::Create(const ModelConfig& config, const StageRange& range) {
  EVERSTEP_RETURN_IF_ERROR(CheckProcessor());
  EVERSTEP_RETURN_IF_ERROR(ValidateModelConfig(config));
  if (range.first_layer < 0 || range.layer_count < 1 ||
      range.layer_count > config.layer_count - range.first_layer ||
      range.has_embedding != (range.first_layer == 0) ||
      range.has_head != (range.first_layer + range.layer_count == config.layer_count)) {
    return InvalidArgument(fmt::format(
        "stage range has layers {} to {} of {} (embedding: {}, head: {}): choose at least one "
        "existing layer, the embedding exactly with the first and the head exactly with the last",
        range.first_layer, range.first_layer + range.layer_count - 1, config.layer_count,
        range.has_embedding, range.has_head));
  }
  Stage stage;
  stage.config_ = config;
  stage.range_ = range;
  const int64_t width = config.width;
  // Branches that end on the residual stream start smaller the more of them there are.
  const double residual = 1 / std::sqrt(2.0 * static_cast<double>(config.layer_count));
  const double from_width = 1 / std::sqrt(static_cast<double>(width));
  const double from_mlp = 1 / std::sqrt(static_cast<double>(config.mlp_width));
  if (range.has_embedding) {
    stage.token_embedding_ =
        stage.AddTensor("embedding.token.weight", {kVocabularySize, width}, 0.1);
    stage.position_embedding_ =
        stage.AddTensor("embedding.position.weight", {config.sequence_length, width}, 0.1);
  }
  for (int64_t i = 0; i < range.layer_count; ++i) {
    const std::string block = fmt::format("blocks.{}.", range.first_layer + i);
    LayerOffsets at;
    at.attention_norm = stage.AddTensor(block + "attention.norm.weight", {width}, 0);
    at.qkv = stage.AddTensor(block + "attention.qkv.weight", {width, 3 * width}, from_width);
    at.attention_output =
        stage.AddTensor(block + "attention.output.weight", {width, width}, from_width * residual);
    at.mlp_norm = stage.AddTensor(block + "mlp.norm.weight", {width}, 0);
    at.up = stage.AddTensor(block + "mlp.up.weight", {width, config.mlp_width}, from_width);
    at.down =
        stage.AddTensor(block + "mlp.down.weight", {config.mlp_width, width}, from_mlp * residual);
    stage.layers_.push_back(at);
  }
  if (range.has_head) {
    stage.final_norm_ = stage.AddTensor("final.norm.weight", {width}, 0);
    stage.head_ = stage.AddTensor("head.weight", {width, kVocabularySize}, 0.25 * from_width);
  }
  return stage;
}

template <typename Scalar>
int64_t Stage<Scalar>::AddTensor(std::string name, std::vector<int64_t> shape,
                                 double initial_deviation) {
  const int64_t offset = parameter_count_;
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  const bool decayed = shape.size() > 1;
  tensors_.push_back(
      {std::move(name), offset, count, std::move(shape), decayed, initial_deviation});
  parameter_count_ += count;
  return offset;
}

template <typename Scalar>
void Stage<Scalar>::Initialize(uint64_t seed, std::span<Scalar> parameters) const {
  EVERSTEP_CHECK(static_cast<int64_t>(parameters.size()) == parameter_count_);
  for (const TensorInfo& tensor : tensors_) {
    Scalar* to = parameters.data() + tensor.offset;
    if (tensor.initial_deviation == 0) {
      std::fill_n(to, tensor.count, Scalar(1));
      continue;
    }
    // Uniform with the wanted deviation: only exact arithmetic, hence equal bits on every machine.
    const double reach = tensor.initial_deviation * 1.7320508075688772;
    Prng prng(Prng(seed).Next() ^ HashOf(tensor.name));
    for (int64_t i = 0; i < tensor.count; ++i) {
      const double unit = static_cast<double>(prng.Next() >> 11) * 0x1p-53;
      to[i] = static_cast<Scalar>((2 * unit - 1) * reach);
    }
  }
}

template <typename Scalar>
void Stage<Scalar>::ForwardBlock(const Scalar* p, const LayerOffsets& at,
                                 const typename ForwardContext<Scalar>::Layer& layer,
                                 Scalar* output) const {
  const int64_t tokens = config_.TokensPerMicroBatch();
  const int64_t width = config_.width;
  const int64_t mlp = config_.mlp_width;
  const kernels::AttentionShape attention{config_.sequences_per_micro_batch,
                                          config_.sequence_length, config_.head_count,
                                          width / config_.head_count};
  kernels::RmsNormForward<Scalar>(Matrix<Scalar>(layer.input, tokens, width), p + at.attention_norm,
                                  layer.normed, layer.rms);
  kernels::MatMul<Scalar>(Matrix<Scalar>(layer.normed, tokens, width),
                          Matrix(p + at.qkv, width, 3 * width),
                          MutableMatrix(layer.qkv, tokens, 3 * width), Write::kOverwrite);
  kernels::AttentionForward<Scalar>(attention, layer.qkv, layer.probabilities, layer.mixed);
  std::copy_n(layer.input, tokens * width, layer.middle);
  kernels::MatMul<Scalar>(Matrix<Scalar>(layer.mixed, tokens, width),
                          Matrix(p + at.attention_output, width, width),
                          MutableMatrix(layer.middle, tokens, width), Write::kAdd);

  kernels::RmsNormForward<Scalar>(Matrix<Scalar>(layer.middle, tokens, width), p + at.mlp_norm,
                                  layer.middle_normed, layer.middle_rms);
  kernels::MatMul<Scalar>(Matrix<Scalar>(layer.middle_normed, tokens, width),
                          Matrix(p + at.up, width, mlp), MutableMatrix(layer.up, tokens, mlp),
                          Write::kOverwrite);
  kernels::GeluForward<Scalar>(layer.up, layer.active, tokens * mlp);
  std::copy_n(layer.middle, tokens * width, output);
  kernels::MatMul<Scalar>(Matrix<Scalar>(layer.active, tokens, mlp),
                          Matrix(p + at.down, mlp, width), MutableMatrix(output, tokens, width),
                          Write::kAdd);
}

template <typename Scalar>
bool Stage<Scalar>::Forward(std::span<const Scalar> parameters, const TokenBatch& tokens,
                            std::span<const Scalar> input, ForwardContext<Scalar>& context,
                            const Cancelled& cancelled) const {
  const int64_t token_count = config_.TokensPerMicroBatch();
  const int64_t width = config_.width;
  const auto is_size = [](const auto& array, int64_t size) {
    return static_cast<int64_t>(array.size()) == size;
  };
  EVERSTEP_CHECK(is_size(parameters, parameter_count_) &&
                 is_size(context.layers_, range_.layer_count));
  const Scalar* p = parameters.data();
  Scalar* first = context.layers_.front().input;
  if (range_.has_embedding) {
    EVERSTEP_CHECK(is_size(tokens.inputs, token_count) && input.empty());
    for (int64_t i = 0; i < token_count; ++i) {
      const Scalar* token = p + token_embedding_ + tokens.inputs[static_cast<size_t>(i)] * width;
      const Scalar* position = p + position_embedding_ + i % config_.sequence_length * width;
      for (int64_t j = 0; j < width; ++j) first[i * width + j] = token[j] + position[j];
    }
  } else {
    EVERSTEP_CHECK(is_size(input, token_count * width));
    std::copy_n(input.data(), token_count * width, first);
  }

  for (size_t i = 0; i < layers_.size(); ++i) {
    if (cancelled && cancelled()) return false;
    const bool is_last = i + 1 == layers_.size();
    ForwardBlock(p, layers_[i], context.layers_[i],
                 is_last ? context.last_ : context.layers_[i + 1].input);
  }

  context.output_ = {};
  context.input_gradient_ = {};
  if (range_.has_head) {
    EVERSTEP_CHECK(is_size(tokens.targets, token_count));
    kernels::RmsNormForward<Scalar>(Matrix<Scalar>(context.last_, token_count, width),
                                    p + final_norm_, context.last_normed_, context.last_rms_);
    const auto logits = MutableMatrix(context.logits_, token_count, kVocabularySize);
    kernels::MatMul<Scalar>(Matrix<Scalar>(context.last_normed_, token_count, width),
                            Matrix(p + head_, width, kVocabularySize), logits, Write::kOverwrite);
    context.loss_ = kernels::CrossEntropyForward<Scalar>(logits, tokens.targets.data()) /
                    static_cast<double>(token_count);
  } else {
    context.output_ = {context.last_, static_cast<size_t>(token_count * width)};
  }
  context.forward_done_ = true;
  return true;
}

// On entry context.gradient_ is the gradient of the block's output, on exit of its input.
template <typename Scalar>
void Stage<Scalar>::BackwardBlock(const Scalar* p, const LayerOffsets& at,
                                  const typename ForwardContext<Scalar>::Layer& layer,
                                  ForwardContext<Scalar>& context, Scalar* g) const {
  const int64_t tokens = config_.TokensPerMicroBatch();
  const int64_t width = config_.width;
  const int64_t mlp = config_.mlp_width;
  const kernels::AttentionShape attention{config_.sequences_per_micro_batch,
                                          config_.sequence_length, config_.head_count,
                                          width / config_.head_count};
  const auto gradient = Matrix<Scalar>(context.gradient_, tokens, width);
  const auto branch = MutableMatrix(context.branch_, tokens, width);

  kernels::MatMulTransposedA<Scalar>(Matrix<Scalar>(layer.active, tokens, mlp), gradient,
                                     MutableMatrix(g + at.down, mlp, width), Write::kAdd);
  kernels::MatMulTransposedB<Scalar>(gradient, Matrix(p + at.down, mlp, width),
                                     MutableMatrix(context.wide_, tokens, mlp), Write::kOverwrite);
  kernels::GeluBackward<Scalar>(layer.up, context.wide_, tokens * mlp);
  const auto up = Matrix<Scalar>(context.wide_, tokens, mlp);
  kernels::MatMulTransposedA<Scalar>(Matrix<Scalar>(layer.middle_normed, tokens, width), up,
                                     MutableMatrix(g + at.up, width, mlp), Write::kAdd);
  kernels::MatMulTransposedB<Scalar>(up, Matrix(p + at.up, width, mlp), branch, Write::kOverwrite);
  kernels::RmsNormBackward<Scalar>(Matrix<Scalar>(layer.middle, tokens, width), p + at.mlp_norm,
                                   layer.middle_rms, context.branch_, context.gradient_,
                                   g + at.mlp_norm);

  kernels::MatMulTransposedA<Scalar>(Matrix<Scalar>(layer.mixed, tokens, width), gradient,
                                     MutableMatrix(g + at.attention_output, width, width),
                                     Write::kAdd);
  kernels::MatMulTransposedB<Scalar>(gradient, Matrix(p + at.attention_output, width, width),
                                     branch, Write::kOverwrite);
  kernels::AttentionBackward<Scalar>(attention, layer.qkv, layer.probabilities, context.branch_,
                                     context.square_, context.wide_);
  const auto qkv = Matrix<Scalar>(context.wide_, tokens, 3 * width);
  kernels::MatMulTransposedA<Scalar>(Matrix<Scalar>(layer.normed, tokens, width), qkv,
                                     MutableMatrix(g + at.qkv, width, 3 * width), Write::kAdd);
  kernels::MatMulTransposedB<Scalar>(qkv, Matrix(p + at.qkv, width, 3 * width), branch,
                                     Write::kOverwrite);
  kernels::RmsNormBackward<Scalar>(Matrix<Scalar>(layer.input, tokens, width),
                                   p + at.attention_norm, layer.rms, context.branch_,
                                   context.gradient_, g + at.attention_norm);
}

template <typename Scalar>
bool Stage<Scalar>::Backward(std::span<const Scalar> parameters, const TokenBatch& tokens,
                             std::span<const Scalar> output_gradient, Scalar loss_weight,
                             ForwardContext<Scalar>& context, std::span<Scalar> gradients,
                             const Cancelled& cancelled) const {
  const int64_t token_count = config_.TokensPerMicroBatch();
  const int64_t width = config_.width;
  EVERSTEP_CHECK(static_cast<int64_t>(parameters.size()) == parameter_count_ &&
                 static_cast<int64_t>(gradients.size()) == parameter_count_);
  EVERSTEP_CHECK(std::exchange(context.forward_done_, false));
  const Scalar* p = parameters.data();
  Scalar* g = gradients.data();
  if (range_.has_head) {
    EVERSTEP_CHECK(output_gradient.empty());
    kernels::CrossEntropyBackward<Scalar>(
        MutableMatrix(context.logits_, token_count, kVocabularySize), tokens.targets.data(),
        loss_weight / static_cast<Scalar>(token_count));
    const auto logits = Matrix<Scalar>(context.logits_, token_count, kVocabularySize);
    kernels::MatMulTransposedA<Scalar>(Matrix<Scalar>(context.last_normed_, token_count, width),
                                       logits, MutableMatrix(g + head_, width, kVocabularySize),
                                       Write::kAdd);
    kernels::MatMulTransposedB<Scalar>(logits, Matrix(p + head_, width, kVocabularySize),
                                       MutableMatrix(context.branch_, token_count, width),
                                       Write::kOverwrite);
    std::fill_n(context.gradient_, token_count * width, Scalar(0));
    kernels::RmsNormBackward<Scalar>(Matrix<Scalar>(context.last_, token_count, width),
                                     p + final_norm_, context.last_rms_, context.branch_,
                                     context.gradient_, g + final_norm_);
  } else {
    EVERSTEP_CHECK(static_cast<int64_t>(output_gradient.size()) == token_count * width);
    std::copy_n(output_gradient.data(), token_count * width, context.gradient_);
  }

  for (size_t i = layers_.size(); i-- > 0;) {
    if (cancelled && cancelled()) return false;
    BackwardBlock(p, layers_[i], context.layers_[i], context, g);
  }

  context.output_ = {};
  if (range_.has_embedding) {
    for (int64_t i = 0; i < token_count; ++i) {
      const Scalar* row = context.gradient_ + i * width;
      kernels::AddTo(row, g + token_embedding_ + tokens.inputs[static_cast<size_t>(i)] * width,
                     width);
      kernels::AddTo(row, g + position_embedding_ + i % config_.sequence_length * width, width);
    }
  } else {
    context.input_gradient_ = {context.gradient_, static_cast<size_t>(token_count * width)};
  }
  return true;
}

template class ForwardContext<float>;
template class ForwardContext<double>;
template class Stage<float>;
template class Stage<double>;

}  // namespace everstep::examples
