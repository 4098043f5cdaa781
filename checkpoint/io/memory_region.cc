#include "checkpoint/io/memory_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

namespace everstep::checkpoint {

void UniqueFd::Reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

UniqueFd UniqueFd::Duplicate() const { return UniqueFd(fcntl(fd_, F_DUPFD_CLOEXEC, 0)); }

Result<std::shared_ptr<MemoryRegion>> MemoryRegion::Create(uint64_t bytes) {
  std::shared_ptr<MemoryRegion> region(new MemoryRegion());
  const auto failed = [&](const char* what) {
    return ResourceExhausted(fmt::format("{} bytes of shared memory: {}: {}", bytes, what, std::strerror(errno)));
  };
  region->fd_ = UniqueFd(memfd_create("everstep-snapshot", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!region->fd_.valid()) return failed("memfd_create");
  if (ftruncate(region->fd_.get(), static_cast<off_t>(bytes)) != 0) return failed("ftruncate");
  region->size_ = bytes;
  if (bytes == 0) return region;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region->fd_.get(), 0);
  if (data == MAP_FAILED) return failed("mmap");
  region->data_ = static_cast<std::byte*>(data);
  return region;
}

MemoryRegion::~MemoryRegion() {
  if (data_ != nullptr) munmap(data_, size_);
}

std::span<std::byte> MemoryRegion::writable() {
  EVERSTEP_CHECK(!sealed_);
  return {data_, size_};
}

Status MemoryRegion::Seal() {
  EVERSTEP_CHECK(!sealed_);
  // The kernel refuses to seal against writes while a writable mapping exists.
  if (data_ != nullptr) munmap(data_, size_);
  data_ = nullptr;
  if (fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ResourceExhausted(fmt::format("seal shared memory: {}", std::strerror(errno)));
  }
  if (size_ > 0) {
    void* data = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (data == MAP_FAILED) return ResourceExhausted(fmt::format("map shared memory: {}", std::strerror(errno)));
    data_ = static_cast<std::byte*>(data);
  }
  sealed_ = true;
  return OkStatus();
}

}  // namespace everstep::checkpoint
