// YAML (and JSON, which YAML contains) onto a proto message by reflection: the schema is the message. All problems are
// collected, each with file and line, the field, the value and the remedy. Thread-safe: pure functions.
#pragma once

#include <google/protobuf/message.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep {

struct YamlReading {
  std::vector<std::string> problems;       // "job.yaml:7: unknown field \"server_min\"; did you mean \"servers_min\"?"
  std::map<std::string, int> lines;        // path of each field that is set -> its line
};

inline constexpr size_t kYamlBytesMax = 1024 * 1024;

// Fills `message` from `text`; `name` is what problems call the file. Fields go by their proto name or JSON name, enums
// by their value's name without prefix ("json"), durations are texts with a unit ("5s", "250ms", "1m30s").
YamlReading ReadYaml(const std::string& text, const std::string& name,
                     google::protobuf::Message* message);

// The file's text. kNotFound, kPermissionDenied, kInvalidArgument (too large, a folder): the message names the path.
Result<std::string> ReadSmallFile(const std::string& path);

// "5s", "250ms", "1m30s", "2h". kInvalidArgument: not one of these; the message says how to write it.
Result<Duration> ParseDuration(std::string_view text);

// The candidate nearest to `text`, or empty when none is near.
std::string NearestName(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace everstep
