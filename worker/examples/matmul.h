// The matrix products behind kernels.h, called by kernels.cc only. A file of its own because
// sanitizers leave it alone, as they would a linked BLAS: instrumented, they make a training step
// 60 times slower. Pure functions, any thread.
#pragma once

#include "worker/examples/kernels.h"

namespace everstep::examples::kernels::products {

template <typename Scalar>
void MatMul(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);
template <typename Scalar>
void MatMulTransposedA(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);
template <typename Scalar>
void MatMulTransposedB(View<const Scalar> a, View<const Scalar> b, View<Scalar> out, Write write);

}  // namespace everstep::examples::kernels::products
