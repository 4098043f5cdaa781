// A stand-in for libcuda.so.1 with one GPU, for machines where only the driver's library is there. Built by the tests.
#include <cstddef>
#include <cstdio>

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index + 40;  // a handle, not an index
  return 0;
}
int cuDeviceGetName(char* text, int bytes, int device) {
  if (device != 40) return 101;
  snprintf(text, static_cast<size_t>(bytes), "NVIDIA Fake 8000");
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = size_t{24} << 30;
  return device == 40 ? 0 : 101;
}
int cuDeviceGetUuid(unsigned char (*uuid)[16], int device) {
  for (int i = 0; i < 16; ++i) (*uuid)[i] = static_cast<unsigned char>(i * 16 + i);
  return device == 40 ? 0 : 101;
}

}  // extern "C"
