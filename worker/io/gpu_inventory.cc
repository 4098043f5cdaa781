#include "worker/io/gpu_inventory.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>

namespace everstep {
namespace {

constexpr int kDevicesMax = 256;
constexpr unsigned kTextBytes = 256;

// An opened library; closed at the end of the scope.
class Library {
 public:
  explicit Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  bool opened() const { return handle_ != nullptr; }
  // True when the symbol is there.
  template <typename Function>
  bool Load(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    return function != nullptr;
  }

 private:
  void* handle_;
};

std::string Text(const char* buffer) { return std::string(buffer, strnlen(buffer, kTextBytes)); }

Device Gpu(int index, std::string model, uint64_t memory_bytes, std::string uuid) {
  Device device;
  device.index = DeviceIndex(index);
  device.kind = DeviceKind::kGpu;
  device.model = std::move(model);
  device.memory_bytes = memory_bytes;
  device.uuid = std::move(uuid);
  return device;
}

// Layouts and names below are those of NVML's and CUDA's stable C interfaces. Zero means success in both.
struct NvmlMemory {
  unsigned long long total, free, used;  // NOLINT: the library's own types
};
using NvmlDevice = struct NvmlDeviceOpaque*;

// nullopt: the library is not there, or is not one that we know how to ask.
std::optional<std::vector<Device>> AskManagement(const std::string& name) {
  Library library(name);
  if (!library.opened()) return std::nullopt;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*count)(unsigned*) = nullptr;
  int (*at)(unsigned, NvmlDevice*) = nullptr;
  int (*model)(NvmlDevice, char*, unsigned) = nullptr;
  int (*uuid)(NvmlDevice, char*, unsigned) = nullptr;
  int (*memory)(NvmlDevice, NvmlMemory*) = nullptr;
  if (!library.Load(init, "nvmlInit_v2") || !library.Load(shutdown, "nvmlShutdown") ||
      !library.Load(count, "nvmlDeviceGetCount_v2") || !library.Load(at, "nvmlDeviceGetHandleByIndex_v2") ||
      !library.Load(model, "nvmlDeviceGetName") || !library.Load(uuid, "nvmlDeviceGetUUID") ||
      !library.Load(memory, "nvmlDeviceGetMemoryInfo")) {
    return std::nullopt;
  }
  if (init() != 0) return std::nullopt;
  std::vector<Device> devices;
  unsigned found = 0;
  if (count(&found) != 0) found = 0;
  for (unsigned i = 0; i < std::min<unsigned>(found, kDevicesMax); ++i) {
    NvmlDevice device = nullptr;
    char model_text[kTextBytes] = {}, uuid_text[kTextBytes] = {};
    NvmlMemory bytes{};
    // One that has fallen off the bus can't be asked; the others keep their order.
    if (at(i, &device) != 0 || model(device, model_text, kTextBytes) != 0) continue;
    if (uuid(device, uuid_text, kTextBytes) != 0) uuid_text[0] = '\0';
    if (memory(device, &bytes) != 0) bytes = {};
    devices.push_back(Gpu(static_cast<int>(devices.size()), Text(model_text), bytes.total, Text(uuid_text)));
  }
  shutdown();
  return devices;
}

std::string UuidText(const unsigned char (&bytes)[16]) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", bytes[i]);
    text += digits;
  }
  return text;
}

std::optional<std::vector<Device>> AskDriver(const std::string& name) {
  Library library(name);
  if (!library.opened()) return std::nullopt;
  int (*init)(unsigned) = nullptr;
  int (*count)(int*) = nullptr;
  int (*at)(int*, int) = nullptr;
  int (*model)(char*, int, int) = nullptr;
  int (*memory)(size_t*, int) = nullptr;
  int (*uuid)(unsigned char (*)[16], int) = nullptr;
  if (!library.Load(init, "cuInit") || !library.Load(count, "cuDeviceGetCount") || !library.Load(at, "cuDeviceGet") ||
      !library.Load(model, "cuDeviceGetName") || !library.Load(memory, "cuDeviceTotalMem_v2") ||
      !library.Load(uuid, "cuDeviceGetUuid")) {
    return std::nullopt;
  }
  if (init(0) != 0) return std::nullopt;
  std::vector<Device> devices;
  int found = 0;
  if (count(&found) != 0) found = 0;
  for (int i = 0; i < std::min(found, kDevicesMax); ++i) {
    int device = 0;
    char model_text[kTextBytes] = {};
    unsigned char uuid_bytes[16] = {};
    size_t bytes = 0;
    if (at(&device, i) != 0 || model(model_text, static_cast<int>(kTextBytes) - 1, device) != 0) continue;
    if (memory(&bytes, device) != 0) bytes = 0;
    std::string uuid_text = uuid(&uuid_bytes, device) == 0 ? UuidText(uuid_bytes) : "";
    devices.push_back(Gpu(static_cast<int>(devices.size()), Text(model_text), bytes, std::move(uuid_text)));
  }
  return devices;
}

}  // namespace

std::vector<Device> FindGpus(const GpuLibraries& libraries) {
  if (auto devices = AskManagement(libraries.management)) return std::move(*devices);
  if (auto devices = AskDriver(libraries.driver)) return std::move(*devices);
  return {};
}

}  // namespace everstep
