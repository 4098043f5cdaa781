#include "controller/io/config/controller_config.h"

#include <fmt/format.h>

#include "controller/io/config/yaml_message.h"
#include "proto/convert/reader.h"

namespace everstep {
namespace {

struct DurationField {
  const char* name;
  Duration Policy::*field;
  bool (v1::PolicyConfig::*has)() const;
  const google::protobuf::Duration& (v1::PolicyConfig::*get)() const;
  google::protobuf::Duration* (v1::PolicyConfig::*change)();
};

#define EVERSTEP_DURATION(name)                                                                              \
  DurationField {                                                                                            \
    #name, &Policy::name, &v1::PolicyConfig::has_##name, &v1::PolicyConfig::name, &v1::PolicyConfig::mutable_##name \
  }
constexpr DurationField kDurations[] = {
    EVERSTEP_DURATION(heartbeat_interval), EVERSTEP_DURATION(lease),
    EVERSTEP_DURATION(probe_timeout),      EVERSTEP_DURATION(recovery_budget),
    EVERSTEP_DURATION(process_start_timeout), EVERSTEP_DURATION(adoption_grace),
    EVERSTEP_DURATION(mass_silence_hold),  EVERSTEP_DURATION(join_settle),
    EVERSTEP_DURATION(regrow_delay)};
#undef EVERSTEP_DURATION

struct CountField {
  const char* name;
  int Policy::*field;
  bool (v1::PolicyConfig::*has)() const;
  int32_t (v1::PolicyConfig::*get)() const;
  void (v1::PolicyConfig::*set)(int32_t);
};

#define EVERSTEP_COUNT(name) \
  CountField { #name, &Policy::name, &v1::PolicyConfig::has_##name, &v1::PolicyConfig::name, &v1::PolicyConfig::set_##name }
constexpr CountField kCounts[] = {EVERSTEP_COUNT(servers_max), EVERSTEP_COUNT(jobs_max),
                                  EVERSTEP_COUNT(recoveries_kept), EVERSTEP_COUNT(events_kept)};
#undef EVERSTEP_COUNT

// The host of host:port, or a problem.
std::optional<std::string> HostOf(const char* field, const std::string& address, std::vector<std::string>* problems) {
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == std::string::npos || colon == 0 || !digits || std::stoi(port) > 65535) {
    problems->push_back(fmt::format("{}: \"{}\" is not host:port; write for example 127.0.0.1:7070", field, address));
    return std::nullopt;
  }
  return address.substr(0, colon);
}

bool IsWildcard(const std::string& host) { return host == "0.0.0.0" || host == "[::]" || host == "::"; }

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host.rfind("127.", 0) == 0 || host == "::1" || host == "[::1]";
}

struct FieldText {
  const char* name;
  const char* legal;
  const char* meaning;
};

constexpr FieldText kFieldTexts[] = {
    {"data_directory", "a folder", "Holds the ledger; created when missing, used by one controller at a time"},
    {"listen", "host:port", "Where agents and operators connect; port 0 takes any, see the file `endpoint` in the data directory"},
    {"ops_listen", "host:port", "HTTP: /metrics, /livez, /readyz and a page for people"},
    {"heartbeat_listen", "host:port", "UDP socket of heartbeats"},
    {"heartbeat_address", "host:port", "Where agents send heartbeats, when that is not the address that is bound"},
    {"allow_insecure", "true, false", "Serve without TLS on addresses other than loopback; logged at each start"},
    {"log.format", "text, json", "One line per event on stderr"},
    {"log.level", "debug, info, error", "Least level that is written"},
    {"ledger.snapshot_records", "10 to 1000000", "Records after which the ledger is compacted"},
    {"ledger.snapshot_bytes", "65536 to 1073741824", "Bytes of records after which the ledger is compacted"},
    {"policy.heartbeat_interval", "20ms to 10s", "How often agents send a datagram"},
    {"policy.lease", "100ms to 10m, at least 4 heartbeat intervals", "Silence after which a server may be replaced"},
    {"policy.probe_timeout", "10ms to 30s", "How long a silent server's stream and port may stay mute"},
    {"policy.recovery_budget", "1s to 1h", "From the fence to Resume; all timeouts of a recovery are derived from it"},
    {"policy.process_start_timeout", "1s to 1h", "From spawn to Join, outside the budget when there is no standby"},
    {"policy.adoption_grace", "200ms to 10m, at least 2 leases", "How long a restarted controller waits for agents to report"},
    {"policy.mass_silence_hold", "200ms to 1h, at least 2 leases", "How long the controller stays frozen before it believes in a mass loss"},
    {"policy.join_settle", "0s to 10m", "How long a first plan waits for more servers to register"},
    {"policy.regrow_delay", "0s to 1h", "How long a new server must stay healthy before a job grows onto it"},
    {"policy.servers_max", "1 to 100000", "Servers and agents' streams at once"},
    {"policy.jobs_max", "1 to 100000", "Jobs that have not ended"},
    {"policy.recoveries_kept", "1 to 200", "Timelines kept for `get recoveries`"},
    {"policy.events_kept", "1 to 100000", "Events kept for `get events`"},
    {"policy.collect_timeout", "derived", "Budget / 20: answers of survivors"},
    {"policy.assign_timeout", "derived", "Budget / 4: from Assign to Connected"},
    {"policy.restore_timeout", "derived", "Budget / 2: state back in memory"},
    {"policy.resume_timeout", "derived", "Budget / 8: from ready to stepping"},
};

}  // namespace

std::vector<ConfigField> ConfigReference() {
  v1::ControllerConfig config;
  config.set_data_directory("<required>");
  std::vector<ConfigField> out;
  for (const auto& [name, value] : DescribeConfig(WithDefaults(config))) {
    ConfigField field{name, value, "", ""};
    for (const FieldText& text : kFieldTexts) {
      if (name == text.name) {
        field.legal = text.legal;
        field.meaning = text.meaning;
      }
    }
    out.push_back(std::move(field));
  }
  return out;
}

LoadedConfig LoadControllerConfig(const std::string& path) {
  const auto text = ReadSmallFile(path);
  if (!text.ok()) return {{}, {}, {text.status().message()}};
  return ParseControllerConfig(*text, path);
}

LoadedConfig ParseControllerConfig(const std::string& text, const std::string& name) {
  LoadedConfig loaded;
  YamlReading reading = ReadYaml(text, name, &loaded.config);
  loaded.lines = std::move(reading.lines);
  loaded.problems = std::move(reading.problems);
  return loaded;
}

v1::ControllerConfig WithDefaults(const v1::ControllerConfig& config) {
  v1::ControllerConfig out = config;
  if (out.listen().empty()) out.set_listen("127.0.0.1:7070");
  if (out.ops_listen().empty()) out.set_ops_listen("127.0.0.1:7071");
  if (out.log().format() == v1::LOG_FORMAT_UNSPECIFIED) out.mutable_log()->set_format(v1::LOG_FORMAT_TEXT);
  if (out.log().level() == v1::LOG_LEVEL_UNSPECIFIED) out.mutable_log()->set_level(v1::LOG_LEVEL_INFO);
  if (!out.ledger().has_snapshot_records()) out.mutable_ledger()->set_snapshot_records(1000);
  if (!out.ledger().has_snapshot_bytes()) out.mutable_ledger()->set_snapshot_bytes(8 << 20);
  const Policy defaults;
  v1::PolicyConfig* policy = out.mutable_policy();
  for (const DurationField& f : kDurations) {
    if (!(policy->*f.has)()) WriteDuration(defaults.*f.field, (policy->*f.change)());
  }
  for (const CountField& f : kCounts) {
    if (!(policy->*f.has)()) (policy->*f.set)(defaults.*f.field);
  }
  return out;
}

std::vector<std::string> Validate(const v1::ControllerConfig& config) {
  std::vector<std::string> problems;
  if (config.data_directory().empty()) {
    problems.push_back("data_directory: is missing; name a folder for the ledger, or give --data-dir");
  }
  const auto listen = HostOf("listen", config.listen(), &problems);
  const auto ops = HostOf("ops_listen", config.ops_listen(), &problems);
  std::optional<std::string> heartbeat = listen;
  if (!config.heartbeat_listen().empty()) {
    heartbeat = HostOf("heartbeat_listen", config.heartbeat_listen(), &problems);
  }
  if (!config.heartbeat_address().empty()) {
    HostOf("heartbeat_address", config.heartbeat_address(), &problems);
  } else if (heartbeat && IsWildcard(*heartbeat)) {
    problems.push_back(fmt::format("heartbeat_address: is missing, and {} is no address that agents can send to; name "
                                   "the one they reach this controller at", *heartbeat));
  }
  if (!config.allow_insecure()) {
    if (listen && !IsLoopback(*listen)) {
      problems.push_back(fmt::format("listen: {} is not loopback, and connections are not encrypted; listen on "
                                     "127.0.0.1, or set allow_insecure", config.listen()));
    }
    if (ops && !IsLoopback(*ops)) {
      problems.push_back(fmt::format("ops_listen: {} is not loopback, and the page is open to all who reach it; listen "
                                     "on 127.0.0.1, or set allow_insecure", config.ops_listen()));
    }
  }
  const auto in_range = [&](const char* field, int64_t value, int64_t lowest, int64_t highest) {
    if (value >= lowest && value <= highest) return;
    problems.push_back(fmt::format("{}: {} is outside {} to {}; choose a value in that range", field, value, lowest,
                                   highest));
  };
  in_range("ledger.snapshot_records", config.ledger().snapshot_records(), 10, 1'000'000);
  in_range("ledger.snapshot_bytes", config.ledger().snapshot_bytes(), 64 << 10, int64_t{1} << 30);
  for (const std::string& problem : ValidatePolicy(PolicyOf(config))) problems.push_back("policy." + problem);
  return problems;
}

std::vector<std::string> WithLines(std::vector<std::string> problems, const std::string& name,
                                   const std::map<std::string, int>& lines) {
  for (std::string& problem : problems) {
    const auto line = lines.find(problem.substr(0, problem.find(':')));
    problem = line == lines.end() ? fmt::format("{}: {}", name, problem)
                                  : fmt::format("{}:{}: {}", name, line->second, problem);
  }
  return problems;
}

Policy PolicyOf(const v1::ControllerConfig& config) {
  Policy out;
  for (const DurationField& f : kDurations) out.*f.field = ReadDurationClamped((config.policy().*f.get)());
  for (const CountField& f : kCounts) out.*f.field = (config.policy().*f.get)();
  return out;
}

std::vector<std::pair<std::string, std::string>> DescribeConfig(const v1::ControllerConfig& config) {
  std::vector<std::pair<std::string, std::string>> out = {
      {"data_directory", config.data_directory()},
      {"listen", config.listen()},
      {"ops_listen", config.ops_listen()},
      {"heartbeat_listen", config.heartbeat_listen().empty() ? "<as listen>" : config.heartbeat_listen()},
      {"heartbeat_address", config.heartbeat_address().empty() ? "<as bound>" : config.heartbeat_address()},
      {"allow_insecure", config.allow_insecure() ? "true" : "false"},
      {"log.format", config.log().format() == v1::LOG_FORMAT_JSON ? "json" : "text"},
      {"log.level", config.log().level() == v1::LOG_LEVEL_DEBUG   ? "debug"
                    : config.log().level() == v1::LOG_LEVEL_ERROR ? "error"
                                                                  : "info"},
      {"ledger.snapshot_records", fmt::format("{}", config.ledger().snapshot_records())},
      {"ledger.snapshot_bytes", fmt::format("{}", config.ledger().snapshot_bytes())}};
  for (const auto& [name, value] : DescribePolicy(PolicyOf(config))) {
    out.emplace_back("policy." + name.substr(0, name.find(' ')), value);  // "lease", "assign_timeout (derived)"
  }
  return out;
}

}  // namespace everstep
