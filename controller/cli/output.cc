#include "controller/cli/output.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <ctime>

namespace everstep::cli {

std::string Table::Text() const {
  const auto shown = [](const std::string& cell) -> std::string_view {
    return cell.empty() ? "<none>" : std::string_view(cell);
  };
  std::vector<size_t> widths;
  for (const std::string& title : titles_) widths.push_back(title.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], shown(row[i]).size());
  }
  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      const bool last = i + 1 == cells.size();
      text +=
          last ? std::string(shown(cells[i])) : fmt::format("{:<{}}  ", shown(cells[i]), widths[i]);
    }
    text += '\n';
  };
  add(titles_);
  for (const auto& row : rows_) add(row);
  return text;
}

int Fail(const Status& status) {
  std::fflush(stdout);
  // One line per problem.
  const std::string& text = status.message();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (end > begin || text.empty())
      fmt::print(stderr, "everstep: {}\n", text.substr(begin, end - begin));
    begin = end + 1;
  }
  return status.code() == StatusCode::kInvalidArgument ? kExitUsage : kExitFailure;
}

void Note(std::string_view message) {
  std::fflush(stdout);
  fmt::print(stderr, "everstep: {}\n", message);
}

void Print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (!text.empty() && text.back() == '\n') std::fflush(stdout);
}

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) text = "{}\n";
  if (text.empty() || text.back() != '\n') text += '\n';
  return text;
}

std::string CamelCase(std::string_view enum_value, std::string_view prefix) {
  if (enum_value.substr(0, prefix.size()) == prefix) enum_value.remove_prefix(prefix.size());
  std::string text;
  bool upper = true;
  for (const char c : enum_value) {
    if (c == '_') {
      upper = true;
      continue;
    }
    text += upper ? c : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    upper = false;
  }
  return text;
}

std::string Age(const google::protobuf::Timestamp& since) {
  if (since.seconds() == 0) return "<unknown>";
  const int64_t now = std::chrono::duration_cast<std::chrono::seconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  const int64_t seconds = std::max<int64_t>(0, now - since.seconds());
  if (seconds < 120) return fmt::format("{}s", seconds);
  if (seconds < 2 * 3600) return fmt::format("{}m", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{}h", seconds / 3600);
  return fmt::format("{}d", seconds / 86400);
}

std::string Bytes(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{}B", bytes);
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.1f}{}", value, unit);
}

std::string ClockTime(const google::protobuf::Timestamp& time) {
  const std::time_t seconds = time.seconds();
  std::tm local{};
  localtime_r(&seconds, &local);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec,
                     time.nanos() / 1000000);
}

}  // namespace everstep::cli
