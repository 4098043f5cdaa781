#include "controller/cli/job_flags.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "controller/cli/command_line.h"

namespace everstep::cli {
namespace {

namespace fs = std::filesystem;

Result<int> Number(const std::string& text, const std::string& flag) {
  int number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || number < 1) {
    return InvalidArgument(
        fmt::format("{} '{}' is not a positive number, nor MINIMUM:WANTED", flag, text));
  }
  return number;
}

bool Executable(const std::string& path) {
  return access(path.c_str(), X_OK) == 0 && !fs::is_directory(path);
}

// The program's absolute path: as given, beside this command, or on the PATH.
Result<std::string> FindProgram(const std::string& program) {
  std::error_code error;
  if (program.find('/') != std::string::npos) {
    const fs::path path = fs::absolute(program, error).lexically_normal();
    if (!fs::exists(path, error))
      return InvalidArgument(
          fmt::format("program '{}' does not exist; give an existing path", path.string()));
    if (!Executable(path))
      return InvalidArgument(
          fmt::format("program '{}' is not executable; chmod +x it", path.string()));
    return path.string();
  }
  std::vector<std::string> folders;
  folders.push_back(fs::read_symlink("/proc/self/exe", error).parent_path().string());
  const char* variable = std::getenv("PATH");
  const std::string path = variable == nullptr ? "" : variable;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    folders.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const std::string& folder : folders) {
    if (!folder.empty() && Executable(folder + "/" + program))
      return fs::absolute(folder + "/" + program, error).string();
  }
  if (Executable(fs::absolute(program, error).string()))
    return fs::absolute(program, error).string();
  return InvalidArgument(fmt::format(
      "program '{}' is neither on the PATH nor beside everstep; give its path", program));
}

bool IsPythonScript(const std::string& program) {
  return program.size() > 3 && program.ends_with(".py");
}

// A script that imports everstep takes part itself; any other is an opaque job.
bool ImportsEverstep(const fs::path& script) {
  std::ifstream file(script);
  for (std::string line; std::getline(file, line);) {
    const size_t start = line.find_first_not_of(" \t");
    if (start == std::string::npos) continue;
    for (const std::string_view word : {"import everstep", "from everstep"}) {
      if (line.compare(start, word.size(), word) != 0) continue;
      const size_t end = start + word.size();
      if (end == line.size() || line[end] == '.' || line[end] == ' ' || line[end] == ',') return true;
    }
  }
  return false;
}

// The program and arguments that run a Python script, as `python3 -m everstep.run` would.
Status SetPythonScript(const std::string& script, v1::JobSpec& spec) {
  std::error_code error;
  const fs::path path = fs::absolute(script, error);
  if (!fs::exists(path, error)) {
    return InvalidArgument(
        fmt::format("script '{}' does not exist; give an existing path", path.string()));
  }
  const bool joins = ImportsEverstep(path);
  spec.set_program("python3");
  google::protobuf::RepeatedPtrField<std::string> arguments;
  if (!joins) {
    *arguments.Add() = "-m";
    *arguments.Add() = "everstep.launch";
    spec.set_opaque(true);
  }
  *arguments.Add() = path.string();
  for (const std::string& argument : spec.arguments()) *arguments.Add() = argument;
  spec.mutable_arguments()->Swap(&arguments);
  if (spec.name().empty()) spec.set_name(path.stem().string());
  if (spec.working_directory().empty()) {
    spec.set_working_directory(fs::current_path(error).string());
  }
  for (const char* name : {"PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV", "EVERSTEP_LIBRARY"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && !spec.environment().contains(name)) {
      (*spec.mutable_environment())[name] = value;
    }
  }
  (*spec.mutable_environment())["PYTHONUNBUFFERED"] = "1";
  return OkStatus();
}

Result<std::pair<std::string, std::string>> Assignment(const std::string& entry,
                                                       const std::string& flag) {
  const size_t equals = entry.find('=');
  if (equals == std::string::npos || equals == 0) {
    return InvalidArgument(fmt::format("{} '{}' is not NAME=VALUE", flag, entry));
  }
  return std::pair(entry.substr(0, equals), entry.substr(equals + 1));
}

}  // namespace

void AddJobFlags(CLI::App* command, JobFlags& flags, bool with_spares) {
  command->prefix_command();
  command->add_option("-f,--file", flags.file, "Job file (YAML); flags override its fields")
      ->type_name("FILE");
  command->add_option("--name", flags.name, "Name of the job (default: the program's)")
      ->type_name("NAME");
  command
      ->add_option("--servers,--nnodes", flags.servers,
                   "Servers wanted, or MINIMUM:WANTED (default 1)")
      ->type_name("N|N:N");
  command
      ->add_option("--servers-min", flags.servers_min,
                   "Fewest servers to go on with (default: as wanted)")
      ->type_name("N")
      ->check(Positive);
  command
      ->add_option("--servers-max", flags.servers_max,
                   "Most servers to grow to (default: as wanted)")
      ->type_name("N")
      ->check(Positive);
  command
      ->add_option("--ranks-per-server,--nproc-per-node", flags.ranks_per_server,
                   "Ranks on each server (default 1)")
      ->type_name("N")
      ->check(Positive);
  command->add_option("--pipeline-stages", flags.pipeline_stages, "Pipeline stages (default 1)")
      ->type_name("N")
      ->check(Positive);
  command
      ->add_option("--micro-batches", flags.micro_batches,
                   "Micro-batches of one global batch, shared out by the controller (default: the "
                   "program's own)")
      ->type_name("N")
      ->check(Positive);
  command
      ->add_option("--priority", flags.priority, "Who gets a spare first; higher wins (default 0)")
      ->type_name("N");
  if (with_spares) {
    command
        ->add_option("--spares", flags.spares,
                     "Spare servers of the temporary local cluster (default 1)")
        ->type_name("N")
        ->check(NotNegative);
  }
  command
      ->add_option("--reserve-spares", flags.spares_reserved,
                   "Spares kept for this job alone (default 0)")
      ->type_name("N")
      ->check(NotNegative);
  command->add_option("--standbys", flags.standbys, "Warm processes kept on spares (default 1)")
      ->type_name("N")
      ->check(NotNegative);
  command
      ->add_option("--max-restarts", flags.restarts_max,
                   "Failures of the program's own that the job survives (default 100)")
      ->type_name("N")
      ->check(NotNegative);
  command->add_flag("--opaque", flags.opaque,
                    "The program never joins: restart it, do not rebuild it");
  command
      ->add_option("--snapshot-every", flags.snapshot_every,
                   "Snapshot into staging memory every N steps (default: the program decides)")
      ->type_name("N")
      ->check(NotNegative);
  command
      ->add_option("--persist-every", flags.persist_every,
                   "Write a checkpoint every N steps (default: never)")
      ->type_name("N")
      ->check(NotNegative);
  command
      ->add_option("--keep-checkpoints", flags.checkpoints_kept,
                   "Newest checkpoints kept (default 3)")
      ->type_name("N")
      ->check(Positive);
  command
      ->add_option("--working-directory", flags.working_directory,
                   "Where the program runs (default: a directory of its own)")
      ->type_name("DIRECTORY");
  command->add_option("--env", flags.environment, "A variable of the program; may be repeated")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  command
      ->add_option("--secret", flags.secrets,
                   "A variable read from a file on the server; may be repeated")
      ->type_name("NAME=FILE")
      ->allow_extra_args(false);
  command->add_option("--grace", flags.grace, "Between SIGTERM and SIGKILL (default 5s)")
      ->type_name("DURATION");
}

Result<everstep::v1::JobSpec> MakeJobSpec(const JobFlags& flags, const CLI::App* command,
                                          std::vector<std::string> program) {
  everstep::v1::JobSpec spec;
  if (!flags.file.empty()) EVERSTEP_RETURN_IF_ERROR(ReadMessageFile(flags.file, &spec));
  // Without --, the first argument that is no flag begins the program, and everything from there on
  // is its own.
  std::vector<std::string> rest = command->remaining();
  if (!rest.empty() && rest.front().rfind('-', 0) == 0) {
    return InvalidArgument(fmt::format("unknown flag '{}'; see 'everstep {} --help'", rest.front(),
                                       command->get_name()));
  }
  if (!rest.empty() && !program.empty()) rest.push_back("--");
  rest.insert(rest.end(), program.begin(), program.end());
  if (rest.empty() && spec.program().empty()) {
    return InvalidArgument("no program: give one after the flags, or a job file with -f");
  }
  if (!rest.empty()) {
    spec.set_program(rest.front());
    spec.clear_arguments();
    for (size_t i = 1; i < rest.size(); ++i) spec.add_arguments(rest[i]);
    if (IsPythonScript(rest.front())) {
      EVERSTEP_RETURN_IF_ERROR(SetPythonScript(rest.front(), spec));
    }
  }
  // A job file may name a program that exists on the servers only; a program typed here is looked
  // up here.
  if (!rest.empty() || spec.program().find('/') == std::string::npos) {
    EVERSTEP_ASSIGN_OR_RETURN(std::string program, FindProgram(spec.program()));
    spec.set_program(program);
  }
  if (command->count("--name") > 0) spec.set_name(flags.name);
  if (spec.name().empty()) spec.set_name(fs::path(spec.program()).stem().string());
  if (command->count("--servers") > 0) {
    const size_t colon = flags.servers.find(':');
    EVERSTEP_ASSIGN_OR_RETURN(const int first, Number(flags.servers.substr(0, colon), "--servers"));
    int wanted = first;
    if (colon != std::string::npos) {
      EVERSTEP_ASSIGN_OR_RETURN(wanted, Number(flags.servers.substr(colon + 1), "--servers"));
    }
    spec.set_servers_min(first);
    spec.set_servers_wanted(wanted);
  }
  if (!spec.has_servers_wanted())
    spec.set_servers_wanted(spec.has_servers_min() ? spec.servers_min() : 1);
  if (command->count("--servers-min") > 0) spec.set_servers_min(flags.servers_min);
  if (!spec.has_servers_min()) spec.set_servers_min(spec.servers_wanted());
  if (command->count("--servers-max") > 0) spec.set_servers_max(flags.servers_max);
  if (command->count("--ranks-per-server") > 0) spec.set_ranks_per_server(flags.ranks_per_server);
  if (!spec.has_ranks_per_server()) spec.set_ranks_per_server(1);
  if (command->count("--pipeline-stages") > 0) spec.set_pipeline_stages(flags.pipeline_stages);
  if (command->count("--micro-batches") > 0) spec.set_micro_batch_count(flags.micro_batches);
  if (command->count("--priority") > 0) spec.set_priority(flags.priority);
  if (command->count("--reserve-spares") > 0) spec.set_spares_reserved(flags.spares_reserved);
  if (command->count("--standbys") > 0) spec.set_standbys_wanted(flags.standbys);
  if (command->count("--max-restarts") > 0) spec.set_restarts_max(flags.restarts_max);
  if (command->count("--opaque") > 0) spec.set_opaque(flags.opaque);
  if (command->count("--snapshot-every") > 0)
    spec.set_snapshot_interval_steps(flags.snapshot_every);
  if (command->count("--persist-every") > 0) spec.set_persist_interval_steps(flags.persist_every);
  if (command->count("--keep-checkpoints") > 0) spec.set_checkpoints_kept(flags.checkpoints_kept);
  if (command->count("--working-directory") > 0)
    spec.set_working_directory(flags.working_directory);
  if (command->count("--grace") > 0) {
    EVERSTEP_ASSIGN_OR_RETURN(const Duration grace, ParseDuration(flags.grace, "--grace"));
    spec.mutable_termination_grace()->set_seconds(grace.count() / 1000000000);
    spec.mutable_termination_grace()->set_nanos(static_cast<int32_t>(grace.count() % 1000000000));
  }
  for (const std::string& entry : flags.environment) {
    EVERSTEP_ASSIGN_OR_RETURN(const auto pair, Assignment(entry, "--env"));
    (*spec.mutable_environment())[pair.first] = pair.second;
  }
  for (const std::string& entry : flags.secrets) {
    EVERSTEP_ASSIGN_OR_RETURN(const auto pair, Assignment(entry, "--secret"));
    (*spec.mutable_secret_files())[pair.first] = pair.second;
  }
  return spec;
}

}  // namespace everstep::cli
