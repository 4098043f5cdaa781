// `everstep get|describe|explain|logs`: what the controller knows, for people and as JSON.
#include <fmt/format.h>

#include <memory>

#include "controller/cli/command_line.h"
#include "controller/cli/output.h"
#include "controller/cli/render.h"

namespace everstep::cli {
namespace {

struct GetFlags {
  std::string job;
  std::string server;
  uint64_t after = 0;
};

// Prints what a list call returned. `rows` picks the repeated field of the response.
template <typename Item, typename Response>
int Show(const CommandLine& line, const Result<Response>& response,
         const google::protobuf::RepeatedPtrField<Item>& (Response::*rows)() const,
         std::string (*name)(const Item&), std::string (*table)(const std::vector<Item>&, bool),
         const char* what) {
  if (!response.ok()) return Fail(response.status());
  const auto& items = (response.value().*rows)();
  if (line.globals.output == "json") {
    Print(Json(response.value()));
  } else if (line.globals.output == "name") {
    for (const Item& item : items) Print(name(item) + "\n");
  } else if (items.empty()) {
    Note(fmt::format("no {}", what));
  } else {
    Print(table(std::vector<Item>(items.begin(), items.end()), line.globals.output == "wide"));
  }
  return kExitDone;
}

int GetServers(const CommandLine& line) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  return Show<v1::Server>(
      line, client.value().Call(v1::ListServersRequest()), &v1::ListServersResponse::servers,
      +[](const v1::Server& s) -> std::string { return "server/" + s.name(); }, &ServerTable,
      "servers");
}

int GetJobs(const CommandLine& line) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  return Show<v1::Job>(
      line, client.value().Call(v1::ListJobsRequest()), &v1::ListJobsResponse::jobs,
      +[](const v1::Job& j) -> std::string { return "job/" + j.name(); }, &JobTable, "jobs");
}

int GetRecoveries(const CommandLine& line, const GetFlags& flags) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::ListRecoveriesRequest request;
  request.set_job(flags.job);
  return Show<v1::Recovery>(
      line, client.value().Call(request), &v1::ListRecoveriesResponse::recoveries,
      +[](const v1::Recovery& r) -> std::string { return fmt::format("recovery/{}", r.id()); },
      &RecoveryTable, "recoveries");
}

int GetCheckpoints(const CommandLine& line, const GetFlags& flags) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::ListCheckpointsRequest request;
  request.set_job(flags.job);
  return Show<v1::Checkpoint>(
      line, client.value().Call(request), &v1::ListCheckpointsResponse::checkpoints,
      +[](const v1::Checkpoint& c) -> std::string {
        return fmt::format("checkpoint/{}@{}", c.job(), c.state().step());
      },
      &CheckpointTable, "checkpoints");
}

int GetEvents(const CommandLine& line, const GetFlags& flags) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::ListEventsRequest request;
  request.set_job(flags.job);
  request.set_server(flags.server);
  request.set_after(flags.after);
  return Show<v1::Event>(
      line, client.value().Call(request), &v1::ListEventsResponse::events,
      +[](const v1::Event& e) -> std::string { return fmt::format("event/{}", e.sequence()); },
      &EventTable, "events");
}

int DescribeOneServer(const CommandLine& line, const std::string& name) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto response = client.value().Call(v1::ListServersRequest());
  if (!response.ok()) return Fail(response.status());
  for (const v1::Server& server : response.value().servers()) {
    if (server.name() != name) continue;
    Print(line.globals.output == "json" ? Json(server) : DescribeServer(server));
    return kExitDone;
  }
  return Fail(NotFound(fmt::format("no server '{}'; 'everstep get servers' lists them", name)));
}

int DescribeOneJob(const CommandLine& line, const std::string& name) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::GetJobRequest request;
  request.set_job(name);
  const auto response = client.value().Call(request);
  if (!response.ok()) return Fail(response.status());
  const v1::Job& job = response.value().job();
  Print(line.globals.output == "json" ? Json(job) : DescribeJob(job));
  return kExitDone;
}

// The one with that id, or the newest when the id is empty.
int ShowRecovery(const CommandLine& line, const std::string& id,
                 std::string (*text)(const v1::Recovery&)) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::Recovery recovery;
  if (id.empty() || id == "latest") {
    const auto response = client.value().Call(v1::ListRecoveriesRequest());
    if (!response.ok()) return Fail(response.status());
    if (response.value().recoveries().empty())
      return Fail(NotFound("no recovery has happened yet"));
    recovery = *response.value().recoveries().rbegin();
  } else {
    v1::GetRecoveryRequest request;
    uint64_t number = 0;
    if (id.find_first_not_of("0123456789") != std::string::npos || id.size() > 18) {
      return Fail(InvalidArgument(
          fmt::format("recovery '{}' is not a number; 'everstep get recoveries' lists them", id)));
    }
    number = std::stoull(id);
    request.set_id(number);
    const auto response = client.value().Call(request);
    if (!response.ok()) return Fail(response.status());
    recovery = response.value().recovery();
  }
  Print(line.globals.output == "json" ? Json(recovery) : text(recovery));
  return kExitDone;
}

struct LogFlags {
  std::string job;
  int rank = -1;
  int tail = 0;
};

int ShowLogs(const CommandLine& line, const LogFlags& flags) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::GetLogsRequest request;
  request.set_job(flags.job);
  if (flags.rank >= 0) request.set_rank(flags.rank);
  request.set_tail(flags.tail);
  const auto response = client.value().Call(request);
  if (!response.ok()) return Fail(response.status());
  if (line.globals.output == "json") {
    Print(Json(response.value()));
    return kExitDone;
  }
  for (const v1::RankLog& log : response.value().logs()) {
    for (const std::string& text : log.lines()) {
      Print(flags.rank >= 0 ? text + "\n"
                            : fmt::format("[rank {} on {}] {}\n", log.rank(), log.server(), text));
    }
  }
  if (response.value().logs().empty()) Note("no lines are kept for that job and rank");
  return kExitDone;
}

}  // namespace

void AddReadCommands(CommandLine& line) {
  CLI::App* get = line.AddGroup(&line.app, "get", "List objects of the cluster, one row each");
  auto flags = std::make_shared<GetFlags>();
  const auto add = [&](const char* name, const char* description, const char* examples,
                       std::function<int()> run) {
    CLI::App* command = line.Add(get, name, description, examples, std::move(run));
    line.AddOutputFlag(command, "wide|json|name");
    line.AddControllerFlags(command);
    return command;
  };
  add("servers", "Servers, with state and ranks",
      "  everstep get servers\n  everstep get servers -o wide",
      [&line] { return GetServers(line); });
  add("jobs", "Jobs, with state and step", "  everstep get jobs\n  everstep get jobs -o json",
      [&line] { return GetJobs(line); });
  add("recoveries", "Recoveries, newest last", "  everstep get recoveries --job train",
      [&line, flags] { return GetRecoveries(line, *flags); })
      ->add_option("--job", flags->job, "Only of this job")
      ->type_name("NAME");
  add("checkpoints", "Complete checkpoints", "  everstep get checkpoints --job train",
      [&line, flags] { return GetCheckpoints(line, *flags); })
      ->add_option("--job", flags->job, "Only of this job")
      ->type_name("NAME");
  CLI::App* events =
      add("events", "What happened, newest last",
          "  everstep get events --server s2\n  everstep get events --job train -o wide",
          [&line, flags] { return GetEvents(line, *flags); });
  events->add_option("--job", flags->job, "Only of this job")->type_name("NAME");
  events->add_option("--server", flags->server, "Only of this server")->type_name("NAME");
  events->add_option("--after", flags->after, "Only events with a higher sequence number")
      ->type_name("SEQUENCE");

  CLI::App* describe = line.AddGroup(&line.app, "describe", "Everything about one object");
  auto name = std::make_shared<std::string>();
  const auto add_one = [&](CLI::App* group, const char* noun, const char* description,
                           const char* examples, bool required, std::function<int()> run) {
    CLI::App* command = line.Add(group, noun, description, examples, std::move(run));
    CLI::Option* option = command->add_option(
        "name", *name, required ? "Its name" : "Its number (default: the newest)");
    option->type_name(required ? "NAME" : "ID");
    if (required) option->required();
    line.AddOutputFlag(command, "json");
    line.AddControllerFlags(command);
  };
  add_one(describe, "server", "State, devices and ranks of a server",
          "  everstep describe server s2", true,
          [&line, name] { return DescribeOneServer(line, *name); });
  add_one(describe, "job", "State, ranks, chain and outcome of a job",
          "  everstep describe job train", true,
          [&line, name] { return DescribeOneJob(line, *name); });
  add_one(describe, "recovery", "Timeline, evidence, decision and sources of a recovery",
          "  everstep describe recovery 3\n  everstep describe recovery", false,
          [&line, name] { return ShowRecovery(line, *name, &DescribeRecovery); });
  CLI::App* explain =
      line.AddGroup(&line.app, "explain", "Why something was decided, in sentences");
  add_one(explain, "recovery", "What was seen, decided and rejected, and what it cost",
          "  everstep explain recovery 3", false,
          [&line, name] { return ShowRecovery(line, *name, &ExplainRecovery); });

  CLI::App* logs = line.AddGroup(&line.app, "logs", "What programs printed");
  auto log_flags = std::make_shared<LogFlags>();
  CLI::App* job_logs =
      line.Add(logs, "job", "The last lines of a job's ranks, also of dead ones",
               "  everstep logs job train --rank 0\n  everstep logs job train --tail 20",
               [&line, log_flags] { return ShowLogs(line, *log_flags); });
  job_logs->add_option("name", log_flags->job, "The job")->required()->type_name("NAME");
  job_logs->add_option("--rank", log_flags->rank, "Only this rank (default: all)")
      ->type_name("R")
      ->check(NotNegative);
  job_logs->add_option("--tail", log_flags->tail, "Only the last N lines of each process")
      ->type_name("N")
      ->check(NotNegative);
  line.AddOutputFlag(job_logs, "json");
  line.AddControllerFlags(job_logs);
}

}  // namespace everstep::cli
