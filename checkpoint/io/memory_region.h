// Bytes in anonymous shared memory (a memory file): filled once, then sealed by the kernel so that nobody, a rank
// that was given the descriptor included, can change or shrink them. Used by the keeper's threads. Thread-compatible
// until sealed, immutable and thread-safe after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "proto/base/status.h"

namespace everstep::checkpoint {

// Owns a file descriptor. Thread-compatible.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { Reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset();
  // Close-on-exec. Not valid when descriptors ran out.
  UniqueFd Duplicate() const;

 private:
  int fd_ = -1;
};

class MemoryRegion {
 public:
  // RESOURCE_EXHAUSTED: no memory or no descriptors.
  static Result<std::shared_ptr<MemoryRegion>> Create(uint64_t bytes);
  ~MemoryRegion();
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;

  // REQUIRES: not sealed.
  std::span<std::byte> writable();
  // No writes from here on, by anybody. RESOURCE_EXHAUSTED: the kernel refused (no address space).
  Status Seal();
  bool sealed() const { return sealed_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const UniqueFd& fd() const { return fd_; }

 private:
  MemoryRegion() = default;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool sealed_ = false;
};

}  // namespace everstep::checkpoint
