#include "worker/io/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <string_view>

#include "proto/base/reason.h"

namespace everstep {
namespace {

bool g_json = false;

void AppendJson(std::string& out, std::string_view text) {
  out.push_back('"');
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte < 0x20) {
      out += fmt::format("\\u{:04x}", byte);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

// Quoted only where a reader could not tell where it ends.
void AppendText(std::string& out, std::string_view text) {
  if (!text.empty() && text.find_first_of(" =\"\n\t") == std::string_view::npos) {
    out += text;
  } else {
    AppendJson(out, text);
  }
}

spdlog::level::level_enum LevelOf(AgentNoticeLevel level) {
  switch (level) {
    case AgentNoticeLevel::kDebug: return spdlog::level::debug;
    case AgentNoticeLevel::kInfo: return spdlog::level::info;
    case AgentNoticeLevel::kWarning: return spdlog::level::warn;
    case AgentNoticeLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

void StartLogging(const std::string& level, bool json) {
  g_json = json;
  auto logger = std::make_shared<spdlog::logger>("agent", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  if (json) {
    logger->set_pattern(R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l",%v})");
  } else {
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %L %v");
  }
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

void WriteNotice(const AgentNotice& notice) {
  const spdlog::level::level_enum level = LevelOf(notice.level);
  if (!spdlog::should_log(level)) return;
  std::string line;
  if (g_json) {
    line += "\"message\":";
    AppendJson(line, notice.message);
    if (notice.reason != Reason::kNone) {
      line += ",\"reason\":";
      AppendJson(line, ReasonName(notice.reason));
    }
    for (const auto& [key, value] : notice.keys) {
      line += ",";
      AppendJson(line, key);
      line += ":";
      AppendJson(line, value);
    }
  } else {
    line = notice.message;
    if (notice.reason != Reason::kNone) line += fmt::format(" reason={}", ReasonName(notice.reason));
    for (const auto& [key, value] : notice.keys) {
      line += " " + key + "=";
      AppendText(line, value);
    }
  }
  spdlog::log(level, "{}", line);
}

}  // namespace everstep
