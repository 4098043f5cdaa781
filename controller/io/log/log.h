// Structured log: a constant message, then keys, one line per event, to stderr. Text by default, JSON on request.
// Thread-safe once InitLog was called by main.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace everstep {

enum class LogLevel { kDebug, kInfo, kError };
using LogKeys = std::vector<std::pair<std::string, std::string>>;

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  bool json = false;
};

void InitLog(const LogOptions& options);
void Log(LogLevel level, std::string_view message, const LogKeys& keys = {});
// Writes out what is buffered; before an abrupt end of the process.
void FlushLog();

// One line without its time: `info Server declared dead server=s03 reason=ServerSilent`, or the JSON object's inside.
std::string FormatLogLine(const LogOptions& options, LogLevel level, std::string_view message, const LogKeys& keys);
// `text` as a JSON string with its quotes; bytes that are not UTF-8 become '?'.
std::string JsonString(std::string_view text);

}  // namespace everstep
