// A stand-in for libnvidia-ml.so.1 with the GPUs of EVERSTEP_FAKE_GPUS ("2": two good ones, "3!1": three, of which the one
// with index 1 has fallen off the bus). Built by the tests and opened like the real one; keeps no state.
#include <cstdio>
#include <cstdlib>

namespace {
struct Memory {
  unsigned long long total, free, used;
};
int Broken() {
  const char* spec = getenv("EVERSTEP_FAKE_GPUS");
  for (const char* c = spec; c != nullptr && *c != '\0'; ++c) {
    if (*c == '!') return atoi(c + 1);
  }
  return -1;
}
long IndexOf(void* device) { return reinterpret_cast<long>(device) - 1; }
}  // namespace

extern "C" {

int nvmlInit_v2() { return getenv("EVERSTEP_FAKE_GPUS") != nullptr ? 0 : 9; }  // 9: no driver is loaded
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(atoi(getenv("EVERSTEP_FAKE_GPUS")));
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (static_cast<int>(index) == Broken()) return 15;
  *device = reinterpret_cast<void*>(static_cast<long>(index) + 1);
  return 0;
}
int nvmlDeviceGetName(void*, char* text, unsigned bytes) {
  snprintf(text, bytes, "NVIDIA Fake 9000");
  return 0;
}
int nvmlDeviceGetUUID(void* device, char* text, unsigned bytes) {
  snprintf(text, bytes, "GPU-00000000-0000-0000-0000-%012ld", IndexOf(device));
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 1024ull * 1024 * 1024 * static_cast<unsigned long long>(10 + IndexOf(device));
  memory->free = memory->total;
  memory->used = 0;
  return 0;
}

}  // extern "C"
