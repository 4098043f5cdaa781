#include "worker/io/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace everstep {
namespace {

template <typename T>
T Load(const T& field) {
  // The rank's store races with this load by design; atomic_ref wants a non-const object but only loads.
  return std::atomic_ref<T>(const_cast<T&>(field)).load(std::memory_order_relaxed);
}

Progress Decode(const ProgressPage& page) {
  Progress progress;
  const uint8_t phase = Load(page.phase);
  progress.phase = phase <= static_cast<uint8_t>(RankPhase::kFinished) ? static_cast<RankPhase>(phase)
                                                                       : RankPhase::kStarting;
  progress.memory_valid = Load(page.memory_valid) != 0;
  progress.applied = StateId{Step(Load(page.applied_step)), Generation(Load(page.applied_generation))};
  progress.generation = Generation(Load(page.generation));
  progress.vote_passed = Step(Load(page.vote_passed));
  progress.collective_sequence = Load(page.collective_sequence);
  return progress;
}

}  // namespace

Progress ReadProgressPage(const ProgressPage& page, bool writer_gone) {
  constexpr int kAttemptsMax = 1000;
  Progress progress;
  for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
    const uint32_t before = page.version.load(std::memory_order_acquire);
    if ((before & 1) != 0) {
      if (writer_gone) break;
      continue;
    }
    progress = Decode(page);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (page.version.load(std::memory_order_relaxed) == before) return progress;
  }
  progress = Decode(page);
  progress.memory_valid = false;
  return progress;
}

Result<UniqueFd> CreateGrowingMemory(const std::string& name) {
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ResourceExhausted(std::string("cannot create shared memory: ") + strerror(errno));
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return Internal(std::string("cannot seal shared memory: ") + strerror(errno));
  }
  return fd;
}

Result<ProgressPageMapping> ProgressPageMapping::Create() {
  UniqueFd fd(memfd_create("everstep-progress", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ResourceExhausted(std::string("cannot create a progress page: ") + strerror(errno));
  constexpr off_t kBytes = 4096;
  if (ftruncate(fd.get(), kBytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ResourceExhausted(std::string("cannot size a progress page: ") + strerror(errno));
  }
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return ResourceExhausted(std::string("cannot map a progress page: ") + strerror(errno));
  // Zeroed memory is a valid page: version 0, phase kStarting, memory not valid.
  return ProgressPageMapping(std::move(fd), static_cast<ProgressPage*>(memory));
}

ProgressPageMapping::ProgressPageMapping(ProgressPageMapping&& other) noexcept
    : fd_(std::move(other.fd_)), page_(std::exchange(other.page_, nullptr)) {}

ProgressPageMapping& ProgressPageMapping::operator=(ProgressPageMapping&& other) noexcept {
  if (this != &other) {
    if (page_ != nullptr) munmap(page_, 4096);
    fd_ = std::move(other.fd_);
    page_ = std::exchange(other.page_, nullptr);
  }
  return *this;
}

ProgressPageMapping::~ProgressPageMapping() {
  if (page_ != nullptr) munmap(page_, 4096);
}

}  // namespace everstep
