// A whole cluster on one machine: a controller and its agents as daemons on loopback, each agent
// the head of its own session with its own root directory. Everything lives under one directory,
// whose cluster.json remembers who was started. Called by the command line on the main thread;
// commands of two invocations exclude each other by a lock file.
//
//   DIR/cluster.json  DIR/lock  DIR/logs/{controller,s1,…}.log  DIR/controller/{config.yaml,data}
//   DIR/servers/s1/
#pragma once

#include <map>
#include <string>
#include <vector>

#include "controller/cli/process_tree.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::cli {

struct LocalOptions {
  std::string directory;
  int servers = 5;
  int devices_per_server = 1;
  std::map<std::string, std::string>
      policy;            // entries of the controller's configuration: lease -> "1500ms"
  std::string binaries;  // folder of everstep-controller and everstep-agent; empty: this program's
  std::vector<std::string> agent_arguments;  // passed on to each agent
  Duration timeout = Seconds(30);  // for the controller to serve and the servers to register
};

struct LocalProcess {
  std::string name;  // "controller", "s1"
  ProcessKey key;    // of the newest start; pid 0: never started
  std::vector<std::string> command;
  std::string root;  // the server's directory; empty for the controller
};

struct LocalState {
  std::string address;  // of the controller: host:port
  std::string ops_address;
  LocalProcess controller;
  std::vector<LocalProcess> servers;
};

class LocalCluster {
 public:
  // Starts everything and waits until the controller serves and all servers registered.
  // kFailedPrecondition: one runs there already. When it fails, nothing it started is left.
  static Result<LocalCluster> Up(const LocalOptions& options);
  // What was started in `directory`. kNotFound: nothing.
  static Result<LocalCluster> Load(const std::string& directory);

  const LocalState& state() const { return state_; }
  const std::string& directory() const { return directory_; }
  bool ControllerRuns() const { return IsAlive(state_.controller.key); }

  // Ends all processes and removes the directory, unless `keep_files`.
  Status Down(bool keep_files);
  // `name` is a server or "controller". kNotFound, with the names there are.
  // SIGKILL to the whole tree, then its root directory and shared memory are destroyed (the
  // controller's data stays: it is its disk). Returns the number of processes killed.
  Result<int> Kill(const std::vector<std::string>& names);  // all at one instant
  Result<int> Pause(const std::string& name);   // SIGSTOP to the whole tree
  Result<int> Resume(const std::string& name);  // SIGCONT
  // Starts it again, killing what is left of it first.
  Status Restart(const std::string& name);
  // Adds a server that was never there; returns its name.
  Result<std::string> Add();

  std::vector<ProcessInfo> Tree(const LocalProcess& process) const;
  static std::string Mark(const LocalProcess& process);

 private:
  LocalCluster(std::string directory, LocalState state)
      : directory_(std::move(directory)), state_(std::move(state)) {}
  Status Start(LocalProcess& process);
  Status Save() const;
  void Refresh();  // what another invocation changed meanwhile; REQUIRES: the lock is held
  Result<LocalProcess*> Find(const std::string& name);
  Status WaitUntilServing(Duration timeout, size_t servers) const;

  std::string directory_;
  LocalState state_;
};

}  // namespace everstep::cli
