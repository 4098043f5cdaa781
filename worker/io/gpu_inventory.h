// The NVIDIA GPUs of this server, asked of the driver's own libraries, which are opened at run time: one binary serves
// machines with and without them. Called once by main, before anything else runs; blocking.
#pragma once

#include <string>
#include <vector>

#include "proto/model/server.h"

namespace everstep {

struct GpuLibraries {
  std::string management = "libnvidia-ml.so.1";  // asked first: it starts no context and needs no CUDA
  std::string driver = "libcuda.so.1";           // where only that is installed (some containers)
};

// In the library's order, indices from 0; name, memory and uuid of each. Empty where neither library can be opened, or
// the one that can has no device. At most 256.
std::vector<Device> FindGpus(const GpuLibraries& libraries = {});

}  // namespace everstep
