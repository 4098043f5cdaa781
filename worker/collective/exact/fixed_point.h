// The inner loops of exact reduction. Pure functions on host memory. Compiled twice, for the
// baseline and for AVX-512 (which has 64-bit conversions); all versions give the same bits, because
// every step is exact or rounds to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/collective/types.h"

namespace everstep::collective {

struct FixedPointLoops {
  // Largest |value| of a block as the bits of a double (sign cleared): NaN and infinity come out
  // above all others.
  uint64_t (*largest)(const void* values, size_t count);
  // sums[i] += round(values[i] * scale). REQUIRES: all values finite and |values[i] * scale| < 2^62
  void (*add)(int64_t* sums, const void* values, size_t count, double scale);
  // sums[i] = round(values[i] * scale); the same requirement
  void (*assign)(int64_t* sums, const void* values, size_t count, double scale);
};

// For the given element type, the fastest version this machine can run.
FixedPointLoops LoopsFor(DataType type);

// out[i] = sums[i] * scale / divisor, rounded to double and then once to the output.
void ConvertToFloat(const int64_t* sums, float* out, size_t count, double scale, double divisor);
void ConvertToDouble(const int64_t* sums, double* out, size_t count, double scale, double divisor);

}  // namespace everstep::collective
