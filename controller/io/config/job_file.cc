#include "controller/io/config/job_file.h"

#include <fmt/format.h>

#include "controller/io/config/yaml_message.h"
#include "everstep/v1/types.pb.h"
#include "proto/convert/job_convert.h"

namespace everstep {

LoadedJob LoadJobFile(const std::string& path) {
  const auto text = ReadSmallFile(path);
  if (!text.ok()) return {std::nullopt, {text.status().message()}};
  return ParseJobFile(*text, path);
}

LoadedJob ParseJobFile(const std::string& text, const std::string& name) {
  v1::JobSpec message;
  YamlReading reading = ReadYaml(text, name, &message);
  LoadedJob loaded;
  loaded.problems = std::move(reading.problems);
  if (!loaded.problems.empty()) return loaded;
  if (message.name().empty()) loaded.problems.push_back(fmt::format("{}: name: is missing; give the job a name", name));
  if (message.program().empty()) {
    loaded.problems.push_back(
        fmt::format("{}: program: is missing; give the absolute path of the program", name));
  }
  std::vector<std::string> problems;
  JobSpec spec = FromMessage(message, &problems);
  for (const std::string& problem : problems) {
    const std::string field = problem.substr(0, problem.find(':'));
    if (field == "name" && message.name().empty()) continue;
    const auto line = reading.lines.find(field);
    loaded.problems.push_back(line == reading.lines.end()
                                  ? fmt::format("{}: {}", name, problem)
                                  : fmt::format("{}:{}: {}", name, line->second, problem));
  }
  if (loaded.problems.empty()) loaded.spec = std::move(spec);
  return loaded;
}

}  // namespace everstep
