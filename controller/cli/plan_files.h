// The files of `everstep plan`: a cluster, a job, and names of servers that fail or join, from YAML onto the planner's
// inputs. Every problem is named with file and line. Called on the main thread.
#pragma once

#include <string>
#include <vector>

#include "controller/core/planner/model.h"
#include "controller/core/planner/replan.h"
#include "controller/core/planner/tables.h"
#include "proto/base/status.h"

namespace everstep::cli {

// "80GiB", "400Gb/s", "25GB/s", "5us", "0.3": a number with one of the units of its kind. Bits become bytes.
enum class QuantityKind { kBytes, kBandwidth, kSeconds, kNumber };
Result<double> ParseQuantity(const std::string& text, QuantityKind kind);

// kInvalidArgument: what is wrong, as "cluster.yaml:7: ...".
Result<planner::Cluster> ReadCluster(const std::string& text, const std::string& file);
// Fills in the job and what a re-plan needs to know (`replan:` in the file).
Status ReadJob(const std::string& text, const std::string& file, const planner::Tables& tables, planner::Job* job,
               planner::ReplanInput* replan);
// "s9:H100:8[:400Gb/s]"; without a bandwidth, that of `like`.
Result<planner::PlanServer> ReadAddedServer(const std::string& text, const planner::PlanServer& like);

}  // namespace everstep::cli
