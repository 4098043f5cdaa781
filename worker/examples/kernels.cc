#define EIGEN_DONT_PARALLELIZE
#define EIGEN_NO_DEBUG

#include "worker/examples/kernels.h"

#include <Eigen/Core>
#include <cmath>

#include "worker/examples/matmul.h"

namespace everstep::examples::kernels {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// The products themselves are not instrumented (matmul.cc); their operands' corners are looked at
// here.
template <typename Scalar>
void LookAt(const View<Scalar>& v) {
  static_cast<void>(*static_cast<const volatile Scalar*>(v.data));
  static_cast<void>(
      *static_cast<const volatile Scalar*>(v.data + (v.rows - 1) * v.stride + v.columns - 1));
}
#else
template <typename Scalar>
void LookAt(const View<Scalar>&) {}
#endif

// Element-wise work and sums go through arrays of this fixed length: the compiler then knows the
// packet path, and no run-time test of a pointer's alignment decides between packets and scalars.
constexpr int64_t kLanes = 16;
template <typename Scalar>
using Lanes = Eigen::Array<Scalar, kLanes, 1>;
template <typename Scalar>
using ConstLanes = Eigen::Map<const Lanes<Scalar>, Eigen::Unaligned>;
template <typename Scalar>
using MutableLanes = Eigen::Map<Lanes<Scalar>, Eigen::Unaligned>;

// `lanes` copied from x, zeros behind the end.
template <typename Scalar>
Lanes<Scalar> Tail(const Scalar* x, int64_t count) {
  Lanes<Scalar> lanes = Lanes<Scalar>::Zero();
  for (int64_t i = 0; i < count; ++i) lanes[i] = x[i];
  return lanes;
}

// The lanes of a sum, added pairwise in one fixed order.
template <typename Scalar>
Scalar Fold(const Lanes<Scalar>& lanes) {
  Scalar work[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) work[i] = lanes[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) work[i] += work[i + width];
  }
  return work[0];
}

template <typename Scalar>
Scalar Dot(const Scalar* a, const Scalar* b, int64_t count) {
  Lanes<Scalar> sum = Lanes<Scalar>::Zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sum += ConstLanes<Scalar>(a + i) * ConstLanes<Scalar>(b + i);
  }
  if (i < count) sum += Tail(a + i, count - i) * Tail(b + i, count - i);
  return Fold(sum);
}

template <typename Scalar>
Scalar MaximumOf(const Scalar* x, int64_t count) {
  Scalar maximum = x[0];
  for (int64_t i = 1; i < count; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

// x[i] = exp(x[i] · scale − shift); returns the sum.
template <typename Scalar>
Scalar ExpAndSum(Scalar* x, int64_t count, Scalar scale, Scalar shift) {
  Lanes<Scalar> sum = Lanes<Scalar>::Zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    MutableLanes<Scalar> lanes(x + i);
    const Lanes<Scalar> value = (lanes * scale - shift).exp();
    lanes = value;
    sum += value;
  }
  if (i < count) {
    const Lanes<Scalar> value = (Tail(x + i, count - i) * scale - shift).exp();
    for (int64_t j = 0; i + j < count; ++j) x[i + j] = value[j];
    sum += Tail(value.data(), count - i);
  }
  return Fold(sum);
}

template <typename Scalar>
void ScaleBy(Scalar* x, int64_t count, Scalar factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// The C library's log differs between its versions and processors by the last bit; Eigen's packets
// do not.
template <typename Scalar>
Scalar LogOf(Scalar x) {
  const Lanes<Scalar> value = Lanes<Scalar>::Constant(x).log();
  return value[0];
}

template <typename Scalar>
Lanes<Scalar> GeluGate(const Lanes<Scalar>& x) {
  const Scalar c = Scalar(-2 * 0.79788456080286535588);  // −2 · sqrt(2/π)
  return (Scalar(1) + (c * (x + Scalar(0.044715) * x * x * x)).exp()).inverse();
}

template <typename Scalar>
Lanes<Scalar> GeluSlope(const Lanes<Scalar>& x) {
  const Lanes<Scalar> gate = GeluGate<Scalar>(x);
  const Scalar c = Scalar(2 * 0.79788456080286535588);
  return gate + x * gate * (Scalar(1) - gate) * c * (Scalar(1) + Scalar(3 * 0.044715) * x * x);
}

}  // namespace

const char* InstructionSetName() {
#if defined(__AVX2__) && defined(__FMA__)
  return "avx2+fma";
#else
  return "baseline";
#endif
}

template <typename Scalar>
void MatMul(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  LookAt(a);
  LookAt(b);
  LookAt(out);
  products::MatMul<Scalar>(a, b, out, write);
}
template <typename Scalar>
void MatMulTransposedA(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  LookAt(a);
  LookAt(b);
  LookAt(out);
  products::MatMulTransposedA<Scalar>(a, b, out, write);
}
template <typename Scalar>
void MatMulTransposedB(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  LookAt(a);
  LookAt(b);
  LookAt(out);
  products::MatMulTransposedB<Scalar>(a, b, out, write);
}

template <typename Scalar>
void AddTo(const Scalar* from, Scalar* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

template <typename Scalar>
void RmsNormForward(View<const Scalar> x, const Scalar* gain, Scalar* out, Scalar* reciprocal_rms) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const Scalar* in = x.data + row * x.stride;
    Scalar* to = out + row * x.columns;
    const Scalar mean = Dot(in, in, x.columns) / Scalar(x.columns);
    const Scalar r = Scalar(1) / std::sqrt(mean + Scalar(1e-5));
    reciprocal_rms[row] = r;
    for (int64_t i = 0; i < x.columns; ++i) to[i] = in[i] * r * gain[i];
  }
}

template <typename Scalar>
void RmsNormBackward(View<const Scalar> x, const Scalar* gain, const Scalar* reciprocal_rms,
                     const Scalar* out_gradient, Scalar* x_gradient, Scalar* gain_gradient) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const Scalar* in = x.data + row * x.stride;
    const Scalar* dy = out_gradient + row * x.columns;
    Scalar* dx = x_gradient + row * x.columns;
    const Scalar r = reciprocal_rms[row];
    Lanes<Scalar> sum = Lanes<Scalar>::Zero();
    int64_t i = 0;
    for (; i + kLanes <= x.columns; i += kLanes) {
      sum += ConstLanes<Scalar>(dy + i) * ConstLanes<Scalar>(gain + i) * ConstLanes<Scalar>(in + i);
    }
    if (const int64_t rest = x.columns - i; rest > 0) {
      sum += Tail(dy + i, rest) * Tail(gain + i, rest) * Tail(in + i, rest);
    }
    const Scalar pull = Fold(sum) * r * r * r / Scalar(x.columns);
    for (i = 0; i < x.columns; ++i) gain_gradient[i] += dy[i] * in[i] * r;
    for (i = 0; i < x.columns; ++i) dx[i] += dy[i] * gain[i] * r - in[i] * pull;
  }
}

template <typename Scalar>
void AttentionForward(const AttentionShape& shape, const Scalar* qkv, Scalar* probabilities,
                      Scalar* mixed) {
  const int64_t length = shape.sequence_length;
  const int64_t width = shape.head_count * shape.head_width;
  const Scalar scale = Scalar(1) / std::sqrt(Scalar(shape.head_width));
  for (int64_t s = 0; s < shape.sequence_count; ++s) {
    for (int64_t h = 0; h < shape.head_count; ++h) {
      const Scalar* base = qkv + s * length * 3 * width + h * shape.head_width;
      const View<const Scalar> q{base, length, shape.head_width, 3 * width};
      const View<const Scalar> k{base + width, length, shape.head_width, 3 * width};
      const View<const Scalar> v{base + 2 * width, length, shape.head_width, 3 * width};
      Scalar* weights = probabilities + (s * shape.head_count + h) * length * length;
      MatMulTransposedB<Scalar>(q, k, {weights, length, length, length}, Write::kOverwrite);
      for (int64_t i = 0; i < length; ++i) {
        Scalar* row = weights + i * length;
        const Scalar shift = MaximumOf(row, i + 1) * scale;
        ScaleBy(row, i + 1, Scalar(1) / ExpAndSum(row, i + 1, scale, shift));
        for (int64_t j = i + 1; j < length; ++j) row[j] = Scalar(0);
      }
      Scalar* to = mixed + s * length * width + h * shape.head_width;
      MatMul<Scalar>({weights, length, length, length}, v, {to, length, shape.head_width, width},
                     Write::kOverwrite);
    }
  }
}

template <typename Scalar>
void AttentionBackward(const AttentionShape& shape, const Scalar* qkv, const Scalar* probabilities,
                       const Scalar* mixed_gradient, Scalar* scratch, Scalar* qkv_gradient) {
  const int64_t length = shape.sequence_length;
  const int64_t head = shape.head_width;
  const int64_t width = shape.head_count * head;
  const Scalar scale = Scalar(1) / std::sqrt(Scalar(head));
  const View<Scalar> slopes{scratch, length, length, length};
  const View<const Scalar> const_slopes{scratch, length, length, length};
  for (int64_t s = 0; s < shape.sequence_count; ++s) {
    for (int64_t h = 0; h < shape.head_count; ++h) {
      const int64_t at = s * length * 3 * width + h * head;
      const View<const Scalar> q{qkv + at, length, head, 3 * width};
      const View<const Scalar> k{qkv + at + width, length, head, 3 * width};
      const View<const Scalar> v{qkv + at + 2 * width, length, head, 3 * width};
      const View<const Scalar> weights{probabilities + (s * shape.head_count + h) * length * length,
                                       length, length, length};
      const View<const Scalar> out{mixed_gradient + s * length * width + h * head, length, head,
                                   width};
      Scalar* to = qkv_gradient + at;
      MatMulTransposedA<Scalar>(weights, out, {to + 2 * width, length, head, 3 * width},
                                Write::kOverwrite);
      MatMulTransposedB<Scalar>(out, v, slopes, Write::kOverwrite);
      for (int64_t i = 0; i < length; ++i) {
        const Scalar* p = weights.data + i * length;
        Scalar* d = scratch + i * length;
        const Scalar mean = Dot(p, d, i + 1);
        for (int64_t j = 0; j <= i; ++j) d[j] = p[j] * (d[j] - mean) * scale;
        for (int64_t j = i + 1; j < length; ++j) d[j] = Scalar(0);
      }
      MatMul<Scalar>(const_slopes, k, {to, length, head, 3 * width}, Write::kOverwrite);
      MatMulTransposedA<Scalar>(const_slopes, q, {to + width, length, head, 3 * width},
                                Write::kOverwrite);
    }
  }
}

template <typename Scalar>
void GeluForward(const Scalar* x, Scalar* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes<Scalar> in = ConstLanes<Scalar>(x + i);
    MutableLanes<Scalar>(out + i) = in * GeluGate<Scalar>(in);
  }
  if (i < count) {
    const Lanes<Scalar> in = Tail(x + i, count - i);
    const Lanes<Scalar> value = in * GeluGate<Scalar>(in);
    for (int64_t j = 0; i + j < count; ++j) out[i + j] = value[j];
  }
}

template <typename Scalar>
void GeluBackward(const Scalar* x, Scalar* gradient, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    MutableLanes<Scalar>(gradient + i) *= GeluSlope<Scalar>(ConstLanes<Scalar>(x + i));
  }
  if (i < count) {
    const Lanes<Scalar> slope = GeluSlope<Scalar>(Tail(x + i, count - i));
    for (int64_t j = 0; i + j < count; ++j) gradient[i + j] *= slope[j];
  }
}

template <typename Scalar>
double CrossEntropyForward(View<Scalar> logits, const uint8_t* targets) {
  double loss = 0;
  for (int64_t row = 0; row < logits.rows; ++row) {
    Scalar* x = logits.data + row * logits.stride;
    const Scalar shift = MaximumOf(x, logits.columns);
    const Scalar target = x[targets[row]];
    const Scalar sum = ExpAndSum(x, logits.columns, Scalar(1), shift);
    ScaleBy(x, logits.columns, Scalar(1) / sum);
    loss += double(LogOf(sum)) - (double(target) - double(shift));
  }
  return loss;
}

template <typename Scalar>
void CrossEntropyBackward(View<Scalar> probabilities, const uint8_t* targets, Scalar scale) {
  for (int64_t row = 0; row < probabilities.rows; ++row) {
    Scalar* p = probabilities.data + row * probabilities.stride;
    p[targets[row]] -= Scalar(1);
    ScaleBy(p, probabilities.columns, scale);
  }
}

template <typename Scalar>
double SquareSum(const Scalar* x, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += double(x[i + j]) * double(x[i + j]);
  }
  for (int64_t j = 0; i + j < count; ++j) lanes[j] += double(x[i + j]) * double(x[i + j]);
  return Fold<double>(Eigen::Map<const Lanes<double>, Eigen::Unaligned>(lanes));
}

template <typename Scalar>
void AdamWUpdate(const AdamWCoefficients<Scalar>& c, const Scalar* __restrict gradients,
                 Scalar* __restrict parameters, Scalar* __restrict m, Scalar* __restrict v,
                 int64_t count) {
  const AdamWCoefficients<Scalar> k = c;
  for (int64_t i = 0; i < count; ++i) {
    const Scalar g = gradients[i] * k.gradient_scale;
    m[i] = k.beta1 * m[i] + (Scalar(1) - k.beta1) * g;
    v[i] = k.beta2 * v[i] + (Scalar(1) - k.beta2) * g * g;
    const Scalar move = k.step_size * m[i] / (std::sqrt(v[i] * k.variance_scale) + k.epsilon);
    parameters[i] = parameters[i] * k.keep - move;
  }
}

#define EVERSTEP_INSTANTIATE(S)                                                                    \
  template void MatMul<S>(View<const S>, View<const S>, View<S>, Write);                           \
  template void MatMulTransposedA<S>(View<const S>, View<const S>, View<S>, Write);                \
  template void MatMulTransposedB<S>(View<const S>, View<const S>, View<S>, Write);                \
  template void AddTo<S>(const S*, S*, int64_t);                                                   \
  template void RmsNormForward<S>(View<const S>, const S*, S*, S*);                                \
  template void RmsNormBackward<S>(View<const S>, const S*, const S*, const S*, S*, S*);           \
  template void AttentionForward<S>(const AttentionShape&, const S*, S*, S*);                      \
  template void AttentionBackward<S>(const AttentionShape&, const S*, const S*, const S*, S*, S*); \
  template void GeluForward<S>(const S*, S*, int64_t);                                             \
  template void GeluBackward<S>(const S*, S*, int64_t);                                            \
  template double CrossEntropyForward<S>(View<S>, const uint8_t*);                                 \
  template void CrossEntropyBackward<S>(View<S>, const uint8_t*, S);                               \
  template double SquareSum<S>(const S*, int64_t);                                                 \
  template void AdamWUpdate<S>(const AdamWCoefficients<S>&, const S*, S*, S*, S*, int64_t)

EVERSTEP_INSTANTIATE(float);
EVERSTEP_INSTANTIATE(double);

}  // namespace everstep::examples::kernels
