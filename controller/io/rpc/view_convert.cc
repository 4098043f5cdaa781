#include "controller/io/rpc/view_convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "proto/base/reason.h"
#include "proto/convert/job_convert.h"
#include "proto/convert/reader.h"
#include "proto/convert/shapes.h"
#include "proto/model/names.h"

namespace everstep {
namespace {

using shapes::EnumTo;

std::string ReasonWord(Reason reason) { return std::string(ReasonName(reason)); }

void WritePlace(const RankPlace& in, const Assignment* assignment, v1::RankPlace* out) {
  out->set_job_uid(in.job.value);
  out->set_job(in.job_name);
  out->set_rank(in.rank.value);
  out->set_server(in.server.value);
  out->set_device(in.device.value);
  out->set_process(in.process.value);
  out->set_pid(in.pid);
  out->set_ready_standby(in.ready_standby);
  out->set_phase(EnumTo<v1::RankPhase>(in.phase));
  out->set_vote_passed(in.vote_passed.value);
  out->set_restored_from(ToUtf8(in.restored_from));
  if (assignment == nullptr || in.rank.value < 0) return;
  if (static_cast<size_t>(in.rank.value) >= assignment->ranks.size()) return;
  const RankAssignment& rank = assignment->ranks[in.rank.value];
  if (rank.process != in.process) return;
  out->set_dp(rank.dp);
  out->set_tp(rank.tp);
  out->set_pp(rank.pp);
  out->set_micro_batch_first(rank.micro_batch_first);
  out->set_micro_batch_count(rank.micro_batch_count);
}

void WriteInventory(const ServerInventory& in, v1::ServerInventory* out) {
  out->set_server(in.server.value);
  out->set_failure_domain(ToUtf8(in.failure_domain));
  out->set_host(ToUtf8(in.host));
  out->set_probe_address(in.probe_address);
  out->set_transfer_address(in.transfer_address);
  out->set_root_directory(ToUtf8(in.root_directory));
  out->set_version(ToUtf8(in.version));
  out->set_cpu_count(in.cpu_count);
  out->set_memory_bytes(in.memory_bytes);
  for (const Device& device : in.devices) {
    v1::Device* to = out->add_devices();
    to->set_index(device.index.value);
    to->set_kind(EnumTo<v1::DeviceKind>(device.kind));
    to->set_model(ToUtf8(device.model));
    to->set_memory_bytes(device.memory_bytes);
    to->set_speed(device.speed);
    to->set_uuid(ToUtf8(device.uuid));
  }
}

void WriteCondition(const char* type, v1::ConditionStatus status, Reason reason, const std::string& message,
                    v1::Condition* out) {
  out->set_type(type);
  out->set_status(status);
  out->set_reason(ReasonWord(reason));
  out->set_message(ToUtf8(message));
}

v1::ConditionStatus TrueIf(bool value) {
  return value ? v1::CONDITION_STATUS_TRUE : v1::CONDITION_STATUS_FALSE;
}

void WriteServerConditions(const ServerView& in, v1::ServerStatus* out) {
  const bool ready = in.state == ServerState::kSpare || in.state == ServerState::kActive;
  const bool unknown = in.state == ServerState::kSuspect || in.state == ServerState::kJoining ||
                       in.state == ServerState::kChecking;
  WriteCondition("Ready", unknown ? v1::CONDITION_STATUS_UNKNOWN : TrueIf(ready), in.reason,
                 fmt::format("The server is {}", ServerStateName(in.state)), out->add_conditions());
  if (ready) *out->mutable_conditions(0)->mutable_last_transition_time() = out->registered();
}

void WriteJobConditions(const JobView& in, v1::JobStatus* out) {
  const bool running = in.state == JobState::kRunning;
  WriteCondition("Ready", TrueIf(running), in.reason,
                 in.message.empty() ? fmt::format("The job is {}", JobStateName(in.state)) : in.message,
                 out->add_conditions());
  std::set<ServerId> servers;
  for (const RankPlace& rank : in.ranks) {
    if (rank.rank.value >= 0) servers.insert(rank.server);
  }
  const auto count = static_cast<int32_t>(servers.size());
  const bool degraded = running && count < in.entry.spec.servers_wanted;
  WriteCondition("Degraded", TrueIf(degraded), degraded ? in.reason : Reason::kNone,
                 fmt::format("{} of {} wanted servers have ranks", count, in.entry.spec.servers_wanted),
                 out->add_conditions());
  if (in.protected_step.value <= 0) return;
  WriteCondition("Protected", v1::CONDITION_STATUS_TRUE, Reason::kNone,
                 fmt::format("Step {} has copies on peers{}", in.protected_step.value,
                             in.one_domain ? " inside the only failure domain of the job's servers: the loss of that "
                                             "domain takes all of them"
                                           : " in other failure domains"),
                 out->add_conditions());
}

std::map<ProcessId, ServerId> ServersOfProcesses(const JobView& job) {
  std::map<ProcessId, ServerId> servers;
  for (const RankPlace& rank : job.ranks) servers[rank.process] = rank.server;
  return servers;
}

}  // namespace

void WriteServer(const ServerView& in, v1::Server* out) {
  out->set_name(in.server.value);
  out->mutable_spec()->set_draining(in.draining);
  v1::ServerStatus* status = out->mutable_status();
  status->set_state(EnumTo<v1::ServerState>(in.state));
  status->set_reason(ReasonWord(in.reason));
  status->set_incarnation(in.incarnation.value);
  WriteInventory(in.inventory, status->mutable_inventory());
  status->set_devices_free(in.devices_free);
  for (const RankPlace& rank : in.ranks) WritePlace(rank, nullptr, status->add_ranks());
  WriteTime(in.registered, status->mutable_registered());
  WriteDuration(in.heartbeat_age, status->mutable_heartbeat_age());
  WriteServerConditions(in, status);
}

void WriteOutcome(const JobEnded& in, v1::JobOutcome* out) {
  out->set_state(EnumTo<v1::JobState>(in.outcome));
  out->set_reason(ReasonWord(in.reason));
  out->set_exit_code(in.exit_code);
  out->set_message(ToUtf8(in.message));
  for (const std::string& line : in.last_lines) out->add_last_lines(line);
  WriteTime(in.ended, out->mutable_ended());
}

void WriteJob(const JobView& in, v1::Job* out) {
  const JobEntry& entry = in.entry;
  out->set_name(entry.spec.name);
  out->set_uid(entry.uid.value);
  *out->mutable_spec() = ToMessage(entry.spec);
  v1::JobStatus* status = out->mutable_status();
  status->set_state(EnumTo<v1::JobState>(in.state));
  status->set_phase(EnumTo<v1::RecoveryPhase>(in.phase));
  status->set_reason(ReasonWord(in.reason));
  status->set_message(ToUtf8(in.message));
  status->set_generation(entry.resumed.value);
  status->set_generation_fenced(entry.fenced.value);
  status->set_step(in.step.value);
  status->set_protected_step(in.protected_step.value);
  status->set_world_size(in.world_size);
  const Assignment* assignment = entry.assignment ? &*entry.assignment : nullptr;
  for (const RankPlace& rank : in.ranks) WritePlace(rank, assignment, status->add_ranks());
  for (const auto& [name, value] : in.metrics) {
    v1::Metric* metric = status->add_metrics();
    metric->set_name(ToUtf8(name));
    metric->set_value(value);
  }
  WriteTime(entry.submitted, status->mutable_submitted());
  status->set_failures(entry.failures);
  if (!entry.ended && entry.fenced != entry.resumed) status->set_recovery(entry.recovery.value);
  for (const ChainLink& link : entry.lineage.links()) {
    v1::ChainLink* to = status->add_lineage();
    to->set_generation(link.generation.value);
    to->set_start(link.start.value);
  }
  shapes::WriteStateId(entry.recovery_point, status->mutable_recovery_point());
  for (const SnapshotInfo& snapshot : in.snapshots) shapes::WriteSnapshot(snapshot, status->add_snapshots());
  if (entry.ended) WriteOutcome(*entry.ended, status->mutable_outcome());
  WriteJobConditions(in, status);
  if (assignment != nullptr) {
    status->set_dp_size(assignment->dp_size);
    status->set_tp_size(assignment->tp_size);
    status->set_pp_size(assignment->pp_size);
  }
}

void WriteRecovery(const RecoveryRecord& in, v1::Recovery* out) {
  out->set_id(in.id.value);
  out->set_job_uid(in.job.value);
  out->set_job(in.job_name);
  out->set_generation_from(in.from.value);
  out->set_generation_to(in.to.value);
  out->set_reason(ReasonWord(in.reason));
  out->set_evidence(ToUtf8(in.evidence));
  out->set_planned(in.planned);
  out->set_decision(ReasonWord(in.decision));
  out->set_decision_message(ToUtf8(in.decision_message));
  for (const std::string& text : in.alternatives) out->add_alternatives(ToUtf8(text));
  out->set_outcome(ToUtf8(in.outcome));
  shapes::WriteStateId(in.recovery_point, out->mutable_recovery_point());
  out->set_steps_lost(in.steps_lost);
  out->set_generations_used(in.generations_used);
  WriteTime(in.started, out->mutable_started());
  for (const PhaseRecord& phase : in.phases) {
    v1::PhaseTiming* to = out->add_phases();
    to->set_phase(EnumTo<v1::RecoveryPhase>(phase.phase));
    WriteDuration(phase.start, to->mutable_start());
    WriteDuration(phase.duration, to->mutable_duration());
    if (phase.budget > Duration(0)) WriteDuration(phase.budget, to->mutable_budget());
  }
  for (const RestoredRank& rank : in.ranks) {
    v1::RestoredRank* to = out->add_ranks();
    to->set_rank(rank.rank.value);
    to->set_server(rank.server.value);
    to->set_process(rank.process.value);
    to->set_kept_process(rank.kept_process);
    to->set_from(ToUtf8(rank.from));
    to->set_bytes(rank.bytes);
  }
}

void WriteCheckpoint(const JobView& job, const Manifest& in, v1::Checkpoint* out) {
  out->set_job_uid(job.entry.uid.value);
  out->set_job(job.entry.spec.name);
  shapes::WriteStateId(in.state, out->mutable_state());
  out->set_shard_count(in.shard_count);
  std::map<ShardIndex, uint64_t> bytes;  // copies of one shard count once
  for (const SnapshotInfo& shard : in.shards) {
    bytes[shard.shard] = shard.bytes;
    shapes::WriteSnapshot(shard, out->add_shards());
  }
  uint64_t sum = 0;
  for (const auto& [shard, size] : bytes) sum += size;
  out->set_bytes(sum);
  WriteTime(in.committed, out->mutable_committed());
}

void WriteEvent(const EventView& in, v1::Event* out) {
  out->set_sequence(in.sequence);
  WriteTime(in.wall, out->mutable_time());
  out->set_level(EnumTo<v1::EventLevel>(in.notice.level));
  out->set_reason(ReasonWord(in.notice.reason));
  out->set_what(ToUtf8(in.notice.what));
  out->set_server(in.notice.server.value);
  out->set_job_uid(in.notice.job.value);
  out->set_job(in.notice.job_name);
  for (const auto& [key, value] : in.notice.keys) {
    v1::KeyValue* to = out->add_keys();
    to->set_key(ToUtf8(key));
    to->set_value(ToUtf8(value));
  }
}

const JobView* FindJob(const ClusterView& view, const std::string& name_or_uid) {
  const JobView* named = nullptr;
  for (const JobView& job : view.jobs) {
    if (job.entry.uid.value == name_or_uid) return &job;
    if (job.entry.spec.name == name_or_uid) named = &job;  // oldest first: the last one is the newest
  }
  return named;
}

void WriteServers(const ClusterView& view, v1::ListServersResponse* out) {
  for (const ServerView& server : view.servers) WriteServer(server, out->add_servers());
}

void WriteJobs(const ClusterView& view, v1::ListJobsResponse* out) {
  for (const JobView& job : view.jobs) WriteJob(job, out->add_jobs());
}

void WriteRecoveries(const ClusterView& view, const JobUid* job, v1::ListRecoveriesResponse* out) {
  for (const RecoveryRecord& recovery : view.recoveries) {
    if (job == nullptr || recovery.job == *job) WriteRecovery(recovery, out->add_recoveries());
  }
}

void WriteCheckpoints(const ClusterView& view, const JobUid* job, v1::ListCheckpointsResponse* out) {
  for (const JobView& entry : view.jobs) {
    if (job != nullptr && entry.entry.uid != *job) continue;
    for (const Manifest& manifest : entry.entry.manifests) {
      WriteCheckpoint(entry, manifest, out->add_checkpoints());
    }
  }
}

void WriteEvents(const ClusterView& view, const v1::ListEventsRequest& request, const JobUid* job,
                 v1::ListEventsResponse* out) {
  for (const EventView& event : view.events) {
    if (event.sequence <= request.after() && request.after() != 0) continue;
    if (job != nullptr && event.notice.job != *job) continue;
    if (!request.server().empty() && event.notice.server.value != request.server()) continue;
    WriteEvent(event, out->add_events());
  }
}

void WriteLogs(const ClusterView& view, const JobView& job, const v1::GetLogsRequest& request,
               v1::GetLogsResponse* out) {
  const std::map<ProcessId, ServerId> servers = ServersOfProcesses(job);
  for (const RankLines& lines : view.lines) {
    if (lines.job != job.entry.uid) continue;
    if (request.has_rank() && lines.rank.value != request.rank()) continue;
    v1::RankLog* log = out->add_logs();
    log->set_rank(lines.rank.value);
    log->set_process(lines.process.value);
    const auto server = servers.find(lines.process);
    if (server != servers.end()) log->set_server(server->second.value);
    const size_t count = lines.lines.size();
    const size_t tail = request.tail() > 0 ? std::min<size_t>(count, request.tail()) : count;
    for (size_t i = count - tail; i < count; ++i) log->add_lines(lines.lines[i]);
  }
}

}  // namespace everstep
