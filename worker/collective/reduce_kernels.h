// Element-wise reductions over host memory. Pure functions: for equal inputs the result is the same
// bits on every rank and machine of one build. Called by the algorithms, on the thread that runs
// the operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/collective/types.h"

namespace everstep::collective {

// into[i] = a[i] op b[i]; `into` may equal a or b. Operand order matters for NaN payloads and
// signed zeros, so callers keep it the same on all ranks.
using ReduceFunction = void (*)(void* into, const void* a, const void* b, size_t count);
// data[i] = data[i] / divisor
using DivideFunction = void (*)(void* data, size_t count, double divisor);

// REQUIRES: ReductionApplies(op, type). kAvg gives the sum; the division comes last, once, through
// DivisionFor.
ReduceFunction ReductionFor(ReduceOp op, DataType type);
// REQUIRES: IsFloatingPoint(type)
DivideFunction DivisionFor(DataType type);

// Conversions with round-to-nearest-even; NaN stays NaN.
float HalfToFloat(uint16_t half);
uint16_t FloatToHalf(float value);
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);

}  // namespace everstep::collective
