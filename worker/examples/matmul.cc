// The order of a sum must not depend on threads.
#define EIGEN_DONT_PARALLELIZE
#define EIGEN_NO_DEBUG

#include "worker/examples/matmul.h"

#include <Eigen/Core>

namespace everstep::examples::kernels::products {
namespace {

// Matrix products cut their operands by cache size, and the cut is part of the order of summation.
// Fixed sizes make the results equal on every processor of one instruction set; the values suit a
// 32 KiB / 1 MiB machine. At first use rather than at start-up: nothing here may run before the
// processor was checked.
void FixCacheSizes() {
  [[maybe_unused]] static const bool once = [] {
    Eigen::setCpuCacheSizes(32 * 1024, 1024 * 1024, 4 * 1024 * 1024);
    return true;
  }();
}

template <typename Scalar>
using RowMajor = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename Scalar>
using ConstMap = Eigen::Map<const RowMajor<Scalar>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <typename Scalar>
using MutableMap = Eigen::Map<RowMajor<Scalar>, Eigen::Unaligned, Eigen::OuterStride<>>;

template <typename Scalar>
ConstMap<Scalar> Of(const View<const Scalar>& v) {
  return ConstMap<Scalar>(v.data, v.rows, v.columns, Eigen::OuterStride<>(v.stride));
}

template <typename Scalar, typename A, typename B>
void Product(const A& a, const B& b, const View<Scalar>& out, Write write) {
  FixCacheSizes();
  MutableMap<Scalar> target(out.data, out.rows, out.columns, Eigen::OuterStride<>(out.stride));
  if (write == Write::kOverwrite) {
    target.noalias() = a * b;
  } else {
    target.noalias() += a * b;
  }
}

}  // namespace

template <typename Scalar>
void MatMul(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  Product<Scalar>(Of(a), Of(b), out, write);
}
template <typename Scalar>
void MatMulTransposedA(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  Product<Scalar>(Of(a).transpose(), Of(b), out, write);
}
template <typename Scalar>
void MatMulTransposedB(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write) {
  Product<Scalar>(Of(a), Of(b).transpose(), out, write);
}

#define EVERSTEP_INSTANTIATE(S)                                                     \
  template void MatMul<S>(View<const S>, View<const S>, View<S>, Write);            \
  template void MatMulTransposedA<S>(View<const S>, View<const S>, View<S>, Write); \
  template void MatMulTransposedB<S>(View<const S>, View<const S>, View<S>, Write)

EVERSTEP_INSTANTIATE(float);
EVERSTEP_INSTANTIATE(double);

}  // namespace everstep::examples::kernels::products
