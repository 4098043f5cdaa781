// `everstep local …`: a whole cluster on this machine, and faults for it.
#include <fmt/format.h>

#include <memory>

#include "controller/cli/command_line.h"
#include "controller/cli/local_cluster.h"
#include "controller/cli/output.h"

namespace everstep::cli {
namespace {

struct UpFlags {
  LocalOptions options;
  std::vector<std::string> policy;
  std::string ready_timeout = "30s";
};

int Up(const CommandLine& line, UpFlags flags) {
  flags.options.directory = line.LocalDirectory();
  const auto timeout = ParseDuration(flags.ready_timeout, "--ready-timeout");
  if (!timeout.ok()) return Fail(timeout.status());
  flags.options.timeout = timeout.value();
  for (const std::string& entry : flags.policy) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Fail(InvalidArgument(
          fmt::format("--policy '{}' is not name=value; for example --policy lease=2s", entry)));
    }
    flags.options.policy[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  const auto cluster = LocalCluster::Up(flags.options);
  if (!cluster.ok()) return Fail(cluster.status());
  const LocalState& state = cluster.value().state();
  Print(fmt::format("local cluster up: controller {}, {} servers, directory {}\n", state.address,
                    state.servers.size(), cluster.value().directory()));
  Note(fmt::format("metrics and health at http://{}/metrics; end it with 'everstep local down'",
                   state.ops_address));
  return kExitDone;
}

char StateOf(const LocalCluster& cluster, const LocalProcess& process, size_t* count) {
  const auto tree = cluster.Tree(process);
  *count = tree.size();
  if (!IsAlive(process.key)) return tree.empty() ? 'X' : 'O';
  return tree.front().state == 'T' ? 'T' : 'R';
}

int ShowStatus(const CommandLine& line) {
  const auto loaded = LocalCluster::Load(line.LocalDirectory());
  if (!loaded.ok()) return Fail(loaded.status());
  const LocalCluster& cluster = loaded.value();
  Table table({"NAME", "STATE", "PID", "PROCESSES", "ROOT"});
  std::string json = "{\"address\": \"" + cluster.state().address + "\", \"opsAddress\": \"" +
                     cluster.state().ops_address + "\", \"processes\": [";
  std::vector<const LocalProcess*> all{&cluster.state().controller};
  for (const LocalProcess& server : cluster.state().servers) all.push_back(&server);
  bool first = true;
  for (const LocalProcess* process : all) {
    size_t count = 0;
    const char state = StateOf(cluster, *process, &count);
    const char* name = state == 'R'   ? "Running"
                       : state == 'T' ? "Paused"
                       : state == 'O' ? "Orphans"
                                      : "Dead";
    const std::string root =
        process->root.empty() ? cluster.directory() + "/controller" : process->root;
    table.AddRow(
        {process->name, name, std::to_string(process->key.pid), std::to_string(count), root});
    json += fmt::format(
        "{}{{\"name\": \"{}\", \"state\": \"{}\", \"pid\": {}, \"processes\": {}, \"root\": "
        "\"{}\"}}",
        first ? "" : ", ", process->name, name, process->key.pid, count, root);
    first = false;
  }
  if (line.globals.output == "json") {
    Print(json + "]}\n");
  } else {
    Print(fmt::format("Controller: {}   Operations port: http://{}   Directory: {}\n\n",
                      cluster.state().address, cluster.state().ops_address, cluster.directory()));
    Print(table.Text());
  }
  return kExitDone;
}

std::string ObjectName(const std::string& name) {
  return name == "controller" ? name : "server/" + name;
}

// Commands that act on servers or on the controller.
int Act(const CommandLine& line, const std::vector<std::string>& names, const std::string& verb) {
  auto loaded = LocalCluster::Load(line.LocalDirectory());
  if (!loaded.ok()) return Fail(loaded.status());
  LocalCluster& cluster = loaded.value();
  if (verb == "kill") {
    const auto killed = cluster.Kill(names);
    if (!killed.ok()) return Fail(killed.status());
    std::string objects;
    for (const std::string& name : names)
      objects += (objects.empty() ? "" : ", ") + ObjectName(name);
    Print(fmt::format("{} killed ({} processes)\n", objects, killed.value()));
    return kExitDone;
  }
  for (const std::string& name : names) {
    if (verb == "restart") {
      const Status status = cluster.Restart(name);
      if (!status.ok()) return Fail(status);
      Print(ObjectName(name) + " started again\n");
      continue;
    }
    const Result<int> done = verb == "pause" ? cluster.Pause(name) : cluster.Resume(name);
    if (!done.ok()) return Fail(done.status());
    Print(fmt::format("{} {} ({} processes)\n", ObjectName(name),
                      verb == "pause" ? "paused" : "resumed", done.value()));
  }
  return kExitDone;
}

int Add(const CommandLine& line) {
  auto loaded = LocalCluster::Load(line.LocalDirectory());
  if (!loaded.ok()) return Fail(loaded.status());
  const auto name = loaded.value().Add();
  if (!name.ok()) return Fail(name.status());
  Print(fmt::format("server/{} added\n", name.value()));
  return kExitDone;
}

int Down(const CommandLine& line, bool keep_files) {
  auto loaded = LocalCluster::Load(line.LocalDirectory());
  if (!loaded.ok()) {
    if (loaded.status().code() != StatusCode::kNotFound) return Fail(loaded.status());
    Print("local cluster is down\n");
    return kExitDone;
  }
  const Status status = loaded.value().Down(keep_files);
  if (!status.ok()) return Fail(status);
  Print("local cluster is down\n");
  return kExitDone;
}

}  // namespace

void AddLocalCommands(CommandLine& line) {
  CLI::App* local = line.AddGroup(
      &line.app, "local", "A whole cluster on this machine: controller and servers as processes");

  auto flags = std::make_shared<UpFlags>();
  CLI::App* up =
      line.Add(local, "up", "Start a controller and servers on loopback",
               "  everstep local up\n  everstep local up --servers 3 --devices 2 --policy lease=1s",
               [&line, flags] { return Up(line, *flags); });
  line.AddDirectoryFlag(up);
  up->add_option("--servers", flags->options.servers,
                 "Servers to start; those a job does not use are spares (default 5)")
      ->type_name("N");
  up->add_option("--devices", flags->options.devices_per_server,
                 "CPU slots of each server (default 1)")
      ->type_name("N");
  up->add_option("--policy", flags->policy,
                 "A policy value of the controller, name=value; may be repeated")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  up->add_option("--agent-argument", flags->options.agent_arguments,
                 "One more argument for each agent; may be repeated")
      ->type_name("ARGUMENT")
      ->allow_extra_args(false);
  up->add_option("--binaries", flags->options.binaries,
                 "Folder of everstep-controller and everstep-agent (default: this program's)")
      ->type_name("DIRECTORY");
  up->add_option("--ready-timeout", flags->ready_timeout,
                 "How long the servers may take to register (default 30s)")
      ->type_name("DURATION");

  auto keep_files = std::make_shared<bool>(false);
  CLI::App* down =
      line.Add(local, "down", "End every process of the local cluster and remove its directory",
               "  everstep local down\n  everstep local down --keep-files",
               [&line, keep_files] { return Down(line, *keep_files); });
  line.AddDirectoryFlag(down);
  down->add_flag("--keep-files", *keep_files, "Keep logs, ledger and server directories");

  CLI::App* status = line.Add(local, "status", "Show the processes of the local cluster",
                              "  everstep local status\n  everstep local status -o json",
                              [&line] { return ShowStatus(line); });
  line.AddDirectoryFlag(status);
  line.AddOutputFlag(status, "json");

  struct Verb {
    const char* name;
    const char* description;
    const char* examples;
  };
  for (const Verb& verb :
       {Verb{"kill",
             "SIGKILL a server's whole process tree and destroy its directory, or kill the "
             "controller",
             "  everstep local kill s2\n  everstep local kill s2 s3\n  everstep local kill "
             "controller"},
        Verb{"pause", "SIGSTOP a server's whole process tree: it falls silent",
             "  everstep local pause s2"},
        Verb{"resume",
             "SIGCONT a paused server's process tree: it wakes as a zombie of an old generation",
             "  everstep local resume s2"},
        Verb{"restart", "Start a killed server or controller again",
             "  everstep local restart s2\n  everstep local restart controller"}}) {
    auto names = std::make_shared<std::vector<std::string>>();
    const std::string verb_name = verb.name;
    CLI::App* command =
        line.Add(local, verb.name, verb.description, verb.examples,
                 [&line, names, verb_name] { return Act(line, *names, verb_name); });
    command
        ->add_option("server", *names,
                     "Servers, or 'controller'; several are killed at one instant")
        ->required()
        ->type_name("NAME");
    line.AddDirectoryFlag(command);
  }

  CLI::App* add = line.Add(local, "add", "Start one more server", "  everstep local add",
                           [&line] { return Add(line); });
  line.AddDirectoryFlag(add);
}

}  // namespace everstep::cli
