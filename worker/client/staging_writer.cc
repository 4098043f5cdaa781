#include "worker/client/staging_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "worker/client/progress_writer.h"
#include "worker/wire/rank_codec.h"

namespace everstep::client {
namespace {

constexpr uint64_t kPageBytes = 4096;
uint64_t AlignUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

StagingWriter::~StagingWriter() {
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
  if (superblock_ != nullptr) munmap(superblock_, kStagingHeaderBytes);
  if (fd_ >= 0) close(fd_);
}

Status StagingWriter::Open(int fd, ProcessId process, uint64_t bytes_max) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  fd_ = fd;
  bytes_max_ = bytes_max;
  struct stat status{};
  if (fstat(fd, &status) != 0) return Unavailable(std::string("EVERSTEP_STAGING_FD: ") + std::strerror(errno));
  file_bytes_ = static_cast<uint64_t>(status.st_size);
  if (file_bytes_ < kStagingHeaderBytes) {
    if (ftruncate(fd, kStagingHeaderBytes) != 0) {
      return Unavailable(std::string("EVERSTEP_STAGING_FD can't grow: ") + std::strerror(errno));
    }
    file_bytes_ = kStagingHeaderBytes;
  }
  void* mapped = mmap(nullptr, kStagingHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return Unavailable(std::string("EVERSTEP_STAGING_FD: ") + std::strerror(errno));
  superblock_ = new (mapped) StagingSuperblock{};
  superblock_->process = process.value;
  superblock_->slot_count = kStagingSlots;
  superblock_->version = kStagingVersion;
  std::atomic_thread_fence(std::memory_order_release);
  superblock_->magic = kStagingMagic;
  return OkStatus();
}

void StagingWriter::Keep(Step protected_step) {
  const std::lock_guard lock(mutex_);
  protected_step_ = protected_step;
}

void StagingWriter::Discard(StateId state) {
  const std::lock_guard lock(mutex_);
  for (Held& held : held_) {
    if (held.state.step > state.step || (held.state.step == state.step && held.state != state)) held.valid = false;
  }
}

int StagingWriter::FreeSlot() const {
  // An empty one; or the oldest that is neither of the two newest nor at or above the watermark.
  int newest = -1, second = -1, oldest = -1;
  for (int i = 0; i < static_cast<int>(held_.size()); ++i) {
    const Held& held = held_[static_cast<size_t>(i)];
    if (!held.valid) return i;
    const auto below = [&](int other) { return other < 0 || held_[static_cast<size_t>(other)].state < held.state; };
    if (below(newest)) {
      second = std::exchange(newest, i);
    } else if (below(second)) {
      second = i;
    }
    if (oldest < 0 || held.state < held_[static_cast<size_t>(oldest)].state) oldest = i;
  }
  if (oldest < 0 || oldest == newest || oldest == second) return -1;
  return held_[static_cast<size_t>(oldest)].state.step < protected_step_ ? oldest : -1;
}

Status StagingWriter::Map(uint64_t bytes) {
  if (base_ != nullptr && mapped_bytes_ >= bytes) return OkStatus();
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (mapped == MAP_FAILED) {
    base_ = nullptr;
    mapped_bytes_ = 0;
    return ResourceExhausted(std::string("staging memory can't be mapped: ") + std::strerror(errno));
  }
  base_ = static_cast<std::byte*>(mapped);
  mapped_bytes_ = bytes;
  return OkStatus();
}

Status StagingWriter::Place(StagingSlot& slot, uint64_t bytes) {
  if (slot.region_bytes < bytes) {
    const uint64_t region = AlignUp(bytes, kPageBytes);
    if (file_bytes_ + region > bytes_max_) {
      return ResourceExhausted("staging memory of " + std::to_string(bytes_max_) + " bytes is too small for another " +
                               std::to_string(region));
    }
    // The region it had is given back to the system; the file keeps its length.
    if (slot.region_bytes > 0) {
      fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(slot.region_offset),
                static_cast<off_t>(slot.region_bytes));
    }
    if (ftruncate(fd_, static_cast<off_t>(file_bytes_ + region)) != 0) {
      return ResourceExhausted(std::string("staging memory can't grow: ") + std::strerror(errno));
    }
    slot.region_offset = file_bytes_;
    slot.region_bytes = region;
    file_bytes_ += region;
  }
  return Map(file_bytes_);
}

Result<SnapshotStaged> StagingWriter::Take(const StateRegistry& registry, StateId state, ShardIndex shard,
                                           Generation generation) {
  if (!open()) return FailedPrecondition("this rank has no staging memory");
  int index = -1;
  {
    const std::lock_guard lock(mutex_);
    index = FreeSlot();
    if (index >= 0) held_[static_cast<size_t>(index)].valid = false;
  }
  if (index < 0) return ResourceExhausted("no staging slot is free");
  StagingSlot& slot = superblock_->slots[index];

  const std::vector<RegisteredTensor> tensors = registry.Tensors();
  SnapshotStaged staged{state, shard, static_cast<uint32_t>(index), registry.buffer_bytes(), {}};
  for (const RegisteredTensor& tensor : tensors) staged.tensors.push_back(tensor.info);
  const std::string table = EncodeFrame(RankToAgent(staged));
  if (table.empty()) return ResourceExhausted("the shard's tensor table exceeds the limits of the wire");

  const uint64_t sequence = slot.sequence.load(std::memory_order_relaxed);
  const uint64_t writing = sequence | 1;
  slot.sequence.store(writing, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  const uint64_t table_at = AlignUp(staged.bytes, 64);
  EVERSTEP_RETURN_IF_ERROR(Place(slot, table_at + table.size()));  // the slot stays odd: nothing whole is in it

  std::byte* const buffer = base_ + slot.region_offset;
  copier_.Reset();
  uint64_t at = 0;
  for (const RegisteredTensor& tensor : tensors) {
    copier_.Zeros(buffer + at, tensor.info.buffer_offset - at);
    copier_.Copy(tensor.data, buffer + tensor.info.buffer_offset, tensor.info.bytes);
    at = tensor.info.buffer_offset + tensor.info.bytes;
  }
  copier_.Zeros(buffer + at, staged.bytes - at);
  std::memcpy(buffer + table_at, table.data(), table.size());

  const Digest128 digest = copier_.Finish();
  slot.state_step = state.step.value;
  slot.state_generation = state.generation.value;
  slot.generation = generation.value;
  slot.shard = shard.value;
  slot.tensor_count = static_cast<uint32_t>(tensors.size());
  slot.byte_offset = slot.region_offset;
  slot.byte_count = staged.bytes;
  slot.table_offset = slot.region_offset + table_at;
  slot.table_bytes = table.size();
  slot.digest[0] = digest[0];
  slot.digest[1] = digest[1];
  slot.taken_boottime_ns = BoottimeNanoseconds();
  slot.sequence.store(writing + 1, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  held_[static_cast<size_t>(index)] = {true, state};
  return staged;
}

}  // namespace everstep::client
