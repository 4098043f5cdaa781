// `everstep config|doctor|version|reference`: tools around a cluster.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "controller/cli/command_line.h"
#include "controller/cli/job_flags.h"
#include "controller/cli/local_cluster.h"
#include "controller/cli/output.h"
#include "proto/model/progress.h"

#ifndef EVERSTEP_VERSION
#error "EVERSTEP_VERSION comes from the build"
#endif

namespace everstep::cli {
namespace {

int ShowVersion(const CommandLine& line) {
  if (line.globals.output == "json") {
    Print(fmt::format("{{\"version\": \"{}\", \"protocolVersion\": {}}}\n", EVERSTEP_VERSION,
                      kProtocolVersion));
  } else {
    Print(fmt::format("everstep {} (protocol {})\n", EVERSTEP_VERSION, kProtocolVersion));
  }
  return kExitDone;
}

int ViewConfig(const CommandLine& line) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto response = client.value().Call(v1::GetConfigRequest());
  if (!response.ok()) return Fail(response.status());
  if (line.globals.output == "json") {
    Print(Json(response.value()));
    return kExitDone;
  }
  Table table({"NAME", "VALUE"});
  for (const v1::KeyValue& entry : response.value().effective())
    table.AddRow({entry.key(), entry.value()});
  Print(table.Text());
  return kExitDone;
}

int ValidateConfig(const std::string& file) {
  v1::ControllerConfig config;
  const Status status = ReadMessageFile(file, &config);
  if (!status.ok()) return Fail(status);
  Print(fmt::format("{} is valid\n", file));
  return kExitDone;
}

struct Check {
  std::string name;
  bool good;
  std::string detail;
};

Check CheckBinary(const std::string& name) {
  std::error_code error;
  const std::string path =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / name;
  const bool good = access(path.c_str(), X_OK) == 0;
  return {
      name, good,
      good ? path : path + " is missing or not executable; build or install Everstep completely"};
}

Check CheckLoopback() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool good = fd >= 0 &&
                    bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                    listen(fd, 1) == 0;
  if (fd >= 0) close(fd);
  return {"loopback", good,
          good ? "127.0.0.1 accepts connections"
               : "127.0.0.1 cannot be bound; bring the loopback interface up"};
}

Check CheckFiles() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool good = limit.rlim_cur >= 1024;
  return {"open-files", good,
          fmt::format("limit {}{}", limit.rlim_cur,
                      good ? "" : "; raise it to 1024 or more with ulimit -n")};
}

Check CheckSharedMemory() {
  struct statvfs info {};
  const bool there = statvfs("/dev/shm", &info) == 0;
  const uint64_t free = there ? static_cast<uint64_t>(info.f_bavail) * info.f_frsize : 0;
  const bool good = free >= (64u << 20);
  return {"shared-memory", good,
          fmt::format("/dev/shm has {} free{}", Bytes(free),
                      good ? "" : "; snapshots need 64 MiB or more")};
}

Check CheckDirectory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  const bool good = !error && access(directory.c_str(), W_OK) == 0;
  return {"local-directory", good,
          good ? directory : directory + " is not writable; name another with --dir"};
}

Check CheckController(const CommandLine& line) {
  const auto client = line.Connect();
  if (!client.ok()) {
    const bool none = client.status().code() == StatusCode::kNotFound;
    return {"controller", none,
            none ? "none configured; `run` starts its own" : client.status().message()};
  }
  const auto info = client.value().Call(v1::GetControllerInfoRequest());
  if (!info.ok()) return {"controller", false, info.status().message()};
  const bool same = info.value().protocol_version() == kProtocolVersion;
  return {
      "controller", same,
      same ? fmt::format("{} answers, version {}, {} agents", client.value().controller().address,
                         info.value().version(), info.value().agents_connected())
           : fmt::format("{} speaks protocol {}, this command {}; use the same version",
                         client.value().controller().address, info.value().protocol_version(),
                         kProtocolVersion)};
}

int Doctor(const CommandLine& line) {
  const std::vector<Check> checks = {CheckBinary("everstep-controller"),
                                     CheckBinary("everstep-agent"),
                                     CheckLoopback(),
                                     CheckFiles(),
                                     CheckSharedMemory(),
                                     CheckDirectory(line.LocalDirectory()),
                                     CheckController(line)};
  Table table({"CHECK", "RESULT", "DETAIL"});
  bool good = true;
  for (const Check& check : checks) {
    table.AddRow({check.name, check.good ? "ok" : "FAILED", check.detail});
    good = good && check.good;
  }
  Print(table.Text());
  return good ? kExitDone : kExitFailure;
}

}  // namespace

void AddToolCommands(CommandLine& line) {
  CLI::App* config = line.AddGroup(&line.app, "config", "The controller's configuration");
  CLI::App* view = line.Add(config, "view", "The values in force, derived timeouts included",
                            "  everstep config view", [&line] { return ViewConfig(line); });
  line.AddOutputFlag(view, "json");
  line.AddControllerFlags(view);
  auto file = std::make_shared<std::string>();
  CLI::App* validate = line.Add(
      config, "validate", "Check a configuration file; names every problem",
      "  everstep config validate -f controller.yaml", [file] { return ValidateConfig(*file); });
  validate->add_option("-f,--file", *file, "The file")->required()->type_name("FILE");

  CLI::App* doctor = line.Add(&line.app, "doctor", "Check what Everstep needs on this machine",
                              "  everstep doctor", [&line] { return Doctor(line); });
  line.AddControllerFlags(doctor);

  CLI::App* version = line.Add(&line.app, "version", "Print the version", "  everstep version",
                               [&line] { return ShowVersion(line); });
  line.AddOutputFlag(version, "json");

  line.Add(&line.app, "reference", "Print docs/cli.md, made from the commands themselves",
           "  everstep reference > docs/cli.md", [&line] {
             Print(ReferencePage(line.app));
             return kExitDone;
           });
}

}  // namespace everstep::cli
