#include "worker/collective/exact/fixed_point.h"

#include <bit>

namespace everstep::collective {
namespace {

#include "worker/collective/exact/fixed_point_loops.inc"

template <typename T>
void Convert(const int64_t* sums, T* out, size_t count, double scale, double divisor) {
  for (size_t i = 0; i < count; ++i)
    out[i] = static_cast<T>(static_cast<double>(sums[i]) * scale / divisor);
}

}  // namespace

#ifdef EVERSTEP_HAVE_AVX512_LOOPS
FixedPointLoops LoopsForAvx512(DataType type);
#endif

FixedPointLoops LoopsFor(DataType type) {
#ifdef EVERSTEP_HAVE_AVX512_LOOPS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return LoopsForAvx512(type);
  }
#endif
  return Loops(type);
}

void ConvertToFloat(const int64_t* sums, float* out, size_t count, double scale, double divisor) {
  Convert(sums, out, count, scale, divisor);
}

void ConvertToDouble(const int64_t* sums, double* out, size_t count, double scale, double divisor) {
  Convert(sums, out, count, scale, divisor);
}

}  // namespace everstep::collective
