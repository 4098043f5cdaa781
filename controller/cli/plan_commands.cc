// `everstep plan`: what the planner would do with a cluster and a job, and what it would do after failures. Offline.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>

#include "controller/cli/command_line.h"
#include "controller/cli/output.h"
#include "controller/cli/plan_files.h"
#include "controller/core/planner/replan.h"
#include "controller/core/planner/report.h"
#include "controller/io/config/yaml_message.h"

namespace everstep::cli {
namespace {

struct PlanFlags {
  std::string cluster, job, devices, models, svg;
  std::vector<std::string> fail, add;
};

Result<planner::Tables> ReadTables(const PlanFlags& flags) {
  planner::Tables tables = planner::BuiltInTables();
  if (!flags.devices.empty()) {
    EVERSTEP_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(flags.devices));
    EVERSTEP_RETURN_IF_ERROR(planner::AddDeviceRows(text, flags.devices, &tables));
  }
  if (!flags.models.empty()) {
    EVERSTEP_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(flags.models));
    EVERSTEP_RETURN_IF_ERROR(planner::AddModelRows(text, flags.models, &tables));
  }
  return tables;
}

Status WriteSvg(const std::string& file, const std::string& svg) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out << svg;
  out.close();
  return out ? OkStatus() : Unavailable(fmt::format("{} cannot be written", file));
}

// The cluster after the events, and a name that is in no cluster as a problem.
Result<planner::Cluster> After(const planner::Cluster& before, const PlanFlags& flags) {
  planner::Cluster after = before;
  for (const std::string& name : flags.fail) {
    const auto gone = std::erase_if(after.servers, [&](const planner::PlanServer& s) { return s.id.value == name; });
    if (gone == 0) return InvalidArgument(fmt::format("--fail {}: no such server in the cluster, or named twice", name));
  }
  std::erase_if(after.links, [&](const planner::LinkOverride& link) {
    const auto failed = [&](const ServerId& id) {
      return std::find(flags.fail.begin(), flags.fail.end(), id.value) != flags.fail.end();
    };
    return failed(link.a) || failed(link.b);
  });
  for (const std::string& text : flags.add) {
    EVERSTEP_ASSIGN_OR_RETURN(const planner::PlanServer server, ReadAddedServer(text, before.servers.front()));
    after.servers.push_back(server);
  }
  return after;
}

Status RunPlan(const CommandLine& line, const PlanFlags& flags) {
  EVERSTEP_ASSIGN_OR_RETURN(const planner::Tables tables, ReadTables(flags));
  EVERSTEP_ASSIGN_OR_RETURN(const std::string cluster_text, ReadSmallFile(flags.cluster));
  EVERSTEP_ASSIGN_OR_RETURN(const planner::Cluster cluster, ReadCluster(cluster_text, flags.cluster));
  EVERSTEP_ASSIGN_OR_RETURN(const std::string job_text, ReadSmallFile(flags.job));
  planner::Job job;
  planner::ReplanInput replan;
  EVERSTEP_RETURN_IF_ERROR(ReadJob(job_text, flags.job, tables, &job, &replan));
  EVERSTEP_ASSIGN_OR_RETURN(const planner::CostModel model, planner::CostModel::Create(cluster, job, tables, {}));
  EVERSTEP_ASSIGN_OR_RETURN(const planner::Plan plan, planner::MakePlan(model));
  const bool json = line.globals.output == "json";
  if (flags.fail.empty() && flags.add.empty()) {
    Print(json ? planner::PlanJson(model, plan) : planner::PlanText(model, plan));
    return flags.svg.empty() ? OkStatus() : WriteSvg(flags.svg, planner::PlanSvg(model, plan));
  }
  EVERSTEP_ASSIGN_OR_RETURN(const planner::Cluster after, After(cluster, flags));
  for (const std::string& name : flags.fail) std::erase(job.pinned, ServerId(name));
  for (const std::string& name : flags.fail) std::erase(job.forbidden, ServerId(name));
  EVERSTEP_ASSIGN_OR_RETURN(const planner::CostModel later, planner::CostModel::Create(after, job, tables, {}));
  replan.running.layout = plan.layout;
  for (const planner::PlanServer& s : cluster.servers) replan.running.servers.push_back(s.id);
  replan.running.step_seconds = plan.evaluation.step_seconds;
  replan.running.steps_since_change = replan.dwell_steps;
  EVERSTEP_ASSIGN_OR_RETURN(const planner::Replan decision, planner::MakeReplan(later, replan));
  if (json) {
    Print(planner::ReplanJson(later, decision));
  } else {
    Print("before: " + planner::PlanText(model, plan) + "\nafter: " + planner::ReplanText(later, decision));
  }
  if (flags.svg.empty() || decision.choice().layout.slots.empty()) return OkStatus();
  return WriteSvg(flags.svg, planner::PlanSvg(later, planner::AsPlan(decision.choice())));
}

}  // namespace

void AddPlanCommands(CommandLine& line) {
  auto flags = std::make_shared<PlanFlags>();
  CLI::App* plan = line.Add(
      &line.app, "plan", "Place a job on a cluster, and say what would follow from failures; offline",
      "  everstep plan -f cluster.yaml -j job.yaml\n"
      "  everstep plan -f cluster.yaml -j job.yaml --fail s3,s7 --add s9:A100-40:8 --svg after.svg",
      [&line, flags] {
        const Status status = RunPlan(line, *flags);
        return status.ok() ? kExitDone : Fail(status);
      });
  plan->add_option("-f,--file", flags->cluster, "Cluster file (YAML)")->required()->type_name("FILE");
  plan->add_option("-j,--job", flags->job, "Job file of the planner (YAML)")->required()->type_name("FILE");
  plan->add_option("--fail", flags->fail, "Servers that fail at one instant, after the plan was made")
      ->delimiter(',')->type_name("SERVERS");
  plan->add_option("--add", flags->add, "A server that joins, NAME:DEVICE:DEVICES[:BANDWIDTH]; may be repeated")
      ->type_name("SERVER");
  plan->add_option("--devices", flags->devices, "CSV file with rows added to the device table")->type_name("FILE");
  plan->add_option("--models", flags->models, "CSV file with rows added to the model table")->type_name("FILE");
  plan->add_option("--svg", flags->svg, "Draw the plan, or the plan after the failures, into this file")->type_name("FILE");
  line.AddOutputFlag(plan, "json");
}

}  // namespace everstep::cli
