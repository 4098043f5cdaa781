// everstep-controller: flags and configuration file -> ControllerShell, until SIGTERM or SIGINT. Wiring only.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <string>
#include <vector>

#include "controller/io/config/controller_config.h"
#include "controller/io/log/log.h"
#include "controller/io/ops/metrics.h"
#include "controller/io/shell/controller_shell.h"

namespace everstep {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

int Fail(int code, const std::vector<std::string>& problems) {
  for (const std::string& problem : problems) std::fprintf(stderr, "everstep-controller: %s\n", problem.c_str());
  return code;
}

// For docs/config.md and docs/metrics.md, which a lint compares with this.
void PrintReference(const std::string& which) {
  if (which == "metrics") {
    for (const Metrics::Description& metric : Metrics::Describe()) {
      fmt::print("| `{}` | {} | {} | {} |\n", metric.name, metric.type,
                 metric.labels.empty() ? "" : "`" + metric.labels + "`", metric.help);
    }
    return;
  }
  for (const ConfigField& field : ConfigReference()) {
    fmt::print("| `{}` | `{}` | {} | {} |\n", field.name, field.standard, field.legal, field.meaning);
  }
}

struct Flags {
  std::string config_file, data_directory, listen, ops_listen, heartbeat_listen, heartbeat_address, log_format, log_level;
  std::string reference;
  bool allow_insecure = false;
  bool check = false;
};

void AddFlags(CLI::App& app, Flags& flags) {
  app.add_option("--config", flags.config_file, "Configuration file, YAML or JSON (docs/config.md)")
      ->envname("EVERSTEP_CONTROLLER_CONFIG");
  app.add_option("--data-dir", flags.data_directory, "Folder of the ledger; one controller at a time uses it")
      ->envname("EVERSTEP_DATA_DIR");
  app.add_option("--listen", flags.listen, "host:port for agents and operators; port 0: any [127.0.0.1:7070]")
      ->envname("EVERSTEP_LISTEN");
  app.add_option("--ops-listen", flags.ops_listen, "host:port for metrics, health and the page [127.0.0.1:7071]")
      ->envname("EVERSTEP_OPS_LISTEN");
  app.add_option("--heartbeat-listen", flags.heartbeat_listen, "UDP host:port of heartbeats [as --listen]")
      ->envname("EVERSTEP_HEARTBEAT_LISTEN");
  app.add_option("--heartbeat-address", flags.heartbeat_address, "Where agents send heartbeats [as bound]")
      ->envname("EVERSTEP_HEARTBEAT_ADDRESS");
  app.add_option("--log-format", flags.log_format, "text or json")->check(CLI::IsMember({"text", "json"}));
  app.add_option("--log-level", flags.log_level, "debug, info or error")->check(CLI::IsMember({"debug", "info", "error"}));
  app.add_flag("--allow-insecure", flags.allow_insecure, "Serve without TLS on addresses other than loopback");
  app.add_flag("--check", flags.check, "Check the configuration, print what is in effect, and exit");
  app.add_option("--reference", flags.reference, "Print a table of the documentation: config or metrics")
      ->check(CLI::IsMember({"config", "metrics"}));
  app.footer("Exit codes: 0 asked to stop, 1 failure while running, 2 usage, configuration or start.\n"
             "Example: everstep-controller --data-dir /var/lib/everstep --listen 127.0.0.1:7070");
}

void Override(const Flags& flags, v1::ControllerConfig* config) {
  if (!flags.data_directory.empty()) config->set_data_directory(flags.data_directory);
  if (!flags.listen.empty()) config->set_listen(flags.listen);
  if (!flags.ops_listen.empty()) config->set_ops_listen(flags.ops_listen);
  if (!flags.heartbeat_listen.empty()) config->set_heartbeat_listen(flags.heartbeat_listen);
  if (!flags.heartbeat_address.empty()) config->set_heartbeat_address(flags.heartbeat_address);
  if (flags.allow_insecure) config->set_allow_insecure(true);
  if (flags.log_format == "json") config->mutable_log()->set_format(v1::LOG_FORMAT_JSON);
  if (flags.log_format == "text") config->mutable_log()->set_format(v1::LOG_FORMAT_TEXT);
  if (flags.log_level == "debug") config->mutable_log()->set_level(v1::LOG_LEVEL_DEBUG);
  if (flags.log_level == "info") config->mutable_log()->set_level(v1::LOG_LEVEL_INFO);
  if (flags.log_level == "error") config->mutable_log()->set_level(v1::LOG_LEVEL_ERROR);
}

int Run(const v1::ControllerConfig& config) {
  // Every thread inherits the mask: signals are taken below, by one thread, between turns.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  LogOptions log;
  log.json = config.log().format() == v1::LOG_FORMAT_JSON;
  log.level = config.log().level() == v1::LOG_LEVEL_DEBUG   ? LogLevel::kDebug
              : config.log().level() == v1::LOG_LEVEL_ERROR ? LogLevel::kError
                                                            : LogLevel::kInfo;
  InitLog(log);
  auto shell = ControllerShell::Start({config, EVERSTEP_VERSION, EVERSTEP_REVISION, nullptr});
  if (!shell.ok()) {
    const bool start = shell.status().code() == StatusCode::kFailedPrecondition;
    return Fail(start ? kExitUsage : kExitFailure, {shell.status().message()});
  }
  LogKeys effective;
  for (auto& entry : DescribeConfig(config)) effective.push_back(std::move(entry));
  Log(LogLevel::kInfo, "Configuration in effect", effective);
  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  Log(LogLevel::kInfo, "Controller was asked to stop", {{"signal", signal_number == SIGTERM ? "TERM" : "INT"}});
  // A second signal ends the process at once.
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  (*shell)->Stop();
  Log(LogLevel::kInfo, "Controller stopped");
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app("The controller of an Everstep cluster: watches servers, recovers jobs, keeps the ledger",
               "everstep-controller");
  Flags flags;
  AddFlags(app, flags);
  app.set_version_flag("--version", EVERSTEP_VERSION);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (!flags.reference.empty()) {
    PrintReference(flags.reference);
    return 0;
  }
  LoadedConfig loaded;
  if (!flags.config_file.empty()) loaded = LoadControllerConfig(flags.config_file);
  if (!loaded.problems.empty()) return Fail(kExitUsage, loaded.problems);
  Override(flags, &loaded.config);
  const v1::ControllerConfig config = WithDefaults(loaded.config);
  std::vector<std::string> problems = Validate(config);
  if (!problems.empty()) {
    if (!flags.config_file.empty()) problems = WithLines(std::move(problems), flags.config_file, loaded.lines);
    return Fail(kExitUsage, problems);
  }
  if (flags.check) {
    for (const auto& [name, value] : DescribeConfig(config)) fmt::print("{} {}\n", name, value);
    return 0;
  }
  return Run(config);
}

}  // namespace
}  // namespace everstep

int main(int argc, char** argv) { return everstep::Main(argc, argv); }
