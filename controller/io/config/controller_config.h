// The controller's configuration: file, defaults, validation, and the policy made of it. Also used by
// `everstep config validate`. Thread-safe: pure functions, but for the reading of the file.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "controller/core/policy.h"
#include "everstep/v1/config.pb.h"

namespace everstep {

struct LoadedConfig {
  v1::ControllerConfig config;        // as in the file: without defaults
  std::map<std::string, int> lines;   // of the fields that are set
  std::vector<std::string> problems;  // of the reading; Validate finds the others
};

LoadedConfig LoadControllerConfig(const std::string& path);
// The same on a text; `name` is what problems call it.
LoadedConfig ParseControllerConfig(const std::string& text, const std::string& name);

// With every absent field set to its default.
v1::ControllerConfig WithDefaults(const v1::ControllerConfig& config);

// All problems of a configuration that has its defaults, one sentence each: field, value, remedy.
std::vector<std::string> Validate(const v1::ControllerConfig& config);

// The problems with "FILE:LINE: " before those whose field stands in the file.
std::vector<std::string> WithLines(std::vector<std::string> problems, const std::string& name,
                                   const std::map<std::string, int>& lines);

// REQUIRES: the configuration has its defaults.
Policy PolicyOf(const v1::ControllerConfig& config);

// The effective table: every field with its value, derived timeouts included.
std::vector<std::pair<std::string, std::string>> DescribeConfig(const v1::ControllerConfig& config);

// The rows of docs/config.md: every field with default, legal values and meaning.
struct ConfigField { std::string name, standard, legal, meaning; };
std::vector<ConfigField> ConfigReference();

}  // namespace everstep
