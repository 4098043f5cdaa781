#include "worker/examples/text_data.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/prng.h"
#include "worker/examples/digest.h"

namespace everstep::examples {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy = "give --data a text file or a folder of text files";

Status TooMuch(const std::string& path) {
  return ResourceExhausted(
      fmt::format("data {} holds more than {} bytes or {} files: give --data a smaller folder",
                  path, kTextBytesMax, kTextFileCountMax));
}

// Files below `folder`, links followed, each real folder entered once (so a link to a parent ends).
Status ListFiles(const fs::path& folder, std::set<std::string>& folders_seen,
                 std::vector<fs::path>& files) {
  std::error_code error;
  const fs::path real = fs::canonical(folder, error);
  if (error || !folders_seen.insert(real.string()).second) return OkStatus();
  fs::directory_iterator entry(folder, fs::directory_options::skip_permission_denied, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_directory(ignored)) {
      EVERSTEP_RETURN_IF_ERROR(ListFiles(entry->path(), folders_seen, files));
    } else if (entry->is_regular_file(ignored)) {
      files.push_back(entry->path());
    }
    if (static_cast<int64_t>(files.size() + folders_seen.size()) > kTextFileCountMax) {
      return TooMuch(folder.string());
    }
  }
  return OkStatus();
}

// Appends the file's text. False: unreadable or binary. REQUIRES: a regular file.
Result<bool> AppendText(const fs::path& file, const std::string& path, std::string& bytes) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return false;
  const size_t start = bytes.size();
  std::vector<char> chunk(1 << 16);
  while (stream.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) ||
         stream.gcount() > 0) {
    const size_t count = static_cast<size_t>(stream.gcount());
    if (std::memchr(chunk.data(), 0, count) != nullptr) {
      bytes.resize(start);
      return false;
    }
    bytes.append(chunk.data(), count);
    if (static_cast<int64_t>(bytes.size()) > kTextBytesMax) return TooMuch(path);
  }
  if (stream.bad()) {
    bytes.resize(start);
    return false;
  }
  return true;
}

Result<std::vector<fs::path>> FilesAt(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    return NotFound(fmt::format("data {} does not exist: {}", path, kRemedy));
  }
  if (error) {
    return Status(StatusCode::kPermissionDenied,
                  fmt::format("data {} cannot be examined ({}): make it readable or {}", path,
                              error.message(), kRemedy));
  }
  std::vector<fs::path> files;
  if (status.type() == fs::file_type::regular) {
    files.emplace_back(path);
    return files;
  }
  if (status.type() != fs::file_type::directory) {
    return InvalidArgument(
        fmt::format("data {} is neither a regular file nor a folder: {}", path, kRemedy));
  }
  const fs::directory_iterator probe(path, error);
  if (error) {
    return Status(StatusCode::kPermissionDenied,
                  fmt::format("data {} cannot be read ({}): make it readable or {}", path,
                              error.message(), kRemedy));
  }
  std::set<std::string> folders_seen;
  EVERSTEP_RETURN_IF_ERROR(ListFiles(path, folders_seen, files));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Result<TextData> TextData::Load(const std::string& path, int64_t sequence_length) {
  EVERSTEP_ASSIGN_OR_RETURN(const std::vector<fs::path> files, FilesAt(path));
  std::string bytes;
  int64_t read_count = 0;
  int64_t skipped_count = 0;
  std::set<std::string> seen;
  for (const fs::path& file : files) {
    std::error_code error;
    const fs::path real = fs::canonical(file, error);
    if (!error && !seen.insert(real.string()).second) continue;  // a second name of the same file
    EVERSTEP_ASSIGN_OR_RETURN(const bool is_text, AppendText(file, path, bytes));
    ++(is_text ? read_count : skipped_count);
  }
  if (bytes.empty()) {
    return InvalidArgument(
        fmt::format("data {} holds no text ({} files, {} of them unreadable or "
                    "binary): {}",
                    path, read_count + skipped_count, skipped_count, kRemedy));
  }
  EVERSTEP_ASSIGN_OR_RETURN(TextData data, FromBytes(std::move(bytes), path, sequence_length));
  data.file_count_ = read_count;
  data.skipped_file_count_ = skipped_count;
  return data;
}

Result<TextData> TextData::FromBytes(std::string bytes, const std::string& name,
                                     int64_t sequence_length) {
  EVERSTEP_CHECK(sequence_length >= 1);
  TextData data;
  data.bytes_ = std::move(bytes);
  data.sequence_length_ = sequence_length;
  const int64_t total = static_cast<int64_t>(data.bytes_.size());
  data.train_bytes_ = total - total / 20;
  // A sequence and the byte that follows it.
  const int64_t needed = sequence_length + 1;
  if (data.train_bytes_ < needed || data.validation_bytes() < needed) {
    return InvalidArgument(
        fmt::format("data {} holds {} bytes of text: sequences of {} bytes need at least {} "
                    "(a twentieth is for validation); {}",
                    name, total, sequence_length, 20 * needed, kRemedy));
  }
  data.digest_ = Digest128(std::as_bytes(std::span(data.bytes_)));
  return data;
}

std::vector<int64_t> TextData::SampleOffsets(uint64_t seed, Step step, int64_t micro_batch_index,
                                             int64_t sequence_count) const {
  // Each argument passes through the generator before the next joins, so that no two triples share
  // a stream.
  uint64_t key = Prng(seed).Next();
  key = Prng(key ^ static_cast<uint64_t>(step.value)).Next();
  Prng prng(key ^ static_cast<uint64_t>(micro_batch_index));
  std::vector<int64_t> offsets(static_cast<size_t>(sequence_count));
  for (int64_t& offset : offsets) offset = prng.Between(0, train_bytes_ - sequence_length_ - 1);
  return offsets;
}

std::vector<int64_t> TextData::ValidationOffsets(int64_t sequence_count) const {
  EVERSTEP_CHECK(sequence_count >= 1);
  const int64_t last = validation_bytes() - sequence_length_ - 1;
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < sequence_count; ++i) {
    offsets.push_back(train_bytes_ + (sequence_count == 1 ? 0 : last * i / (sequence_count - 1)));
  }
  return offsets;
}

TokenBatch TextData::BatchAt(std::span<const int64_t> offsets) const {
  TokenBatch batch;
  for (const int64_t offset : offsets) {
    EVERSTEP_CHECK(offset >= 0 && offset + sequence_length_ < static_cast<int64_t>(bytes_.size()));
    const auto begin = bytes_.begin() + offset;
    batch.inputs.insert(batch.inputs.end(), begin, begin + sequence_length_);
    batch.targets.insert(batch.targets.end(), begin + 1, begin + sequence_length_ + 1);
  }
  return batch;
}

}  // namespace everstep::examples
