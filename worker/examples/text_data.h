// Text as training data: a file or a folder read as bytes, split into training and validation
// parts, and the rule that says which bytes a micro-batch holds. Trainers load once at start;
// afterwards immutable, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "worker/examples/transformer.h"

namespace everstep::examples {

inline constexpr const char* kDefaultDataPath = "/usr/share/common-licenses";
inline constexpr int64_t kTextBytesMax = int64_t{1} << 30;
inline constexpr int64_t kTextFileCountMax = 100'000;

class TextData {
 public:
  // `path`: a file, or a folder whose files are read in the order of their paths, recursively.
  // Links are followed and each file is read once; unreadable and binary ones (with a zero byte)
  // inside a folder are skipped and counted. The last twentieth of the bytes is for validation.
  // NOT_FOUND: no such path. INVALID_ARGUMENT: no text there, or too little for one sequence in
  // either part. PERMISSION_DENIED: the path itself cannot be read. RESOURCE_EXHAUSTED: more than
  // the limits above. Each message names the path and the remedy.
  static Result<TextData> Load(const std::string& path, int64_t sequence_length);
  // The same split for bytes already in memory; `name` stands for the path in messages.
  static Result<TextData> FromBytes(std::string bytes, const std::string& name,
                                    int64_t sequence_length);

  int64_t sequence_length() const { return sequence_length_; }
  int64_t file_count() const { return file_count_; }
  int64_t skipped_file_count() const { return skipped_file_count_; }
  int64_t train_bytes() const { return train_bytes_; }
  int64_t validation_bytes() const { return static_cast<int64_t>(bytes_.size()) - train_bytes_; }
  // XXH3-128 over all bytes, in hex: equal on every rank that trains on equal data.
  const std::string& digest() const { return digest_; }

  // Where the sequences of one micro-batch start. A pure function of its arguments and the training
  // part's size, never of who computes it: hence exactly-once data through any change of
  // membership.
  std::vector<int64_t> SampleOffsets(uint64_t seed, Step step, int64_t micro_batch_index,
                                     int64_t sequence_count) const;
  // Evenly spaced over the validation part; the same for every run. REQUIRES: sequence_count ≥ 1
  std::vector<int64_t> ValidationOffsets(int64_t sequence_count) const;

  // The bytes at these offsets. REQUIRES: offsets returned by one of the two functions above.
  TokenBatch BatchAt(std::span<const int64_t> offsets) const;

 private:
  TextData() = default;

  std::string bytes_;  // training part, then validation part
  int64_t train_bytes_ = 0;
  int64_t sequence_length_ = 0;
  int64_t file_count_ = 0;
  int64_t skipped_file_count_ = 0;
  std::string digest_;
};

}  // namespace everstep::examples
