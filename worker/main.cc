// everstep-agent: one per server. Wiring only.
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#include "worker/io/agent_shell.h"
#include "worker/io/gpu_inventory.h"
#include "worker/io/logging.h"
#include "worker/io/root_directory.h"
#include "worker/io/snapshot_keeper_service.h"

namespace everstep {
namespace {

constexpr int kExitUsage = 2;

struct Flags {
  std::string controller = "127.0.0.1:7700";
  std::string name;
  std::string root;
  std::string failure_domain;
  std::string host = "127.0.0.1";
  int devices = 0;                   // 0: the GPUs, or one CPU slot where there are none
  std::string device_model = "cpu";
  double device_speed = 1.0;
  std::string log_level = "info";
  bool log_json = false;
};

bool ValidName(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= 63 && std::all_of(name.begin(), name.end(), allowed);
}

// Empty when all is well; else one line: field, value, remedy.
std::string CheckFlags(const Flags& flags) {
  if (!ValidName(flags.name)) {
    return "--name: \"" + flags.name + "\" is not a server name: use 1 to 63 letters, digits, '-', '_' or '.'";
  }
  if (flags.root.empty()) return "--root: not given: name a directory that this user can write";
  if (flags.controller.rfind(':') == std::string::npos) {
    return "--controller: \"" + flags.controller + "\" is not host:port";
  }
  if (flags.devices < 0 || flags.devices > 256) {
    return "--devices: " + std::to_string(flags.devices) + " is out of range: use 1 to 256, or 0 for the GPUs";
  }
  if (!(flags.device_speed > 0)) {
    return "--device-speed: " + std::to_string(flags.device_speed) + " is out of range: use a number above 0";
  }
  return "";
}

ServerInventory MakeInventory(const Flags& flags) {
  ServerInventory inventory;
  inventory.server = ServerId(flags.name);
  inventory.failure_domain = flags.failure_domain.empty() ? flags.name : flags.failure_domain;
  inventory.host = flags.host;
  inventory.version = EVERSTEP_VERSION;
  inventory.cpu_count = static_cast<uint32_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  struct sysinfo system{};
  if (sysinfo(&system) == 0) inventory.memory_bytes = uint64_t{system.totalram} * system.mem_unit;
  if (flags.devices == 0) inventory.devices = FindGpus();
  for (Device& device : inventory.devices) device.speed = flags.device_speed;
  const int slots = flags.devices > 0 ? flags.devices : inventory.devices.empty() ? 1 : 0;
  for (int i = 0; i < slots; ++i) {
    Device device;
    device.index = DeviceIndex(i);
    device.model = flags.device_model;
    device.memory_bytes = inventory.memory_bytes / static_cast<uint64_t>(slots);
    device.speed = flags.device_speed;
    inventory.devices.push_back(std::move(device));
  }
  return inventory;
}

int Refuse(const std::string& message) {
  std::fprintf(stderr, "everstep-agent: %s\n", message.c_str());
  return kExitUsage;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"everstep-agent: supervises the training processes of one server"};
  app.add_option("--controller", flags.controller, "host:port of the controller")->capture_default_str();
  app.add_option("--name", flags.name, "unique name of this server")->required();
  app.add_option("--root", flags.root, "directory of this agent's own")->required();
  app.add_option("--failure-domain", flags.failure_domain, "servers of one domain may fail together (default: the name)");
  app.add_option("--host", flags.host, "address on which this server is reached")->capture_default_str();
  app.add_option("--devices", flags.devices, "number of CPU slots; 0: the NVIDIA GPUs, or one CPU slot where there are none")
      ->capture_default_str();
  app.add_option("--device-model", flags.device_model, "model of the CPU slots")->capture_default_str();
  app.add_option("--device-speed", flags.device_speed, "relative speed of one device")->capture_default_str();
  app.add_option("--log-level", flags.log_level, "debug, info, warn or error")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}))
      ->capture_default_str();
  app.add_flag("--log-json", flags.log_json, "log lines are JSON objects");
  app.set_version_flag("--version", std::string(EVERSTEP_VERSION));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (const std::string problem = CheckFlags(flags); !problem.empty()) return Refuse(problem);
  StartLogging(flags.log_level, flags.log_json);

  // Signals come through a descriptor, on a thread that only turns them into a request. All threads inherit the mask.
  signal(SIGPIPE, SIG_IGN);
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigaddset(&stop_signals, SIGUSR2);  // ours: ends the thread below
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);

  auto root = OpenRoot(flags.root);
  if (!root.ok()) return Refuse(root.status().message());
  const ProcessCgroups cgroups = ProcessCgroups::Find(root->path);
  if (auto left = cgroups.RemoveLeftovers(Seconds(10)); !left.ok()) {
    return Refuse("--root: " + left.status().message() + ": end it, or restart the machine");
  } else if (*left > 0) {
    WriteNotice({AgentNoticeLevel::kWarning, Reason::kServerRestarted, "Leftovers of an earlier agent killed",
                 {{"processes", std::to_string(*left)}, {"cgroup", cgroups.folder()}}});
  }
  auto leftovers = KillLeftovers(*root);
  if (!leftovers.ok()) return Refuse("--root: " + leftovers.status().message() + ": end it, or restart the machine");
  if (*leftovers > 0) {
    WriteNotice({AgentNoticeLevel::kWarning, Reason::kServerRestarted, "Leftovers of an earlier agent killed",
                 {{"processes", std::to_string(*leftovers)}}});
  }

  AgentShellOptions options;
  options.controller = flags.controller;
  options.inventory = MakeInventory(flags);
  options.root = root->path;
  options.cgroups = cgroups;
  SnapshotKeeperServiceOptions keeper;
  keeper.server = ServerId(flags.name);
  keeper.host = flags.host;
  keeper.store_directory = root->path + "/store";
  options.make_snapshots = [keeper](SnapshotService::Handler handler) {
    return MakeSnapshotKeeperService(keeper, std::move(handler));
  };
  std::random_device random;
  options.seed = (uint64_t{random()} << 32) | random();
  const size_t device_count = options.inventory.devices.size();
  auto shell = AgentShell::Create(std::move(options));
  if (!shell.ok()) return Refuse(shell.status().message());
  WriteNotice({AgentNoticeLevel::kInfo, Reason::kNone, "Agent started",
               {{"server", flags.name}, {"root", root->path}, {"controller", flags.controller},
                {"host", flags.host}, {"devices", std::to_string(device_count)}, {"cgroup", cgroups.available() ? cgroups.folder() : "<none>"}, {"version", EVERSTEP_VERSION}}});

  std::thread signals([&] {
    for (;;) {
      int signal = 0;
      if (sigwait(&stop_signals, &signal) != 0 || signal == SIGUSR2) return;
      (*shell)->RequestStop();
    }
  });
  const int code = (*shell)->Run();
  pthread_kill(signals.native_handle(), SIGUSR2);
  signals.join();
  if (code == kExitUsage) return Refuse((*shell)->exit_message());
  shell->reset();
  cgroups.Close();
  WriteNotice({AgentNoticeLevel::kInfo, Reason::kNone, "Agent stopped", {{"exitCode", std::to_string(code)}}});
  return code;
}

}  // namespace
}  // namespace everstep

int main(int argc, char** argv) { return everstep::Main(argc, argv); }
