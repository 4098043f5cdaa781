// Snapshots and directories for the tests of stores, transfers and the keeper.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/store/digest.h"
#include "checkpoint/store/snapshot_store.h"
#include "proto/base/prng.h"

namespace everstep::checkpoint {

struct Sample {
  SnapshotInfo info;
  std::vector<TensorInfo> tensors;
  std::vector<std::byte> bytes;
};

// Random bytes; the same (seed, size) gives the same ones.
inline std::vector<std::byte> RandomBytes(uint64_t seed, size_t size) {
  Prng random(seed);
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    if (i % 8 == 0) {
      const uint64_t word = random.Next();
      for (size_t k = 0; k < 8 && i + k < size; ++k) bytes[i + k] = static_cast<std::byte>(word >> (8 * k));
    }
  }
  return bytes;
}

inline Sample SampleOf(int64_t step, std::vector<std::byte> bytes, int32_t shard = 0, uint64_t generation = 1) {
  Sample sample;
  sample.bytes = std::move(bytes);
  sample.info.state = {Step(step), Generation(generation)};
  sample.info.shard = ShardIndex(shard);
  sample.info.tier = SnapshotTier::kStored;
  sample.info.server = ServerId("s0");
  sample.info.bytes = sample.bytes.size();
  sample.info.digest = DigestOf(sample.bytes);
  TensorInfo tensor;
  tensor.name = "layer0.weight";
  tensor.dtype = "u8";
  tensor.global_shape = {static_cast<int64_t>(sample.bytes.size())};
  tensor.bytes = sample.bytes.size();
  sample.tensors = {tensor};
  return sample;
}

// A directory that goes away with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "everstep-test-XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace everstep::checkpoint
