#include "worker/examples/cpu_check.h"

namespace everstep::examples {

Status CheckProcessor() {
#ifdef EVERSTEP_KERNELS_NEED_X86_64_V3
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2")) {
    return FailedPrecondition(
        "this processor has no AVX2, FMA or BMI2, for which the example model was compiled: "
        "build with -DEVERSTEP_NATIVE_ARCH=OFF");
  }
#endif
  return OkStatus();
}

}  // namespace everstep::examples
