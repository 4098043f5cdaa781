#include "controller/io/log/log.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "proto/convert/reader.h"

namespace everstep {
namespace {

LogOptions g_options;  // written once, before threads start

spdlog::logger& Logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("everstep", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::debug);
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *logger;
}

std::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kError: return "error";
  }
  return "info";
}

bool NeedsQuotes(std::string_view text) {
  if (text.empty()) return true;
  for (char c : text) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == '"' || c == '=' || c == '\\' || c == 0x7f) return true;
  }
  return false;
}

}  // namespace

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (char c : ToUtf8(text)) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      case '\r': out += "\\r"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<int>(c));
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

std::string FormatLogLine(const LogOptions& options, LogLevel level, std::string_view message, const LogKeys& keys) {
  std::string line;
  if (options.json) {
    line = fmt::format("\"level\":\"{}\",\"msg\":{}", LevelName(level), JsonString(message));
    for (const auto& [key, value] : keys) line += fmt::format(",{}:{}", JsonString(key), JsonString(value));
    return line;
  }
  line = fmt::format("{} {}", LevelName(level), message);
  for (const auto& [key, value] : keys) {
    line += fmt::format(" {}={}", key, NeedsQuotes(value) ? JsonString(value) : value);
  }
  return line;
}

void InitLog(const LogOptions& options) {
  g_options = options;
  Logger().set_pattern(options.json ? "{\"time\":\"%Y-%m-%dT%H:%M:%S.%f%z\",%v}" : "%Y-%m-%dT%H:%M:%S.%f %v");
}

void Log(LogLevel level, std::string_view message, const LogKeys& keys) {
  if (level < g_options.level) return;
  Logger().info(FormatLogLine(g_options, level, message, keys));
}

void FlushLog() { Logger().flush(); }

}  // namespace everstep
