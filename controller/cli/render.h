// Objects of the cluster as people read them: the rows of `get`, the text of `describe` and
// `explain`, one line per event. Pure text from messages; called on the main thread.
#pragma once

#include <string>
#include <vector>

#include "everstep/v1/admin.pb.h"

namespace everstep::cli {

namespace v1 = ::everstep::v1;

std::string StateName(v1::ServerState state);
std::string StateName(v1::JobState state);
std::string PhaseName(v1::RecoveryPhase phase);  // "collect"

std::string ServerTable(const std::vector<v1::Server>& servers, bool wide);
std::string JobTable(const std::vector<v1::Job>& jobs, bool wide);
std::string RecoveryTable(const std::vector<v1::Recovery>& recoveries, bool wide);
std::string CheckpointTable(const std::vector<v1::Checkpoint>& checkpoints, bool wide);
std::string EventTable(const std::vector<v1::Event>& events, bool wide);

std::string DescribeServer(const v1::Server& server);
std::string DescribeJob(const v1::Job& job);
// Timeline, evidence, decision, rivals, where each rank's state came from. `explain` is the same in
// sentences.
std::string DescribeRecovery(const v1::Recovery& recovery);
std::string ExplainRecovery(const v1::Recovery& recovery);

// "Server declared dead  server=s2 reason=ServerRefused lease=1.5s"
std::string EventLine(const v1::Event& event);
// Sorted numbers as ranges: "0-3,6".
std::string Ranges(std::vector<int> numbers);
double TotalMilliseconds(const v1::Recovery& recovery);

}  // namespace everstep::cli
