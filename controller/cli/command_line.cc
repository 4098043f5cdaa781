#include "controller/cli/command_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "controller/cli/output.h"
#include "controller/io/config/yaml_message.h"
#include "proto/model/job.h"

namespace everstep::cli {

CommandLine::CommandLine()
    : app("Keeps training jobs stepping while their servers die.", "everstep") {
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 success, 1 failure, 2 usage error, 3 a waited condition was not met; `run` "
      "and `wait job`: 0 done,\n"
      "1-63 the program's own code, 64 usage error of run, 70 the program ended by a signal or a "
      "higher code, 71 no\n"
      "capacity, 73 cancelled, 74 data loss, 75 infrastructure (worth another try).\n"
      "Which controller: --controller, else EVERSTEP_CONTROLLER, else `controller:` in "
      "~/.everstep/config.yaml, else the\n"
      "local cluster.\n\n"
      "Start here:\n"
      "  everstep run -- everstep-train --steps 50\n"
      "  everstep local up && everstep get servers");
}

int CommandLine::Parse(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool run = !arguments.empty() && arguments.front() == "run";
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (dashes != arguments.end()) {
    program.assign(dashes + 1, arguments.end());
    arguments.erase(dashes, arguments.end());
  }
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(arguments);
    return kExitDone;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      app.exit(error);  // --help
      action = [] { return kExitDone; };
      return kExitDone;
    }
    std::string path = "everstep";
    const CLI::App* command = &app;
    while (!command->get_subcommands().empty()) {
      command = command->get_subcommands().front();
      path += " " + command->get_name();
    }
    std::string what = error.what();
    std::replace(what.begin(), what.end(), '\n', ' ');
    const auto children = command->get_subcommands([](const CLI::App*) { return true; });
    if (!children.empty()) {
      std::vector<std::string> names;
      for (const CLI::App* child : children) names.push_back(child->get_name());
      const auto rest = app.remaining(true);
      what = fmt::format(
          "{}; '{}' has {}",
          rest.empty() ? "a command is missing" : fmt::format("unknown command '{}'", rest.front()),
          path, fmt::join(names, ", "));
    }
    fmt::print(stderr, "everstep: {}; see '{} --help'\n", what, path);
    return run ? static_cast<int>(JobExit::kUsage) : kExitUsage;
  }
}

CLI::App* CommandLine::Add(CLI::App* parent, const std::string& name,
                           const std::string& description, const std::string& examples,
                           std::function<int()> run) {
  CLI::App* command = parent->add_subcommand(name, description);
  command->footer("Examples:\n" + examples);
  command->callback([this, run = std::move(run)] { action = run; });
  return command;
}

CLI::App* CommandLine::AddGroup(CLI::App* parent, const std::string& name,
                                const std::string& description) {
  CLI::App* group = parent->add_subcommand(name, description);
  group->require_subcommand(1);
  return group;
}

void CommandLine::AddControllerFlags(CLI::App* command) {
  command->add_option("--controller", globals.controller, "Address of the controller, host:port")
      ->type_name("ADDRESS");
  command->add_option("--timeout", globals.timeout, "Deadline of each call (default 10s)")
      ->type_name("DURATION");
  AddDirectoryFlag(command);
}

void CommandLine::AddDirectoryFlag(CLI::App* command) {
  command
      ->add_option("--dir", globals.directory,
                   "Directory of the local cluster (default ~/.everstep/local)")
      ->type_name("DIRECTORY");
}

void CommandLine::AddOutputFlag(CLI::App* command, const std::string& formats) {
  std::vector<std::string> allowed;
  for (size_t begin = 0; begin <= formats.size();) {
    const size_t end = std::min(formats.find('|', begin), formats.size());
    allowed.push_back(formats.substr(begin, end - begin));
    begin = end + 1;
  }
  command
      ->add_option("-o,--output", globals.output,
                   "Format: " + formats + " (default: a table for people)")
      ->type_name("FORMAT")
      ->check([allowed, formats](const std::string& value) -> std::string {
        for (const std::string& format : allowed) {
          if (value == format) return "";
        }
        return fmt::format("'{}' is not one of {}", value, formats);
      });
}

std::string CommandLine::LocalDirectory() const {
  return globals.directory.empty() ? HomeDirectory() + "/local" : globals.directory;
}

Result<AdminClient> CommandLine::Connect() const {
  EVERSTEP_ASSIGN_OR_RETURN(const Duration timeout, ParseDuration(globals.timeout, "--timeout"));
  EVERSTEP_ASSIGN_OR_RETURN(ControllerAddress address,
                            FindController(globals.controller, LocalDirectory()));
  return AdminClient(std::move(address), timeout);
}

namespace {
std::string Bounded(const std::string& value, int64_t least, const char* kind) {
  int64_t number = 0;
  const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool good =
      parsed.ec == std::errc() && parsed.ptr == value.data() + value.size() && number >= least;
  return good ? "" : fmt::format("'{}' is not {}", value, kind);
}
}  // namespace

std::string Positive(const std::string& value) { return Bounded(value, 1, "a positive number"); }
std::string NotNegative(const std::string& value) {
  return Bounded(value, 0, "zero or a positive number");
}

Result<Duration> ParseDuration(const std::string& text, const std::string& flag) {
  const auto parsed = everstep::ParseDuration(text);
  if (!parsed.ok()) return InvalidArgument(fmt::format("{}: {}", flag, parsed.status().message()));
  return parsed.value();
}

Status ReadMessageFile(const std::string& file, google::protobuf::Message* message) {
  const auto text = ReadSmallFile(file);
  if (!text.ok()) return InvalidArgument(text.status().message());
  const YamlReading reading = ReadYaml(text.value(), file, message);
  if (!reading.problems.empty())
    return InvalidArgument(fmt::format("{}", fmt::join(reading.problems, "\n")));
  return OkStatus();
}

}  // namespace everstep::cli
