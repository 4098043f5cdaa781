// A rank's staging memory, written as worker/wire/staging_layout.h says: what the rank library does, small enough to
// be bent by tests.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <span>

#include <gtest/gtest.h>

#include "checkpoint/io/memory_region.h"
#include "checkpoint/store/digest.h"
#include "proto/base/ids.h"
#include "proto/model/rank_messages.h"
#include "worker/wire/staging_layout.h"

namespace everstep::checkpoint {

class StagingWriter {
 public:
  static constexpr size_t kRegionBytes = 4u << 20;

  explicit StagingWriter(ProcessId process, unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING)
      : fd_(memfd_create("test-staging", flags)) {
    EXPECT_TRUE(fd_.valid());
    EXPECT_EQ(ftruncate(fd_.get(), static_cast<off_t>(kBytes)), 0);
    memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    EXPECT_NE(memory_, MAP_FAILED);
    block().magic = kStagingMagic;
    block().version = kStagingVersion;
    block().slot_count = kStagingSlots;
    block().process = process.value;
  }
  ~StagingWriter() { munmap(memory_, kBytes); }
  StagingWriter(const StagingWriter&) = delete;
  StagingWriter& operator=(const StagingWriter&) = delete;

  StagingSuperblock& block() { return *static_cast<StagingSuperblock*>(memory_); }
  StagingSlot& slot(uint32_t index) { return block().slots[index]; }
  std::byte* region(uint32_t index) {
    return static_cast<std::byte*>(memory_) + kStagingHeaderBytes + index * kRegionBytes;
  }
  UniqueFd Descriptor() const { return fd_.Duplicate(); }
  const UniqueFd& fd() const { return fd_; }

  void Begin(uint32_t index) { slot(index).sequence.fetch_add(1, std::memory_order_release); }
  void End(uint32_t index) { slot(index).sequence.fetch_add(1, std::memory_order_release); }

  // A whole snapshot; returns what the rank says about it.
  SnapshotStaged Stage(uint32_t index, StateId state, ShardIndex shard, std::span<const std::byte> bytes) {
    EXPECT_LE(bytes.size(), kRegionBytes);
    Begin(index);
    std::memcpy(region(index), bytes.data(), bytes.size());
    StagingSlot& header = slot(index);
    header.state_step = state.step.value;
    header.state_generation = state.generation.value;
    header.generation = state.generation.value;
    header.shard = shard.value;
    header.byte_offset = kStagingHeaderBytes + index * kRegionBytes;
    header.byte_count = bytes.size();
    const Digest128 digest = DigestOf(bytes);
    header.digest[0] = digest[0];
    header.digest[1] = digest[1];
    End(index);
    SnapshotStaged staged;
    staged.state = state;
    staged.shard = shard;
    staged.slot = index;
    staged.bytes = bytes.size();
    TensorInfo tensor;
    tensor.name = "weights";
    tensor.dtype = "u8";
    tensor.global_shape = {static_cast<int64_t>(bytes.size())};
    tensor.bytes = bytes.size();
    staged.tensors = {tensor};
    return staged;
  }

 private:
  static constexpr size_t kBytes = kStagingHeaderBytes + kStagingSlots * kRegionBytes;
  UniqueFd fd_;
  void* memory_ = nullptr;
};

}  // namespace everstep::checkpoint
