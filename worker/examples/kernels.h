// The arithmetic of the example model: matrix products, normalisation, attention, GELU, softmax
// cross-entropy and AdamW on raw row-major arrays. Called by transformer.cc and adamw.cc only; pure
// functions, usable on any thread.
//
// kernels.cc and matmul.cc alone are compiled for the wider instruction set (EVERSTEP_NATIVE_ARCH)
// and alone include Eigen, so that no inline function built with AVX2 can be linked into code that
// runs before the processor check.
//
// Invariant: a result depends on values and sizes only, never on addresses: sums run in fixed
// lanes, transcendental functions always take the packet path, and cache-dependent block sizes are
// fixed at start.
#pragma once

#include <cstdint>

namespace everstep::examples::kernels {

// A row-major matrix in somebody else's memory; `stride` elements from row to row.
template <typename Scalar>
struct View {
  Scalar* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
};

enum class Write { kOverwrite, kAdd };

// "avx2+fma" or "baseline": results are bitwise comparable only between equal classes.
const char* InstructionSetName();

template <typename Scalar>
void MatMul(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);  // a · b
template <typename Scalar>
void MatMulTransposedA(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);
template <typename Scalar>
void MatMulTransposedB(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);

// to += from
template <typename Scalar>
void AddTo(const Scalar* from, Scalar* to, int64_t count);

// out = x · r · gain with r = 1 / sqrt(mean(x²) + ε) per row; keeps r for the backward pass.
template <typename Scalar>
void RmsNormForward(View<const Scalar> x, const Scalar* gain, Scalar* out, Scalar* reciprocal_rms);
// Adds to `x_gradient` and `gain_gradient`.
template <typename Scalar>
void RmsNormBackward(View<const Scalar> x, const Scalar* gain, const Scalar* reciprocal_rms,
                     const Scalar* out_gradient, Scalar* x_gradient, Scalar* gain_gradient);

struct AttentionShape {
  int64_t sequence_count = 0;
  int64_t sequence_length = 0;
  int64_t head_count = 0;
  int64_t head_width = 0;
};
// qkv: one row per token, [q | k | v], each head_count · head_width wide. probabilities: [sequence,
// head, length, length], kept for the backward pass. mixed: one row per token.
template <typename Scalar>
void AttentionForward(const AttentionShape& shape, const Scalar* qkv, Scalar* probabilities,
                      Scalar* mixed);
// Overwrites qkv_gradient; `scratch` holds length² elements.
template <typename Scalar>
void AttentionBackward(const AttentionShape& shape, const Scalar* qkv, const Scalar* probabilities,
                       const Scalar* mixed_gradient, Scalar* scratch, Scalar* qkv_gradient);

// GELU in its tanh form, x · sigmoid(2 · sqrt(2/π) · (x + 0.044715 x³)).
template <typename Scalar>
void GeluForward(const Scalar* x, Scalar* out, int64_t count);
// gradient (of the output on entry, of the input on exit)
template <typename Scalar>
void GeluBackward(const Scalar* x, Scalar* gradient, int64_t count);

// Turns each row of logits into probabilities and returns the sum of the negative log-likelihoods
// of the targets.
template <typename Scalar>
double CrossEntropyForward(View<Scalar> logits, const uint8_t* targets);
// Turns probabilities into the gradient of `scale` times that sum with respect to the logits.
template <typename Scalar>
void CrossEntropyBackward(View<Scalar> probabilities, const uint8_t* targets, Scalar scale);

// Σ x² in double, in fixed lanes.
template <typename Scalar>
double SquareSum(const Scalar* x, int64_t count);

template <typename Scalar>
struct AdamWCoefficients {
  Scalar gradient_scale;  // clipping
  Scalar beta1, beta2;
  Scalar step_size;       // learning rate / (1 − β1^t)
  Scalar variance_scale;  // 1 / (1 − β2^t)
  Scalar epsilon;
  Scalar keep;  // 1 − learning rate · weight decay
};
template <typename Scalar>
void AdamWUpdate(const AdamWCoefficients<Scalar>& c, const Scalar* gradients, Scalar* parameters,
                 Scalar* m, Scalar* v, int64_t count);

}  // namespace everstep::examples::kernels
