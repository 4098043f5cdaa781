// Reads untrusted messages into the model: every name, text, list and number is bounded here, once. A Reader remembers
// the first problem with the path of its field ("inventory.devices[3].index: …"); later calls return harmless values,
// so that converters read straight on and ask for the status at the end. Used by shells only. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace google::protobuf {
class Duration;
class Timestamp;
}  // namespace google::protobuf

namespace everstep {

inline constexpr size_t kNameBytesMax = 200;
inline constexpr size_t kAddressBytesMax = 300;
inline constexpr size_t kPathBytesMax = 4096;
inline constexpr size_t kTextBytesMax = 16 * 1024;
inline constexpr size_t kLineBytesMax = 16 * 1024;
inline constexpr size_t kLinesMax = 1000;
inline constexpr size_t kDevicesMax = 1024;
inline constexpr size_t kProcessesMax = 16 * 1024;
inline constexpr size_t kRanksMax = 128 * 1024;
inline constexpr size_t kSnapshotsMax = 64 * 1024;
inline constexpr size_t kSourcesMax = 256;
inline constexpr size_t kArgumentsMax = 4096;
inline constexpr size_t kArgumentBytesMax = 128 * 1024;  // the kernel's own limit of one string

class Reader {
 public:
  // kUntrusted: from the network. kOwn: what this program wrote to its own disk; names and texts were checked when
  // they came in and are taken as they are, numbers and enums are still bounded.
  enum class Origin { kUntrusted, kOwn };
  explicit Reader(Origin origin = Origin::kUntrusted) : origin_(origin) {}

  // The first problem, or OK.
  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  // All of them, at most kProblemsMax.
  static constexpr size_t kProblemsMax = 20;
  const std::vector<std::string>& problems() const { return problems_; }

  // Letters, digits, '.', '_', '-' ; the first one a letter or digit; at most kNameBytesMax.
  std::string Name(const std::string& in, const char* field);
  std::string NameOrEmpty(const std::string& in, const char* field);
  // Free text of at most `bytes_max` bytes without NUL.
  std::string Text(const std::string& in, const char* field, size_t bytes_max = kTextBytesMax);
  std::string Address(const std::string& in, const char* field);  // host:port; empty is fine
  int64_t Number(int64_t in, int64_t lowest, int64_t highest, const char* field);
  int32_t Number32(int64_t in, int32_t lowest, int32_t highest, const char* field) {
    return static_cast<int32_t>(Number(in, lowest, highest, field));
  }
  uint64_t AboveZero(uint64_t in, const char* field);
  Step ReadStep(int64_t in, const char* field) { return Step(Number(in, 0, INT64_MAX, field)); }
  Reason ReadReason(const std::string& in, const char* field);  // empty: kNone
  Duration ReadDuration(const google::protobuf::Duration& in, Duration lowest, Duration highest,
                        const char* field);
  // Message enums are the model's plus one, zero being unspecified. REQUIRES: `last` is the model's last enumerator.
  template <typename E>
  E Enum(int in, E last, const char* field) {
    return static_cast<E>(Number(in, 1, static_cast<int64_t>(last) + 1, field) - 1);
  }
  // False, and a problem, when a list is longer than its limit.
  bool ListFits(int64_t size, size_t limit, const char* field);
  void Fail(const char* field, const std::string& why);

  // Runs `read` with `field` added to the path of problems.
  template <typename F>
  void In(const char* field, F&& read) {
    path_.push_back({field, -1});
    read();
    path_.pop_back();
  }
  template <typename F>
  void In(const char* field, int64_t index, F&& read) {
    path_.push_back({field, index});
    read();
    path_.pop_back();
  }

 private:
  struct Part { const char* field; int64_t index; };
  const Origin origin_;
  std::vector<Part> path_;
  Status status_;
  std::vector<std::string> problems_;
};

// True when `name` is one that Reader::Name accepts.
bool IsName(std::string_view name);

// `text` cut to `bytes_max`, each byte that is zero or not UTF-8 replaced by '?': proto3 strings must be UTF-8, what
// programs print needn't, and a reader refuses longer ones.
std::string ToUtf8(std::string_view text, size_t bytes_max = kTextBytesMax);

void WriteDuration(Duration in, google::protobuf::Duration* out);
void WriteTime(WallTime in, google::protobuf::Timestamp* out);
WallTime ReadTime(const google::protobuf::Timestamp& in);
// Clamped to what a Duration can hold.
Duration ReadDurationClamped(const google::protobuf::Duration& in);

}  // namespace everstep
