#include "worker/collective/host/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace everstep::collective {
namespace {

// One bit per descriptor number, set while we own it. Constant-initialised; descriptors above the
// limit are simply not closed in children. Only async-signal-safe calls are made in the child.
constexpr int kDescriptorLimit = 65536;
constinit std::array<std::atomic<uint64_t>, kDescriptorLimit / 64> g_owned{};
constinit std::once_flag g_registered;

void CloseAllInChild() {
  for (size_t word = 0; word < g_owned.size(); ++word) {
    uint64_t bits = g_owned[word].exchange(0, std::memory_order_relaxed);
    while (bits != 0) {
      const int bit = __builtin_ctzll(bits);
      bits &= bits - 1;
      ::close(static_cast<int>(word * 64) + bit);
    }
  }
}

}  // namespace

void CloseInForkedChildren(int fd) {
  if (fd >= kDescriptorLimit) return;
  std::call_once(g_registered, [] { ::pthread_atfork(nullptr, nullptr, &CloseAllInChild); });
  g_owned[static_cast<size_t>(fd) / 64].fetch_or(uint64_t{1} << (fd % 64),
                                                 std::memory_order_relaxed);
}

void StopClosingInForkedChildren(int fd) {
  if (fd >= kDescriptorLimit) return;
  g_owned[static_cast<size_t>(fd) / 64].fetch_and(~(uint64_t{1} << (fd % 64)),
                                                  std::memory_order_relaxed);
}

void Descriptor::Remember(int fd) { CloseInForkedChildren(fd); }

void Descriptor::ForgetAndClose(int fd) {
  if (fd < kDescriptorLimit) {
    const uint64_t bit = uint64_t{1} << (fd % 64);
    const uint64_t before =
        g_owned[static_cast<size_t>(fd) / 64].fetch_and(~bit, std::memory_order_relaxed);
    if ((before & bit) == 0) return;  // forked child: the number may be somebody else's by now
  }
  ::close(fd);
}

}  // namespace everstep::collective
