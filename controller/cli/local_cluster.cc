#include "controller/cli/local_cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>

#include "controller/cli/admin_client.h"
#include "controller/cli/output.h"

namespace everstep::cli {
namespace {

namespace fs = std::filesystem;
using SteadyClock = std::chrono::steady_clock;

constexpr int kPollMilliseconds = 20;
constexpr int kStopGraceSeconds = 10;
constexpr int kServersMax = 256;

void WaitMilliseconds(int milliseconds) { poll(nullptr, 0, milliseconds); }

// Keeps two invocations from changing one cluster at once.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory)
      : fd_(open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ >= 0) flock(fd_, LOCK_EX);
  }
  ~DirectoryLock() {
    if (fd_ >= 0) close(fd_);
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_;
};

// A loopback port that is free for both TCP and UDP at this moment; 0 when there is none.
int FreePort() {
  for (int attempt = 0; attempt < 50; ++attempt) {
    const int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const bool both = bind(tcp, generic, length) == 0 && getsockname(tcp, generic, &length) == 0 &&
                      bind(udp, generic, length) == 0;
    close(tcp);
    close(udp);
    if (both) return ntohs(address.sin_port);
  }
  return 0;
}

std::string OwnFolder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path().string();
}

std::string LastLines(const std::string& file, size_t count) {
  std::ifstream stream(file);
  std::deque<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
    if (lines.size() > count) lines.pop_front();
  }
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : " | ") + line;
  return text.empty() ? "(it printed nothing)" : text;
}

// Starts a daemon at the head of its own session, its output appended to `log`. Returns its pid.
Result<pid_t> SpawnDaemon(const LocalProcess& process, const std::string& log) {
  std::vector<char*> arguments;
  for (const std::string& argument : process.command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  environment.push_back(LocalCluster::Mark(process));
  std::vector<char*> variables;
  for (std::string& entry : environment) variables.push_back(entry.data());
  variables.push_back(nullptr);

  int failure[2];
  if (pipe2(failure, O_CLOEXEC) != 0)
    return Internal(fmt::format("pipe: {}", std::strerror(errno)));
  const pid_t pid = fork();
  if (pid < 0) return Internal(fmt::format("fork: {}", std::strerror(errno)));
  if (pid == 0) {
    // Only calls that are safe between fork and exec.
    setsid();
    const int input = open("/dev/null", O_RDONLY);
    const int output = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (input >= 0 && output >= 0 && dup2(input, 0) == 0 && dup2(output, 1) == 1 &&
        dup2(output, 2) == 2) {
      const int report = fcntl(failure[1], F_DUPFD_CLOEXEC, 3);
      for (int fd = 3; fd < 1024; ++fd) {
        if (fd != report) close(fd);
      }
      sigset_t none;
      sigemptyset(&none);
      sigprocmask(SIG_SETMASK, &none, nullptr);
      execve(arguments[0], arguments.data(), variables.data());
      const int error = errno;
      (void)!write(report, &error, sizeof(error));
    } else {
      const int error = errno;
      (void)!write(failure[1], &error, sizeof(error));
    }
    _exit(127);
  }
  close(failure[1]);
  int error = 0;
  const ssize_t got = read(failure[0], &error, sizeof(error));
  close(failure[0]);
  if (got == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    return FailedPrecondition(
        fmt::format("cannot start {} (log {}): {}; is Everstep built or installed completely?",
                    process.command[0], log, std::strerror(error)));
  }
  return pid;
}

void EmitProcess(YAML::Emitter& out, const LocalProcess& process) {
  out << YAML::BeginMap << YAML::Key << "name" << YAML::Value << process.name << YAML::Key << "pid"
      << YAML::Value << process.key.pid << YAML::Key << "startTicks" << YAML::Value
      << process.key.start_ticks << YAML::Key << "root" << YAML::Value << process.root << YAML::Key
      << "command" << YAML::Value << YAML::BeginSeq;
  for (const std::string& argument : process.command) out << argument;
  out << YAML::EndSeq << YAML::EndMap;
}

LocalProcess ReadProcess(const YAML::Node& node) {
  LocalProcess process;
  process.name = node["name"].as<std::string>();
  process.key.pid = node["pid"].as<pid_t>();
  process.key.start_ticks = node["startTicks"].as<uint64_t>();
  process.root = node["root"].as<std::string>();
  process.command = node["command"].as<std::vector<std::string>>();
  return process;
}

Status WriteConfig(const std::string& file, const LocalState& state, const std::string& data,
                   const std::map<std::string, std::string>& policy) {
  std::ofstream out(file);
  out << "data_directory: \"" << data << "\"\nlisten: \"" << state.address << "\"\nops_listen: \""
      << state.ops_address << "\"\n";
  if (!policy.empty()) out << "policy:\n";
  for (const auto& [key, value] : policy) out << "  " << key << ": \"" << value << "\"\n";
  out.close();
  if (!out)
    return FailedPrecondition(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
  return OkStatus();
}

}  // namespace

std::string LocalCluster::Mark(const LocalProcess& process) {
  // The mark that an agent puts into the environment of everything below its root.
  if (!process.root.empty()) return "EVERSTEP_AGENT_ROOT=" + process.root;
  return "EVERSTEP_LOCAL_CONTROLLER=" + process.command.back();
}

std::vector<ProcessInfo> LocalCluster::Tree(const LocalProcess& process) const {
  return ProcessTree(process.key, Mark(process));
}

Result<LocalCluster> LocalCluster::Load(const std::string& directory) {
  const std::string file = directory + "/cluster.json";
  std::error_code error;
  if (!fs::exists(file, error)) {
    return NotFound(fmt::format(
        "no local cluster in {}; start one with 'everstep local up', or name another with --dir",
        directory));
  }
  try {
    const YAML::Node root = YAML::LoadFile(file);
    LocalState state;
    state.address = root["address"].as<std::string>();
    state.ops_address = root["opsAddress"].as<std::string>();
    state.controller = ReadProcess(root["controller"]);
    for (const YAML::Node& server : root["servers"]) state.servers.push_back(ReadProcess(server));
    return LocalCluster(directory, std::move(state));
  } catch (const YAML::Exception& problem) {
    return FailedPrecondition(fmt::format("{} is damaged ({}); remove the directory {}", file,
                                          problem.what(), directory));
  }
}

void LocalCluster::Refresh() {
  if (auto fresh = Load(directory_); fresh.ok()) state_ = fresh.value().state_;
}

Status LocalCluster::Save() const {
  YAML::Emitter out;
  out.SetStringFormat(YAML::DoubleQuoted);
  out.SetMapFormat(YAML::Flow);
  out.SetSeqFormat(YAML::Flow);
  out << YAML::BeginMap << YAML::Key << "address" << YAML::Value << state_.address << YAML::Key
      << "opsAddress" << YAML::Value << state_.ops_address << YAML::Key << "controller"
      << YAML::Value;
  EmitProcess(out, state_.controller);
  out << YAML::Key << "servers" << YAML::Value << YAML::BeginSeq;
  for (const LocalProcess& server : state_.servers) EmitProcess(out, server);
  out << YAML::EndSeq << YAML::EndMap;
  const std::string file = directory_ + "/cluster.json";
  std::ofstream stream(file + ".new");
  stream << out.c_str() << '\n';
  stream.close();
  std::error_code error;
  if (stream) fs::rename(file + ".new", file, error);
  if (!stream || error)
    return FailedPrecondition(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
  return OkStatus();
}

Status LocalCluster::Start(LocalProcess& process) {
  std::error_code error;
  if (!process.root.empty()) fs::create_directories(process.root, error);
  if (error) {
    return FailedPrecondition(
        fmt::format("cannot create {}: {}; choose another --dir", process.root, error.message()));
  }
  EVERSTEP_ASSIGN_OR_RETURN(const pid_t pid,
                            SpawnDaemon(process, directory_ + "/logs/" + process.name + ".log"));
  process.key = ProcessKey{pid, StartTicks(pid)};
  return Save();
}

Status LocalCluster::WaitUntilServing(Duration timeout, size_t servers) const {
  const AdminClient client({state_.address, "local cluster"}, Seconds(2));
  const auto deadline = SteadyClock::now() + timeout;
  std::string last;
  while (SteadyClock::now() < deadline) {
    for (const LocalProcess* process : [&] {
           std::vector<const LocalProcess*> all{&state_.controller};
           for (size_t i = 0; i < state_.servers.size() && servers > 0; ++i)
             all.push_back(&state_.servers[i]);
           return all;
         }()) {
      if (!IsAlive(process->key)) {
        return FailedPrecondition(
            fmt::format("{} ended while starting: {}", process->name,
                        LastLines(directory_ + "/logs/" + process->name + ".log", 3)));
      }
    }
    const auto listed = client.Call(v1::ListServersRequest());
    if (listed.ok()) {
      size_t registered = 0;
      for (const v1::Server& server : listed.value().servers()) {
        const v1::ServerState state = server.status().state();
        registered += state == v1::SERVER_STATE_SPARE || state == v1::SERVER_STATE_ACTIVE;
      }
      if (registered >= servers) return OkStatus();
      last = fmt::format("{} of {} servers registered", registered, servers);
    } else {
      last = listed.status().message();
    }
    if (client.WaitForConnection(Milliseconds(200))) WaitMilliseconds(kPollMilliseconds);
  }
  return DeadlineExceeded(
      fmt::format("the local cluster is not ready after {:.0f} s: {}; logs are in {}/logs",
                  ToSeconds(timeout), last, directory_));
}

Result<LocalCluster> LocalCluster::Up(const LocalOptions& options) {
  if (options.servers < 1 || options.servers > kServersMax) {
    return InvalidArgument(
        fmt::format("--servers {} is not between 1 and {}", options.servers, kServersMax));
  }
  if (options.devices_per_server < 1 || options.devices_per_server > 64) {
    return InvalidArgument(
        fmt::format("--devices {} is not between 1 and 64", options.devices_per_server));
  }
  std::error_code error;
  fs::create_directories(options.directory, error);
  if (error) {
    return FailedPrecondition(fmt::format("cannot create {}: {}; choose another --dir",
                                          options.directory, error.message()));
  }
  const std::string directory = fs::canonical(options.directory, error).string();
  DirectoryLock lock(directory);
  if (auto old = Load(directory); old.ok()) {
    bool running = old.value().ControllerRuns();
    for (const LocalProcess& server : old.value().state().servers)
      running = running || !old.value().Tree(server).empty();
    if (running) {
      return FailedPrecondition(
          fmt::format("a local cluster already runs in {} (controller {}); use it, end it with "
                      "'everstep local down', or choose another --dir",
                      directory, old.value().state().address));
    }
  }
  for (const char* part : {"cluster.json", "controller", "servers", "logs"})
    fs::remove_all(directory + "/" + part, error);
  for (const char* part : {"controller", "servers", "logs"})
    fs::create_directories(directory + "/" + part, error);
  if (error)
    return FailedPrecondition(
        fmt::format("cannot write in {}: {}; choose another --dir", directory, error.message()));

  const std::string binaries = options.binaries.empty() ? OwnFolder() : options.binaries;
  LocalState state;
  const int port = FreePort();
  int ops_port = FreePort();
  while (ops_port == port && port != 0) ops_port = FreePort();
  if (port == 0 || ops_port == 0)
    return ResourceExhausted("no free loopback port for the controller");
  state.address = fmt::format("127.0.0.1:{}", port);
  state.ops_address = fmt::format("127.0.0.1:{}", ops_port);
  const std::string config = directory + "/controller/config.yaml";
  EVERSTEP_RETURN_IF_ERROR(
      WriteConfig(config, state, directory + "/controller/data", options.policy));
  state.controller.name = "controller";
  state.controller.command = {binaries + "/everstep-controller", "--config", config};
  const int digits = options.servers < 10 ? 1 : options.servers < 100 ? 2 : 3;
  for (int i = 1; i <= options.servers; ++i) {
    LocalProcess server;
    server.name = fmt::format("s{:0{}}", i, digits);
    server.root = directory + "/servers/" + server.name;
    server.command = {binaries + "/everstep-agent",
                      "--name",
                      server.name,
                      "--controller",
                      state.address,
                      "--root",
                      server.root,
                      "--devices",
                      std::to_string(options.devices_per_server)};
    server.command.insert(server.command.end(), options.agent_arguments.begin(),
                          options.agent_arguments.end());
    state.servers.push_back(std::move(server));
  }

  LocalCluster cluster(directory, std::move(state));
  Status status = cluster.Start(cluster.state_.controller);
  if (status.ok()) status = cluster.WaitUntilServing(options.timeout, 0);
  for (LocalProcess& server : cluster.state_.servers) {
    if (status.ok()) status = cluster.Start(server);
  }
  if (status.ok())
    status = cluster.WaitUntilServing(options.timeout, cluster.state_.servers.size());
  if (!status.ok()) {
    // Nothing half-started stays behind; the logs do, for whoever reads the error.
    for (const LocalProcess& server : cluster.state_.servers) {
      if (server.key.pid != 0) SignalTree(server.key, Mark(server), SIGKILL);
    }
    if (cluster.state_.controller.key.pid != 0) {
      SignalTree(cluster.state_.controller.key, Mark(cluster.state_.controller), SIGKILL);
    }
    fs::remove(directory + "/cluster.json", error);
    return status;
  }
  return cluster;
}

Status LocalCluster::Down(bool keep_files) {
  {
    DirectoryLock lock(directory_);
    Refresh();
    std::vector<const LocalProcess*> all;
    for (const LocalProcess& server : state_.servers) all.push_back(&server);
    all.push_back(&state_.controller);
    // Agents first and politely: they end their ranks. The controller last. Then whatever is left,
    // for good.
    for (const LocalProcess* process : all) {
      if (!IsAlive(process->key)) continue;
      SignalTree(process->key, Mark(*process), SIGCONT);
      kill(process->key.pid, SIGTERM);
    }
    const auto deadline = SteadyClock::now() + std::chrono::seconds(kStopGraceSeconds);
    for (const LocalProcess* process : all) {
      const auto left = std::max(std::chrono::nanoseconds(0),
                                 std::chrono::nanoseconds(deadline - SteadyClock::now()));
      WaitUntilGone(process->key, left);
      SignalTree(process->key, Mark(*process), SIGKILL);
    }
    for (const LocalProcess* process : all) {
      if (!WaitUntilGone(process->key, Seconds(5))) {
        return Internal(fmt::format("{} (pid {}) does not die", process->name, process->key.pid));
      }
    }
    std::error_code error;
    fs::remove(directory_ + "/cluster.json", error);
  }
  if (!keep_files) {
    std::error_code error;
    for (const char* part : {"controller", "servers", "logs", "lock"})
      fs::remove_all(directory_ + "/" + part, error);
    fs::remove(directory_, error);  // only when nothing else is in it
  }
  return OkStatus();
}

Result<LocalProcess*> LocalCluster::Find(const std::string& name) {
  if (name == "controller") return &state_.controller;
  std::string names = "controller";
  for (LocalProcess& server : state_.servers) {
    if (server.name == name) return &server;
    names += ", " + server.name;
  }
  return InvalidArgument(
      fmt::format("no server '{}' in the local cluster; there are {}", name, names));
}

Result<int> LocalCluster::Kill(const std::vector<std::string>& names) {
  DirectoryLock lock(directory_);
  Refresh();
  std::vector<const LocalProcess*> victims;
  for (const std::string& name : names) {
    EVERSTEP_ASSIGN_OR_RETURN(const LocalProcess* process, Find(name));
    victims.push_back(process);
  }
  // Machines die with their memory and disk at one instant. Stopping all trees first makes it look
  // so: nobody acts between the loss of a directory and the loss of its processes, and nothing is
  // left to read when recovery begins.
  size_t members = 0;
  for (const LocalProcess* victim : victims) {
    members += SignalTree(victim->key, Mark(*victim), SIGSTOP).size();
  }
  std::error_code error;
  for (const LocalProcess* victim : victims) {
    if (victim->root.empty()) continue;  // the controller's data is its disk, and stays
    fs::remove_all(victim->root + ".destroyed", error);
    fs::rename(victim->root, victim->root + ".destroyed", error);
  }
  for (const LocalProcess* victim : victims) SignalTree(victim->key, Mark(*victim), SIGKILL);
  for (const LocalProcess* victim : victims) {
    WaitUntilGone(victim->key, Seconds(5));
    if (victim->root.empty()) continue;
    fs::remove_all(victim->root + ".destroyed", error);
    fs::remove_all(victim->root, error);
  }
  return static_cast<int>(members);
}

Result<int> LocalCluster::Pause(const std::string& name) {
  EVERSTEP_ASSIGN_OR_RETURN(const LocalProcess* process, Find(name));
  return static_cast<int>(SignalTree(process->key, Mark(*process), SIGSTOP).size());
}

Result<int> LocalCluster::Resume(const std::string& name) {
  EVERSTEP_ASSIGN_OR_RETURN(const LocalProcess* process, Find(name));
  return static_cast<int>(SignalTree(process->key, Mark(*process), SIGCONT).size());
}

Status LocalCluster::Restart(const std::string& name) {
  DirectoryLock lock(directory_);
  Refresh();
  EVERSTEP_ASSIGN_OR_RETURN(LocalProcess * process, Find(name));
  SignalTree(process->key, Mark(*process), SIGKILL);
  if (process->key.pid != 0 && !WaitUntilGone(process->key, Seconds(5))) {
    return Internal(fmt::format("{} (pid {}) does not die", name, process->key.pid));
  }
  EVERSTEP_RETURN_IF_ERROR(Start(*process));
  return OkStatus();
}

Result<std::string> LocalCluster::Add() {
  DirectoryLock lock(directory_);
  Refresh();
  if (state_.servers.size() >= kServersMax)
    return ResourceExhausted(fmt::format("at most {} local servers", kServersMax));
  const LocalProcess& first = state_.servers.front();
  LocalProcess server;
  server.name = fmt::format("s{:0{}}", state_.servers.size() + 1, first.name.size() - 1);
  server.root = directory_ + "/servers/" + server.name;
  server.command = first.command;
  for (std::string& argument : server.command) {
    if (argument == first.name) argument = server.name;
    if (argument == first.root) argument = server.root;
  }
  state_.servers.push_back(server);
  EVERSTEP_RETURN_IF_ERROR(Start(state_.servers.back()));
  return server.name;
}

}  // namespace everstep::cli
