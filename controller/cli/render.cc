#include "controller/cli/render.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "controller/cli/output.h"

namespace everstep::cli {
namespace {

double Milliseconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) * 1e3 + duration.nanos() / 1e6;
}

std::string Or(const std::string& text, const char* absent) { return text.empty() ? absent : text; }
std::string ReasonText(const std::string& reason) {
  return reason.empty() || reason == "None" ? "" : reason;
}
std::string Short(double milliseconds) {
  return milliseconds < 10000 ? fmt::format("{:.1f}ms", milliseconds)
                              : fmt::format("{:.1f}s", milliseconds / 1000);
}

std::string Layout(const v1::JobStatus& status) {
  if (status.world_size() == 0) return "";
  return fmt::format("{}x{}x{}", status.dp_size(), status.tp_size(), status.pp_size());
}

std::string MetricOf(const v1::JobStatus& status, const std::string& name) {
  for (const v1::Metric& metric : status.metrics()) {
    if (metric.name() == name) return fmt::format("{:.4f}", metric.value());
  }
  return "";
}

void AddLine(std::string& text, const std::string& title, const std::string& value) {
  text += fmt::format("{:<18}{}\n", title + ":", value.empty() ? "<none>" : value);
}

std::string Indented(const std::string& table) {
  std::string text;
  for (size_t begin = 0; begin < table.size();) {
    const size_t end = table.find('\n', begin);
    text += "  " + table.substr(begin, end - begin) + "\n";
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return text;
}

template <typename Conditions>
std::string ConditionTable(const Conditions& conditions) {
  Table table({"TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"});
  for (const v1::Condition& condition : conditions) {
    table.AddRow({condition.type(),
                  CamelCase(v1::ConditionStatus_Name(condition.status()), "CONDITION_STATUS_"),
                  ReasonText(condition.reason()), Age(condition.last_transition_time()),
                  condition.message()});
  }
  return Indented(table.Text());
}

std::string PlaceTable(const google::protobuf::RepeatedPtrField<v1::RankPlace>& places,
                       bool with_job) {
  std::vector<std::string> titles = {"RANK",  "SERVER", "DEVICE",   "PID",     "PHASE",
                                     "VOTED", "SHARE",  "DPxTPxPP", "RESTORED"};
  if (with_job) titles.insert(titles.begin(), "JOB");
  Table table(titles);
  for (const v1::RankPlace& place : places) {
    std::vector<std::string> row = {
        place.rank() >= 0       ? std::to_string(place.rank())
        : place.ready_standby() ? "standby"
                                : "starting",
        place.server(),
        std::to_string(place.device()),
        std::to_string(place.pid()),
        CamelCase(v1::RankPhase_Name(place.phase()), "RANK_PHASE_"),
        std::to_string(place.vote_passed()),
        place.micro_batch_count() == 0
            ? ""
            : fmt::format("{}-{}", place.micro_batch_first(),
                          place.micro_batch_first() + place.micro_batch_count() - 1),
        place.rank() >= 0 ? fmt::format("{},{},{}", place.dp(), place.tp(), place.pp()) : "",
        place.restored_from()};
    if (with_job) row.insert(row.begin(), place.job());
    table.AddRow(row);
  }
  return Indented(table.Text());
}

std::string PhaseTable(const v1::Recovery& recovery) {
  Table table({"PHASE", "START", "DURATION", "BUDGET"});
  for (const v1::PhaseTiming& timing : recovery.phases()) {
    table.AddRow({PhaseName(timing.phase()), fmt::format("{:.1f}ms", Milliseconds(timing.start())),
                  fmt::format("{:.1f}ms", Milliseconds(timing.duration())),
                  timing.has_budget() && Milliseconds(timing.budget()) > 0
                      ? fmt::format("{:.0f}ms", Milliseconds(timing.budget()))
                      : ""});
  }
  if (recovery.phases_size() > 0)
    table.AddRow({"total", "0.0ms", fmt::format("{:.1f}ms", TotalMilliseconds(recovery)), ""});
  return table.Text();
}

int KeptProcesses(const v1::Recovery& recovery) {
  return static_cast<int>(
      std::count_if(recovery.ranks().begin(), recovery.ranks().end(),
                    [](const v1::RestoredRank& rank) { return rank.kept_process(); }));
}

std::string Generations(const v1::Recovery& recovery) {
  return fmt::format("{}->{}", recovery.generation_from(), recovery.generation_to());
}

}  // namespace

std::string StateName(v1::ServerState state) {
  return CamelCase(v1::ServerState_Name(state), "SERVER_STATE_");
}
std::string StateName(v1::JobState state) {
  return CamelCase(v1::JobState_Name(state), "JOB_STATE_");
}
std::string PhaseName(v1::RecoveryPhase phase) {
  std::string name = CamelCase(v1::RecoveryPhase_Name(phase), "RECOVERY_PHASE_");
  if (!name.empty()) name[0] = static_cast<char>(std::tolower(name[0]));
  return name;
}

double TotalMilliseconds(const v1::Recovery& recovery) {
  double end = 0;
  for (const v1::PhaseTiming& timing : recovery.phases()) {
    end = std::max(end, Milliseconds(timing.start()) + Milliseconds(timing.duration()));
  }
  return end;
}

std::string Ranges(std::vector<int> numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text +=
        last == i ? std::to_string(numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

std::string ServerTable(const std::vector<v1::Server>& servers, bool wide) {
  std::vector<std::string> titles = {"NAME",  "STATE",       "DEVICES", "JOB",
                                     "RANKS", "INCARNATION", "REASON"};
  if (wide)
    titles.insert(titles.end(), {"FREE", "MODEL", "HOST", "DOMAIN", "HEARTBEAT", "DRAINING"});
  titles.push_back("AGE");
  Table table(titles);
  for (const v1::Server& server : servers) {
    const v1::ServerStatus& status = server.status();
    std::set<std::string> jobs;
    std::vector<int> ranks;
    bool standby = false;
    for (const v1::RankPlace& place : status.ranks()) {
      jobs.insert(place.job());
      if (place.rank() >= 0) ranks.push_back(place.rank());
      standby = standby || place.rank() < 0;
    }
    std::string ranges = Ranges(ranks);
    if (standby) ranges += ranges.empty() ? "standby" : ",standby";
    std::vector<std::string> row = {server.name(),
                                    StateName(status.state()),
                                    std::to_string(status.inventory().devices_size()),
                                    fmt::format("{}", fmt::join(jobs, ",")),
                                    ranges,
                                    std::to_string(status.incarnation()),
                                    ReasonText(status.reason())};
    if (wide) {
      const v1::ServerInventory& inventory = status.inventory();
      row.insert(row.end(), {std::to_string(status.devices_free()),
                             inventory.devices_size() == 0 ? "" : inventory.devices(0).model(),
                             inventory.host(), inventory.failure_domain(),
                             fmt::format("{:.0f}ms", Milliseconds(status.heartbeat_age())),
                             server.spec().draining() ? "true" : "false"});
    }
    row.push_back(Age(status.registered()));
    table.AddRow(row);
  }
  return table.Text();
}

std::string JobTable(const std::vector<v1::Job>& jobs, bool wide) {
  std::vector<std::string> titles = {"NAME",  "STATE",      "STEP",     "LOSS",
                                     "RANKS", "GENERATION", "FAILURES", "REASON"};
  if (wide)
    titles.insert(titles.end(),
                  {"UID", "PHASE", "DPxTPxPP", "PROTECTED", "PRIORITY", "SERVERS", "EXIT"});
  titles.push_back("AGE");
  Table table(titles);
  for (const v1::Job& job : jobs) {
    const v1::JobStatus& status = job.status();
    std::vector<std::string> row = {job.name(),
                                    StateName(status.state()),
                                    std::to_string(status.step()),
                                    MetricOf(status, "loss"),
                                    std::to_string(status.world_size()),
                                    std::to_string(status.generation()),
                                    std::to_string(status.failures()),
                                    ReasonText(status.reason())};
    if (wide) {
      row.insert(row.end(),
                 {job.uid(), PhaseName(status.phase()), Layout(status),
                  std::to_string(status.protected_step()), std::to_string(job.spec().priority()),
                  fmt::format("{}..{}", job.spec().servers_min(), job.spec().servers_wanted()),
                  status.has_outcome() ? std::to_string(status.outcome().exit_code()) : ""});
    }
    row.push_back(Age(status.submitted()));
    table.AddRow(row);
  }
  return table.Text();
}

std::string RecoveryTable(const std::vector<v1::Recovery>& recoveries, bool wide) {
  std::vector<std::string> titles = {"ID",       "JOB",     "GENERATION", "REASON",
                                     "DECISION", "OUTCOME", "LOST",       "TOOK"};
  if (wide) titles.insert(titles.end(), {"PLANNED", "POINT", "KEPT", "SLOWEST"});
  titles.push_back("AGE");
  Table table(titles);
  for (const v1::Recovery& recovery : recoveries) {
    std::vector<std::string> row = {std::to_string(recovery.id()),
                                    recovery.job(),
                                    Generations(recovery),
                                    ReasonText(recovery.reason()),
                                    ReasonText(recovery.decision()),
                                    recovery.outcome().empty() ? "open" : recovery.outcome(),
                                    std::to_string(recovery.steps_lost()),
                                    Short(TotalMilliseconds(recovery))};
    // No spaces inside cells.
    std::replace(row[5].begin(), row[5].end(), ' ', '-');
    if (wide) {
      const auto slowest =
          std::max_element(recovery.phases().begin(), recovery.phases().end(),
                           [](const v1::PhaseTiming& a, const v1::PhaseTiming& b) {
                             return Milliseconds(a.duration()) < Milliseconds(b.duration());
                           });
      row.insert(
          row.end(),
          {recovery.planned() ? "true" : "false", std::to_string(recovery.recovery_point().step()),
           fmt::format("{}/{}", KeptProcesses(recovery), recovery.ranks_size()),
           slowest == recovery.phases().end() ? "" : PhaseName(slowest->phase())});
    }
    row.push_back(Age(recovery.started()));
    table.AddRow(row);
  }
  return table.Text();
}

std::string CheckpointTable(const std::vector<v1::Checkpoint>& checkpoints, bool wide) {
  std::vector<std::string> titles = {"NAME", "STEP", "GENERATION", "SHARDS", "COPIES", "BYTES"};
  if (wide) titles.insert(titles.end(), {"JOB", "UID", "SERVERS"});
  titles.push_back("AGE");
  Table table(titles);
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    std::set<std::string> servers;
    for (const v1::SnapshotInfo& shard : checkpoint.shards()) servers.insert(shard.server());
    std::vector<std::string> row = {
        fmt::format("{}@{}", checkpoint.job(), checkpoint.state().step()),
        std::to_string(checkpoint.state().step()),
        std::to_string(checkpoint.state().generation()),
        std::to_string(checkpoint.shard_count()),
        std::to_string(checkpoint.shards_size()),
        Bytes(checkpoint.bytes())};
    if (wide)
      row.insert(row.end(), {checkpoint.job(), checkpoint.job_uid(),
                             fmt::format("{}", fmt::join(servers, ","))});
    row.push_back(Age(checkpoint.committed()));
    table.AddRow(row);
  }
  return table.Text();
}

std::string EventTable(const std::vector<v1::Event>& events, bool wide) {
  Table table(wide ? std::vector<std::string>{"SEQUENCE", "TIME", "AGE", "LEVEL", "REASON",
                                              "SERVER", "JOB", "EVENT"}
                   : std::vector<std::string>{"TIME", "LEVEL", "REASON", "OBJECT", "EVENT"});
  for (const v1::Event& event : events) {
    const std::string level = CamelCase(v1::EventLevel_Name(event.level()), "EVENT_LEVEL_");
    std::string text = event.what();
    for (const v1::KeyValue& key : event.keys())
      text += fmt::format(" {}={}", key.key(), key.value());
    if (wide) {
      table.AddRow({std::to_string(event.sequence()), ClockTime(event.time()), Age(event.time()),
                    level, ReasonText(event.reason()), event.server(), event.job(), text});
    } else {
      table.AddRow({ClockTime(event.time()), level, ReasonText(event.reason()),
                    !event.server().empty() ? "server/" + event.server()
                    : !event.job().empty()  ? "job/" + event.job()
                                            : "",
                    text});
    }
  }
  return table.Text();
}

std::string DescribeServer(const v1::Server& server) {
  const v1::ServerStatus& status = server.status();
  const v1::ServerInventory& inventory = status.inventory();
  std::string text;
  AddLine(text, "Name", server.name());
  AddLine(text, "State", StateName(status.state()));
  AddLine(text, "Reason", ReasonText(status.reason()));
  AddLine(text, "Draining", server.spec().draining() ? "true" : "false");
  AddLine(text, "Incarnation", std::to_string(status.incarnation()));
  AddLine(text, "Registered", Age(status.registered()) + " ago");
  AddLine(text, "Heartbeat", fmt::format("{:.0f} ms ago", Milliseconds(status.heartbeat_age())));
  AddLine(text, "Host", inventory.host());
  AddLine(text, "Failure domain", inventory.failure_domain());
  AddLine(text, "Probe address", inventory.probe_address());
  AddLine(text, "Transfer address", inventory.transfer_address());
  AddLine(text, "Root directory", inventory.root_directory());
  AddLine(text, "Version", inventory.version());
  AddLine(text, "CPUs", std::to_string(inventory.cpu_count()));
  AddLine(text, "Memory", Bytes(inventory.memory_bytes()));
  AddLine(text, "Devices",
          fmt::format("{}, {} free", inventory.devices_size(), status.devices_free()));
  Table devices({"DEVICE", "KIND", "MODEL", "MEMORY", "SPEED", "UUID"});
  for (const v1::Device& device : inventory.devices()) {
    devices.AddRow({std::to_string(device.index()),
                    CamelCase(v1::DeviceKind_Name(device.kind()), "DEVICE_KIND_"), device.model(),
                    Bytes(device.memory_bytes()), fmt::format("{:g}", device.speed()),
                    Or(device.uuid(), "<none>")});
  }
  if (inventory.devices_size() > 0) text += Indented(devices.Text());
  if (status.conditions_size() > 0) text += "Conditions:\n" + ConditionTable(status.conditions());
  text += "Ranks:\n";
  text += status.ranks_size() == 0 ? "  <none>\n" : PlaceTable(status.ranks(), true);
  return text;
}

std::string DescribeJob(const v1::Job& job) {
  const v1::JobStatus& status = job.status();
  const v1::JobSpec& spec = job.spec();
  std::string text;
  AddLine(text, "Name", job.name());
  AddLine(text, "Uid", job.uid());
  AddLine(text, "State", StateName(status.state()));
  if (status.phase() > v1::RECOVERY_PHASE_NONE) AddLine(text, "Phase", PhaseName(status.phase()));
  AddLine(text, "Reason", ReasonText(status.reason()));
  AddLine(text, "Message", status.message());
  AddLine(text, "Program", fmt::format("{} {}", spec.program(), fmt::join(spec.arguments(), " ")));
  AddLine(text, "Kind", spec.opaque() ? "opaque: never joins" : "joins");
  AddLine(
      text, "Servers",
      fmt::format("wanted {}, minimum {}, maximum {}", spec.servers_wanted(), spec.servers_min(),
                  spec.servers_max() == 0 ? spec.servers_wanted() : spec.servers_max()));
  AddLine(text, "World",
          fmt::format("{} ranks, dp x tp x pp = {}", status.world_size(),
                      Or(Layout(status), "<unknown>")));
  AddLine(text, "Step",
          fmt::format("{} committed, {} protected", status.step(), status.protected_step()));
  AddLine(text, "Generation",
          fmt::format("{} running, {} allotted", status.generation(), status.generation_fenced()));
  std::string chain;
  for (const v1::ChainLink& link : status.lineage()) {
    chain += fmt::format("{}generation {} from step {}", chain.empty() ? "" : ", ",
                         link.generation(), link.start());
  }
  AddLine(text, "Chain", chain);
  AddLine(text, "Failures",
          fmt::format("{} of at most {}", status.failures(), spec.restarts_max()));
  AddLine(text, "Priority", std::to_string(spec.priority()));
  AddLine(text, "Submitted", Age(status.submitted()) + " ago");
  for (const v1::Metric& metric : status.metrics())
    AddLine(text, "Metric " + metric.name(), fmt::format("{:.6g}", metric.value()));
  if (status.recovery() != 0)
    AddLine(text, "Recovery",
            fmt::format("{} is open: everstep describe recovery {}", status.recovery(),
                        status.recovery()));
  if (status.conditions_size() > 0) text += "Conditions:\n" + ConditionTable(status.conditions());
  if (status.has_outcome()) {
    const v1::JobOutcome& outcome = status.outcome();
    AddLine(text, "Outcome",
            fmt::format("{}, exit code {}, {}", StateName(outcome.state()), outcome.exit_code(),
                        Or(ReasonText(outcome.reason()), "<none>")));
    AddLine(text, "Outcome message", outcome.message());
    if (outcome.last_lines_size() > 0) text += "Last lines:\n";
    for (const std::string& line : outcome.last_lines()) text += "  " + line + "\n";
  }
  text += "Ranks:\n";
  text += status.ranks_size() == 0 ? "  <none>\n" : PlaceTable(status.ranks(), false);
  if (status.snapshots_size() > 0) {
    Table table({"STEP", "GENERATION", "SHARD", "TIER", "SERVER", "BYTES"});
    for (const v1::SnapshotInfo& snapshot : status.snapshots()) {
      table.AddRow({std::to_string(snapshot.state().step()),
                    std::to_string(snapshot.state().generation()), std::to_string(snapshot.shard()),
                    CamelCase(v1::SnapshotTier_Name(snapshot.tier()), "SNAPSHOT_TIER_"),
                    snapshot.server(), Bytes(snapshot.bytes())});
    }
    text += "Snapshots:\n" + Indented(table.Text());
  }
  return text;
}

std::string DescribeRecovery(const v1::Recovery& recovery) {
  std::string text;
  AddLine(text, "Recovery", std::to_string(recovery.id()));
  AddLine(text, "Job", fmt::format("{} ({})", recovery.job(), recovery.job_uid()));
  AddLine(text, "Generation",
          fmt::format("{} ({} used)", Generations(recovery), recovery.generations_used()));
  AddLine(text, "Kind", recovery.planned()                               ? "planned: at a step boundary"
                        : ReasonText(recovery.reason()) == "JobStarted" ? "the job's start"
                                                                        : "after a failure");
  AddLine(text, "Reason", ReasonText(recovery.reason()));
  AddLine(text, "Evidence", recovery.evidence());
  AddLine(text, "Decision", ReasonText(recovery.decision()));
  AddLine(text, "Because", recovery.decision_message());
  for (const std::string& rival : recovery.alternatives()) AddLine(text, "Rival", rival);
  AddLine(text, "Outcome", recovery.outcome().empty() ? "open" : recovery.outcome());
  AddLine(text, "Recovery point",
          fmt::format("step {} of generation {}", recovery.recovery_point().step(),
                      recovery.recovery_point().generation()));
  AddLine(text, "Steps lost", std::to_string(recovery.steps_lost()));
  AddLine(text, "Processes kept",
          fmt::format("{} of {}", KeptProcesses(recovery), recovery.ranks_size()));
  text += "Timeline:\n" + Indented(PhaseTable(recovery));
  if (recovery.ranks_size() > 0) {
    Table table({"RANK", "SERVER", "PROCESS", "RESTORED", "BYTES"});
    for (const v1::RestoredRank& rank : recovery.ranks()) {
      std::string from = rank.from();
      std::replace(from.begin(), from.end(), ' ', '-');
      table.AddRow({std::to_string(rank.rank()), rank.server(),
                    rank.kept_process() ? "kept" : "new", from, Bytes(rank.bytes())});
    }
    text += "Ranks:\n" + Indented(table.Text());
  }
  return text;
}

std::string ExplainRecovery(const v1::Recovery& recovery) {
  std::string text = fmt::format("Recovery {} of job {} {}.\n\n", recovery.id(), recovery.job(),
                                 recovery.planned() ? "was planned" : "followed a failure");
  text += fmt::format("What was seen:    {} ({})\n", Or(recovery.evidence(), "<none>"),
                      Or(recovery.reason(), "<none>"));
  text += fmt::format("What was decided: {} ({})\n", Or(recovery.decision_message(), "<none>"),
                      Or(recovery.decision(), "<none>"));
  for (const std::string& rival : recovery.alternatives())
    text += fmt::format("What else could:  {}\n", rival);
  if (recovery.alternatives_size() == 0) text += "What else could:  <none>\n";
  text += fmt::format(
      "What it cost:     {:.1f} ms from the first evidence to the end, {} step(s) lost, {} of {} "
      "processes kept\n",
      TotalMilliseconds(recovery), recovery.steps_lost(), KeptProcesses(recovery),
      recovery.ranks_size());
  text += fmt::format("How it ended:     {}\n\n",
                      recovery.outcome().empty() ? "it is still open" : recovery.outcome());
  return text + PhaseTable(recovery);
}

std::string EventLine(const v1::Event& event) {
  std::string text = event.what();
  if (!event.server().empty()) text += " server=" + event.server();
  if (!ReasonText(event.reason()).empty()) text += " reason=" + event.reason();
  for (const v1::KeyValue& key : event.keys())
    text += fmt::format(" {}={}", key.key(), key.value());
  return text;
}

}  // namespace everstep::cli
