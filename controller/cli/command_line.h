// The tree of commands. Each file of commands adds its own to the tree; parsing picks one action,
// main runs it and exits with what it returns. Called on the main thread, once.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "controller/cli/admin_client.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::cli {

// Flags that mean the same wherever they occur.
struct Globals {
  std::string controller;  // --controller
  std::string directory;   // --dir: of the local cluster
  std::string output;      // -o
  std::string timeout = "10s";
};

class CommandLine {
 public:
  CommandLine();

  // 0 and `action` set, or the exit code after help or a usage error was printed.
  int Parse(int argc, char** argv);

  CLI::App app;
  Globals globals;
  std::function<int()> action;
  std::vector<std::string> program;  // what stood after --

  // A command with its description, examples (shown by --help and docs/cli.md) and what it does.
  CLI::App* Add(CLI::App* parent, const std::string& name, const std::string& description,
                const std::string& examples, std::function<int()> run);
  // A command that only holds others.
  CLI::App* AddGroup(CLI::App* parent, const std::string& name, const std::string& description);

  void AddControllerFlags(CLI::App* command);  // --controller --timeout --dir
  void AddDirectoryFlag(CLI::App* command);    // --dir
  void AddOutputFlag(CLI::App* command, const std::string& formats);  // -o, one of "wide|json|name"

  // The client of the controller that the flags, the environment and the files lead to.
  Result<AdminClient> Connect() const;
  std::string LocalDirectory() const;
};

void AddLocalCommands(CommandLine& line);
void AddPlanCommands(CommandLine& line);    // plan
void AddReadCommands(CommandLine& line);    // get, describe, explain, logs
void AddJobCommands(CommandLine& line);     // run, submit, wait, cancel
void AddServerCommands(CommandLine& line);  // drain, undrain
void AddToolCommands(CommandLine& line);    // config, doctor, version, reference

// "1.5s", "300ms", "2m", "1h". kInvalidArgument names the flag.
Result<Duration> ParseDuration(const std::string& text, const std::string& flag);

// YAML or JSON in the schema of `message`. kInvalidArgument: every problem, one line each, with
// file and line.
Status ReadMessageFile(const std::string& file, google::protobuf::Message* message);

// Checks for options, without a name of their own in --help.
std::string Positive(const std::string& value);
std::string NotNegative(const std::string& value);

// docs/cli.md, made from the tree itself.
std::string ReferencePage(const CLI::App& app);

}  // namespace everstep::cli
