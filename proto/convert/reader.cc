#include "proto/convert/reader.h"

#include <fmt/format.h>
#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include <algorithm>

namespace everstep {
namespace {

constexpr int64_t kNanosPerSecond = 1'000'000'000;
constexpr int64_t kSecondsMax = INT64_MAX / kNanosPerSecond - 1;

bool IsAlphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// The part of an untrusted string that is safe to print in an error.
std::string Shown(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, 60)) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  if (text.size() > 60) out += "...";
  return out;
}

// Length of the UTF-8 sequence at the start of `s`, 0 when it is none.
size_t Utf8Length(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const auto continues = [&](size_t i) { return i < s.size() && (byte(i) & 0xc0) == 0x80; };
  const uint8_t b = byte(0);
  if (b < 0x80) return 1;
  if (b >= 0xc2 && b <= 0xdf) return continues(1) ? 2 : 0;
  if (b >= 0xe0 && b <= 0xef) {
    if (!continues(1) || !continues(2)) return 0;
    if (b == 0xe0 && byte(1) < 0xa0) return 0;
    if (b == 0xed && byte(1) > 0x9f) return 0;  // surrogates
    return 3;
  }
  if (b >= 0xf0 && b <= 0xf4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (b == 0xf0 && byte(1) < 0x90) return 0;
    if (b == 0xf4 && byte(1) > 0x8f) return 0;
    return 4;
  }
  return 0;
}

}  // namespace

bool IsName(std::string_view name) {
  if (name.empty() || name.size() > kNameBytesMax || !IsAlphanumeric(name[0])) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return IsAlphanumeric(c) || c == '.' || c == '_' || c == '-';
  });
}

std::string ToUtf8(std::string_view text, size_t bytes_max) {
  text = text.substr(0, bytes_max);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = text[0] == 0 ? 0 : Utf8Length(text);
    if (length == 0) {
      out += '?';
      text.remove_prefix(1);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return out;
}

void Reader::Fail(const char* field, const std::string& why) {
  if (problems_.size() == kProblemsMax) return;
  std::string path;
  for (const Part& part : path_) {
    path += part.index < 0 ? fmt::format("{}.", part.field)
                           : fmt::format("{}[{}].", part.field, part.index);
  }
  problems_.push_back(fmt::format("{}{}: {}", path, field, why));
  if (status_.ok()) status_ = InvalidArgument(problems_.back());
}

std::string Reader::Name(const std::string& in, const char* field) {
  if (origin_ == Origin::kOwn || IsName(in)) return in;
  if (in.empty()) {
    Fail(field, "is empty; it needs a name");
  } else {
    Fail(field, fmt::format("\"{}\" is not a name: use letters, digits, '.', '_' and '-', at most {} in "
                            "all, a letter or digit first", Shown(in), kNameBytesMax));
  }
  return {};
}

std::string Reader::NameOrEmpty(const std::string& in, const char* field) {
  return in.empty() ? std::string() : Name(in, field);
}

std::string Reader::Text(const std::string& in, const char* field, size_t bytes_max) {
  if (origin_ == Origin::kOwn) return in;
  if (in.size() > bytes_max) {
    Fail(field, fmt::format("has {} bytes; at most {} are allowed", in.size(), bytes_max));
    return {};
  }
  if (in.find('\0') != std::string::npos) {
    Fail(field, "contains a zero byte");
    return {};
  }
  return in;
}

std::string Reader::Address(const std::string& in, const char* field) {
  if (in.empty() || origin_ == Origin::kOwn) return in;
  const size_t colon = in.rfind(':');
  bool good = in.size() <= kAddressBytesMax && colon != std::string::npos && colon > 0 &&
              colon + 1 < in.size() && in.size() - colon - 1 <= 5;
  int port = 0;
  for (size_t i = good ? colon + 1 : in.size(); i < in.size(); ++i) {
    if (in[i] < '0' || in[i] > '9') good = false;
    port = port * 10 + (in[i] - '0');
  }
  for (size_t i = 0; good && i < colon; ++i) good = in[i] > 0x20 && in[i] < 0x7f;
  if (good && port >= 1 && port <= 65535) return in;
  Fail(field, fmt::format("\"{}\" is not an address: write host:port", Shown(in)));
  return {};
}

int64_t Reader::Number(int64_t in, int64_t lowest, int64_t highest, const char* field) {
  if (in >= lowest && in <= highest) return in;
  Fail(field, fmt::format("{} is out of range: {} to {} is allowed", in, lowest, highest));
  return lowest;
}

uint64_t Reader::AboveZero(uint64_t in, const char* field) {
  if (in == 0) Fail(field, "is missing or 0");
  return in;
}

Reason Reader::ReadReason(const std::string& in, const char* field) {
  if (in.empty()) return Reason::kNone;
  if (const auto reason = ReasonFromName(in)) return *reason;
  Fail(field, fmt::format("\"{}\" is not a known reason", Shown(in)));
  return Reason::kNone;
}

bool Reader::ListFits(int64_t size, size_t limit, const char* field) {
  if (static_cast<size_t>(size) <= limit) return true;
  Fail(field, fmt::format("has {} entries; at most {} are allowed", size, limit));
  return false;
}

Duration Reader::ReadDuration(const google::protobuf::Duration& in, Duration lowest,
                              Duration highest, const char* field) {
  const Duration duration = ReadDurationClamped(in);
  if (duration >= lowest && duration <= highest) return duration;
  Fail(field, fmt::format("{} s is out of range: {} s to {} s is allowed", ToSeconds(duration),
                          ToSeconds(lowest), ToSeconds(highest)));
  return lowest;
}

Duration ReadDurationClamped(const google::protobuf::Duration& in) {
  const int64_t seconds = std::clamp<int64_t>(in.seconds(), -kSecondsMax, kSecondsMax);
  const int64_t nanos = std::clamp<int64_t>(in.nanos(), -kNanosPerSecond + 1, kNanosPerSecond - 1);
  return Duration(seconds * kNanosPerSecond + nanos);
}

void WriteDuration(Duration in, google::protobuf::Duration* out) {
  out->set_seconds(in.count() / kNanosPerSecond);
  out->set_nanos(static_cast<int32_t>(in.count() % kNanosPerSecond));
}

void WriteTime(WallTime in, google::protobuf::Timestamp* out) {
  int64_t seconds = in.unix_microseconds / 1'000'000;
  int64_t micros = in.unix_microseconds % 1'000'000;
  if (micros < 0) {
    --seconds;
    micros += 1'000'000;
  }
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(micros * 1000));
}

WallTime ReadTime(const google::protobuf::Timestamp& in) {
  constexpr int64_t kLimit = INT64_MAX / 1'000'000 - 1;
  const int64_t seconds = std::clamp<int64_t>(in.seconds(), -kLimit, kLimit);
  return WallTime{seconds * 1'000'000 + std::clamp(in.nanos(), 0, 999'999'999) / 1000};
}

}  // namespace everstep
