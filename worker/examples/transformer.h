// A byte-level transformer language model (pre-norm blocks: RMSNorm, causal multi-head attention,
// GELU MLP; learned positions; untied head; no biases) with a hand-written backward pass, cut into
// pipeline stages. The trainers call it; a Stage is immutable and usable from any thread, a
// ForwardContext belongs to one micro-batch at a time.
//
// A stage holds no numbers of its own: parameters and gradients are flat arrays of the caller, laid
// out by tensors(). Names are global, so a checkpoint may be cut again. One stage over all layers
// computes bit for bit what a chain of stages computes, and all of it is a function of values,
// never of addresses.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/examples/aligned_buffer.h"
#include "worker/examples/model_config.h"

namespace everstep::examples {

struct TensorInfo {
  std::string name;    // "blocks.3.attention.qkv.weight"
  int64_t offset = 0;  // elements from the start of the stage's flat array
  int64_t count = 0;
  std::vector<int64_t> shape;    // row-major
  bool decayed = false;          // by weight decay: matrices yes, gains no
  double initial_deviation = 0;  // of the initial values; 0: all ones
};

struct StageRange {
  int64_t first_layer = 0;
  int64_t layer_count = 0;
  bool has_embedding = false;
  bool has_head = false;
  bool operator==(const StageRange&) const = default;
};

// Layers cut as evenly as they go, earlier stages taking the remainder; embedding first, head last.
// INVALID_ARGUMENT: fewer layers than stages, or an index out of range.
Result<StageRange> PipelineStage(const ModelConfig& config, int64_t stage_index,
                                 int64_t stage_count);

// The bytes of one micro-batch, sequence after sequence; targets are inputs moved by one.
struct TokenBatch {
  std::vector<uint8_t> inputs;
  std::vector<uint8_t> targets;
};

// Asked between layers; true ends a pass early.
using Cancelled = std::function<bool()>;

template <typename Scalar>
class Stage;

// What the forward pass of one micro-batch leaves for its backward pass. Reusable; all memory is
// taken at creation.
template <typename Scalar>
class ForwardContext {
 public:
  // `misalignment_elements` moves every array off its cache-line border, for the test that
  // addresses do not matter.
  explicit ForwardContext(const Stage<Scalar>& stage, int64_t misalignment_elements = 0);

  // After Forward, until the next Forward or Backward: the activation for the next stage
  // [TokensPerMicroBatch, width]. Empty on the last stage.
  std::span<const Scalar> output() const { return output_; }
  // After Forward on the last stage: mean negative log-likelihood per byte, in nats.
  double loss() const { return loss_; }
  // After Backward, until the next Forward: the gradient for the previous stage. Empty on the first
  // stage.
  std::span<const Scalar> input_gradient() const { return input_gradient_; }

 private:
  friend class Stage<Scalar>;
  struct Layer {
    Scalar* input;          // [tokens, width]
    Scalar* normed;         // [tokens, width]
    Scalar* rms;            // [tokens]
    Scalar* qkv;            // [tokens, 3 width]
    Scalar* probabilities;  // [sequences, heads, length, length]
    Scalar* mixed;          // [tokens, width]
    Scalar* middle;         // [tokens, width]
    Scalar* middle_normed;  // [tokens, width]
    Scalar* middle_rms;     // [tokens]
    Scalar* up;             // [tokens, mlp]
    Scalar* active;         // [tokens, mlp]
  };

  AlignedBuffer<Scalar> memory_;
  std::vector<Layer> layers_;
  Scalar* last_ = nullptr;         // [tokens, width]: what the last block produced
  Scalar* last_normed_ = nullptr;  // head only
  Scalar* last_rms_ = nullptr;     // head only
  Scalar* logits_ = nullptr;       // head only: probabilities after Forward
  Scalar* gradient_ = nullptr;     // [tokens, width]: flows from the last block to the first
  Scalar* branch_ = nullptr;       // [tokens, width]
  Scalar* wide_ = nullptr;         // [tokens, max(mlp, 3 width)]
  Scalar* square_ = nullptr;       // [length, length]
  bool forward_done_ = false;
  double loss_ = 0;
  std::span<const Scalar> output_;
  std::span<const Scalar> input_gradient_;
};

template <typename Scalar>
class Stage {
 public:
  // INVALID_ARGUMENT: an impossible config or range. FAILED_PRECONDITION: CheckProcessor().
  static Result<Stage> Create(const ModelConfig& config, const StageRange& range);

  const ModelConfig& config() const { return config_; }
  const StageRange& range() const { return range_; }
  // In global order: the tensors of stage 0, of stage 1, ... are the tensors of the whole model.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  int64_t parameter_count() const { return parameter_count_; }

  // A pure function of (seed, tensor name): a stage starts with its part of the whole model's
  // values. REQUIRES: parameters.size() == parameter_count()
  void Initialize(uint64_t seed, std::span<Scalar> parameters) const;

  // Effect: fills the context, with output() or loss(). `input` is the previous stage's output(),
  // empty on the first. REQUIRES: a context of this stage; tokens of TokensPerMicroBatch (read on
  // the first and the last stage only). False: `cancelled`, asked before each layer, said so; the context is
  // worth nothing then.
  bool Forward(std::span<const Scalar> parameters, const TokenBatch& tokens,
               std::span<const Scalar> input, ForwardContext<Scalar>& context,
               const Cancelled& cancelled = nullptr) const;

  // Effect: adds the gradient of loss_weight · loss to `gradients`, and leaves input_gradient() in
  // the context. `output_gradient` is the next stage's input_gradient(), empty on the last.
  // loss_weight counts on the last only: the micro-batch's share of the global batch, 1 /
  // micro_batch_count. REQUIRES: Forward of the same micro-batch and parameters on this context; at
  // most one Backward per Forward. False: `cancelled`; `gradients` are worth nothing then.
  bool Backward(std::span<const Scalar> parameters, const TokenBatch& tokens,
                std::span<const Scalar> output_gradient, Scalar loss_weight,
                ForwardContext<Scalar>& context, std::span<Scalar> gradients,
                const Cancelled& cancelled = nullptr) const;

 private:
  friend class ForwardContext<Scalar>;
  struct LayerOffsets {
    int64_t attention_norm, qkv, attention_output, mlp_norm, up, down;
  };

  Stage() = default;
  int64_t AddTensor(std::string name, std::vector<int64_t> shape, double initial_deviation);
  void ForwardBlock(const Scalar* p, const LayerOffsets& at,
                    const typename ForwardContext<Scalar>::Layer& layer, Scalar* output) const;
  void BackwardBlock(const Scalar* p, const LayerOffsets& at,
                     const typename ForwardContext<Scalar>::Layer& layer,
                     ForwardContext<Scalar>& context, Scalar* g) const;

  ModelConfig config_;
  StageRange range_;
  std::vector<TensorInfo> tensors_;
  int64_t parameter_count_ = 0;
  std::vector<LayerOffsets> layers_;
  int64_t token_embedding_ = 0;
  int64_t position_embedding_ = 0;
  int64_t final_norm_ = 0;
  int64_t head_ = 0;
};

// Both are compiled in transformer.cc.
extern template class ForwardContext<float>;
extern template class ForwardContext<double>;
extern template class Stage<float>;
extern template class Stage<double>;

}  // namespace everstep::examples
