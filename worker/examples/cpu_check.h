// Refuses, with words instead of SIGILL, a processor that lacks what kernels.cc was compiled for.
// The first call of every program that uses the example model; any thread.
#pragma once

#include "proto/base/status.h"

namespace everstep::examples {

// FAILED_PRECONDITION: the processor lacks AVX2 or FMA and the build assumes them
// (EVERSTEP_NATIVE_ARCH).
Status CheckProcessor();

}  // namespace everstep::examples
