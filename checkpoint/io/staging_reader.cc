#include "checkpoint/io/staging_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/store/digest.h"
#include "worker/wire/staging_layout.h"

namespace everstep::checkpoint {
namespace {

uint64_t FileBytes(int fd) {
  struct stat file{};
  return fstat(fd, &file) == 0 ? static_cast<uint64_t>(file.st_size) : 0;
}

const StagingSlot& SlotAt(const void* superblock, uint32_t index) {
  return static_cast<const StagingSuperblock*>(superblock)->slots[index];
}

}  // namespace

StagedView::~StagedView() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

Result<std::shared_ptr<StagingReader>> StagingReader::Open(UniqueFd fd, ProcessId process) {
  if (!fd.valid()) return FailedPrecondition("no staging memory was given");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || ((seals & F_SEAL_SHRINK) == 0 && fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0)) {
    return FailedPrecondition(fmt::format("staging memory can't be sealed against shrinking: {}",
                                          std::strerror(errno)));
  }
  if (FileBytes(fd.get()) < kStagingHeaderBytes) return FailedPrecondition("staging memory has no header yet");
  void* block = mmap(nullptr, kStagingHeaderBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (block == MAP_FAILED) return ResourceExhausted(fmt::format("map staging memory: {}", std::strerror(errno)));
  std::shared_ptr<StagingReader> reader(new StagingReader());
  reader->fd_ = std::move(fd);
  reader->superblock_ = block;
  const auto* superblock = static_cast<const StagingSuperblock*>(block);
  if (superblock->magic != kStagingMagic || superblock->version != kStagingVersion ||
      superblock->slot_count > kStagingSlots) {
    return FailedPrecondition("staging memory has another layout than this agent reads");
  }
  if (superblock->process != process.value) {
    return FailedPrecondition(fmt::format("staging memory belongs to process {}, not {}", superblock->process,
                                          process.value));
  }
  return reader;
}

StagingReader::~StagingReader() {
  if (superblock_ != nullptr) munmap(const_cast<void*>(superblock_), kStagingHeaderBytes);
}

Result<StagingReader::Slot> StagingReader::ReadSlot(uint32_t index) const {
  if (index >= kStagingSlots) return InvalidArgument(fmt::format("staging slot {} does not exist", index));
  const StagingSlot& header = SlotAt(superblock_, index);
  Slot slot;
  slot.index = index;
  slot.sequence = header.sequence.load(std::memory_order_acquire);
  if (slot.sequence == 0 || slot.sequence % 2 != 0) {
    return Aborted(fmt::format("staging slot {} is {}", index, slot.sequence == 0 ? "empty" : "being written"));
  }
  slot.state = {Step(header.state_step), Generation(header.state_generation)};
  slot.shard = ShardIndex(header.shard);
  slot.offset = header.byte_offset;
  slot.bytes = header.byte_count;
  slot.digest = {header.digest[0], header.digest[1]};
  if (!Unchanged(slot)) return Aborted(fmt::format("staging slot {} is being written", index));
  const uint64_t file_bytes = FileBytes(fd_.get());
  if (slot.offset < kStagingHeaderBytes || slot.offset > file_bytes || slot.bytes > file_bytes - slot.offset) {
    return DataLoss(fmt::format("staging slot {} points outside its file", index));
  }
  return slot;
}

bool StagingReader::Unchanged(const Slot& slot) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return SlotAt(superblock_, slot.index).sequence.load(std::memory_order_relaxed) == slot.sequence;
}

Result<std::shared_ptr<StagedView>> StagingReader::View(const Slot& slot) const {
  if (slot.bytes == 0) return std::make_shared<StagedView>(nullptr, 0, 0, 0);
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = slot.offset / page * page;
  const uint64_t skip = slot.offset - first;
  void* mapping = mmap(nullptr, skip + slot.bytes, PROT_READ, MAP_SHARED, fd_.get(), static_cast<off_t>(first));
  if (mapping == MAP_FAILED) return ResourceExhausted(fmt::format("map a staged slot: {}", std::strerror(errno)));
  return std::make_shared<StagedView>(mapping, skip + slot.bytes, skip, slot.bytes);
}

Result<StagingReader::Slot> StagingReader::Verify(uint32_t index, StateId state, ShardIndex shard) const {
  EVERSTEP_ASSIGN_OR_RETURN(const Slot slot, ReadSlot(index));
  if (slot.state != state || slot.shard != shard) {
    return Aborted(fmt::format("staging slot {} holds step {} of generation {} by now", index,
                               slot.state.step.value, slot.state.generation.value));
  }
  EVERSTEP_ASSIGN_OR_RETURN(const std::shared_ptr<StagedView> view, View(slot));
  const Digest128 digest = DigestOf(view->bytes());
  if (!Unchanged(slot)) return Aborted(fmt::format("staging slot {} was overwritten", index));
  if (digest != slot.digest) {
    return DataLoss(fmt::format("staging slot {} of step {} does not match its digest", index, state.step.value));
  }
  return slot;
}

}  // namespace everstep::checkpoint
