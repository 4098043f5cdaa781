#include "controller/io/store/ledger_convert.h"

#include <fmt/format.h>

#include "everstep/storage/v1/ledger.pb.h"
#include "proto/convert/reader.h"
#include "proto/convert/shapes.h"

namespace everstep {
namespace {

namespace disk = storage::v1;
using shapes::EnumTo;
using shapes::ReadSnapshot;
using shapes::ReadStateId;
using shapes::WriteSnapshot;
using shapes::WriteStateId;

// The numbers on disk are the model's plus one; whoever reorders a model enum must write a new format version.
static_assert(static_cast<int>(JobState::kCancelled) + 1 == disk::JOB_STATE_CANCELLED);
static_assert(static_cast<int>(JobState::kRunning) + 1 == disk::JOB_STATE_RUNNING);
static_assert(static_cast<int>(RecoveryPhase::kResume) + 1 == disk::RECOVERY_PHASE_RESUME);
static_assert(static_cast<int>(RecoveryPhase::kPlan) + 1 == disk::RECOVERY_PHASE_PLAN);
static_assert(static_cast<int>(SnapshotTier::kStored) + 1 == disk::SNAPSHOT_TIER_STORED);
static_assert(static_cast<int>(SnapshotTier::kPeer) + 1 == disk::SNAPSHOT_TIER_PEER);
static_assert(static_cast<int>(RestoreAction::kFetchFromSnapshot) + 1 ==
              disk::RESTORE_ACTION_FETCH_FROM_SNAPSHOT);
static_assert(static_cast<int>(RestoreAction::kRollForward) + 1 == disk::RESTORE_ACTION_ROLL_FORWARD);

std::string StoredReason(Reason reason) {
  return reason == Reason::kNone ? std::string() : std::string(ReasonName(reason));
}

// ---- parts

void WriteManifest(const Manifest& in, disk::Manifest* out) {
  WriteStateId(in.state, out->mutable_state());
  out->set_shard_count(in.shard_count);
  for (const SnapshotInfo& shard : in.shards) WriteSnapshot(shard, out->add_shards());
  out->set_committed_unix_microseconds(in.committed.unix_microseconds);
}

Manifest ReadManifest(Reader& r, const disk::Manifest& in) {
  Manifest out;
  out.state = ReadStateId(r, in.state(), "state");
  out.shard_count = r.Number32(in.shard_count(), 0, INT32_MAX, "shard_count");
  for (const disk::SnapshotInfo& shard : in.shards()) out.shards.push_back(ReadSnapshot(r, shard));
  out.committed = WallTime{in.committed_unix_microseconds()};
  return out;
}

void WriteRecovery(const RecoveryRecord& in, disk::RecoveryRecord* out) {
  out->set_id(in.id.value);
  out->set_job(in.job.value);
  out->set_job_name(in.job_name);
  out->set_generation_from(in.from.value);
  out->set_generation_to(in.to.value);
  out->set_reason(StoredReason(in.reason));
  out->set_evidence(in.evidence);
  out->set_planned(in.planned);
  out->set_decision(StoredReason(in.decision));
  out->set_decision_message(in.decision_message);
  for (const std::string& text : in.alternatives) out->add_alternatives(text);
  out->set_outcome(in.outcome);
  WriteStateId(in.recovery_point, out->mutable_recovery_point());
  out->set_steps_lost(in.steps_lost);
  out->set_generations_used(in.generations_used);
  out->set_started_unix_microseconds(in.started.unix_microseconds);
  for (const PhaseRecord& phase : in.phases) {
    disk::PhaseRecord* to = out->add_phases();
    to->set_phase(EnumTo<disk::RecoveryPhase>(phase.phase));
    to->set_start_ns(phase.start.count());
    to->set_duration_ns(phase.duration.count());
    to->set_budget_ns(phase.budget.count());
  }
  for (const RestoredRank& rank : in.ranks) {
    disk::RestoredRank* to = out->add_ranks();
    to->set_rank(rank.rank.value);
    to->set_server(rank.server.value);
    to->set_process(rank.process.value);
    to->set_kept_process(rank.kept_process);
    to->set_from(rank.from);
    to->set_bytes(rank.bytes);
  }
}

RecoveryRecord ReadRecovery(Reader& r, const disk::RecoveryRecord& in) {
  RecoveryRecord out;
  out.id = RecoveryId(in.id());
  out.job = JobUid(in.job());
  out.job_name = in.job_name();
  out.from = Generation(in.generation_from());
  out.to = Generation(in.generation_to());
  out.reason = r.ReadReason(in.reason(), "reason");
  out.evidence = in.evidence();
  out.planned = in.planned();
  out.decision = r.ReadReason(in.decision(), "decision");
  out.decision_message = in.decision_message();
  out.alternatives.assign(in.alternatives().begin(), in.alternatives().end());
  out.outcome = in.outcome();
  out.recovery_point = ReadStateId(r, in.recovery_point(), "recovery_point");
  out.steps_lost = in.steps_lost();
  out.generations_used = in.generations_used();
  out.started = WallTime{in.started_unix_microseconds()};
  for (const disk::PhaseRecord& phase : in.phases()) {
    out.phases.push_back({r.Enum(phase.phase(), RecoveryPhase::kResume, "phase"),
                          Duration(phase.start_ns()), Duration(phase.duration_ns()),
                          Duration(phase.budget_ns())});
  }
  for (const disk::RestoredRank& rank : in.ranks()) {
    out.ranks.push_back({Rank(rank.rank()), ServerId(rank.server()), ProcessId(rank.process()),
                         rank.kept_process(), rank.from(), rank.bytes()});
  }
  return out;
}

void WritePlan(const PlanMade& in, disk::PlanMade* out) {
  out->set_job(in.job.value);
  out->set_generation(in.generation.value);
  for (const PlannedSlot& slot : in.slots) {
    disk::PlannedSlot* to = out->add_slots();
    to->set_rank(slot.rank.value);
    to->set_server(slot.server.value);
    to->set_device(slot.device.value);
    to->set_process(slot.process.value);
  }
  out->set_reason(StoredReason(in.reason));
  out->set_message(in.message);
}

PlanMade ReadPlan(Reader& r, const disk::PlanMade& in) {
  PlanMade out;
  out.job = JobUid(in.job());
  out.generation = Generation(in.generation());
  for (const disk::PlannedSlot& slot : in.slots()) {
    out.slots.push_back({Rank(slot.rank()), ServerId(slot.server()), DeviceIndex(slot.device()),
                         ProcessId(slot.process())});
  }
  out.reason = r.ReadReason(in.reason(), "reason");
  out.message = in.message();
  return out;
}

void WriteEnded(const JobEnded& in, disk::JobEnded* out) {
  out->set_job(in.job.value);
  out->set_outcome(EnumTo<disk::JobState>(in.outcome));
  out->set_reason(StoredReason(in.reason));
  out->set_exit_code(in.exit_code);
  out->set_message(in.message);
  for (const std::string& line : in.last_lines) out->add_last_lines(line);
  out->set_ended_unix_microseconds(in.ended.unix_microseconds);
}

JobEnded ReadEnded(Reader& r, const disk::JobEnded& in) {
  JobEnded out;
  out.job = JobUid(in.job());
  out.outcome = r.Enum(in.outcome(), JobState::kCancelled, "outcome");
  out.reason = r.ReadReason(in.reason(), "reason");
  out.exit_code = in.exit_code();
  out.message = in.message();
  out.last_lines.assign(in.last_lines().begin(), in.last_lines().end());
  out.ended = WallTime{in.ended_unix_microseconds()};
  return out;
}

// ---- records

struct RecordWriter {
  disk::Record* out;

  void operator()(const TermStarted& in) { out->mutable_term_started()->set_term(in.term.value); }
  void operator()(const ServerRegistered& in) {
    auto* to = out->mutable_server_registered();
    to->set_server(in.server.value);
    to->set_incarnation(in.incarnation.value);
    to->set_start_nonce(in.start_nonce);
    to->set_failure_domain(in.failure_domain);
  }
  void operator()(const ServerDied& in) {
    auto* to = out->mutable_server_died();
    to->set_server(in.server.value);
    to->set_incarnation(in.incarnation.value);
    to->set_reason(StoredReason(in.reason));
  }
  void operator()(const ServerDrainSet& in) {
    auto* to = out->mutable_server_drain_set();
    to->set_server(in.server.value);
    to->set_draining(in.draining);
    to->set_request(in.request.value);
  }
  void operator()(const JobSubmitted& in) {
    auto* to = out->mutable_job_submitted();
    to->set_job(in.job.value);
    shapes::WriteJobSpec(in.spec, to->mutable_spec());
    to->set_request(in.request.value);
    to->set_submitted_unix_microseconds(in.submitted.unix_microseconds);
  }
  void operator()(const GenerationFenced& in) {
    auto* to = out->mutable_generation_fenced();
    to->set_job(in.job.value);
    to->set_generation(in.generation.value);
    to->set_recovery(in.recovery.value);
    to->set_reason(StoredReason(in.reason));
    to->set_planned(in.planned);
  }
  void operator()(const RecoveryPointDecided& in) {
    auto* to = out->mutable_recovery_point_decided();
    to->set_job(in.job.value);
    to->set_generation(in.generation.value);
    WriteStateId(in.point, to->mutable_point());
  }
  void operator()(const PlanMade& in) { WritePlan(in, out->mutable_plan_made()); }
  void operator()(const AssignmentMade& in) {
    shapes::WriteAssignment(in.assignment, out->mutable_assignment_made()->mutable_assignment());
  }
  void operator()(const GenerationResumed& in) {
    out->mutable_generation_resumed()->set_job(in.job.value);
    out->mutable_generation_resumed()->set_generation(in.generation.value);
  }
  void operator()(const FailureCounted& in) {
    auto* to = out->mutable_failure_counted();
    to->set_job(in.job.value);
    to->set_step(in.step.value);
    to->set_rank(in.rank.value);
    to->set_server(in.server.value);
    to->set_exit_code(in.exit_code);
    to->set_signal(in.signal);
  }
  void operator()(const RecoveryEnded& in) {
    WriteRecovery(in.recovery, out->mutable_recovery_ended()->mutable_recovery());
  }
  void operator()(const ManifestCommitted& in) {
    out->mutable_manifest_committed()->set_job(in.job.value);
    WriteManifest(in.manifest, out->mutable_manifest_committed()->mutable_manifest());
  }
  void operator()(const ManifestDropped& in) {
    out->mutable_manifest_dropped()->set_job(in.job.value);
    WriteStateId(in.state, out->mutable_manifest_dropped()->mutable_state());
  }
  void operator()(const JobEnded& in) { WriteEnded(in, out->mutable_job_ended()); }
  void operator()(const FinishReached& in) {
    out->mutable_finish_reached()->set_job(in.job.value);
    out->mutable_finish_reached()->set_generation(in.generation.value);
  }
  void operator()(const JobForgotten& in) { out->mutable_job_forgotten()->set_job(in.job.value); }
};

Record ReadRecord(Reader& r, const disk::Record& m) {
  switch (m.record_case()) {
    case disk::Record::kTermStarted: return TermStarted{Term(m.term_started().term())};
    case disk::Record::kServerRegistered: {
      const auto& in = m.server_registered();
      return ServerRegistered{ServerId(in.server()), Incarnation(in.incarnation()), in.start_nonce(),
                              in.failure_domain()};
    }
    case disk::Record::kServerDied: {
      const auto& in = m.server_died();
      return ServerDied{ServerId(in.server()), Incarnation(in.incarnation()),
                        r.ReadReason(in.reason(), "reason")};
    }
    case disk::Record::kServerDrainSet: {
      const auto& in = m.server_drain_set();
      return ServerDrainSet{ServerId(in.server()), in.draining(), RequestId(in.request())};
    }
    case disk::Record::kJobSubmitted: {
      const auto& in = m.job_submitted();
      return JobSubmitted{JobUid(in.job()), shapes::ReadJobSpec(r, in.spec()), RequestId(in.request()),
                          WallTime{in.submitted_unix_microseconds()}};
    }
    case disk::Record::kGenerationFenced: {
      const auto& in = m.generation_fenced();
      return GenerationFenced{JobUid(in.job()), Generation(in.generation()), RecoveryId(in.recovery()),
                              r.ReadReason(in.reason(), "reason"), in.planned()};
    }
    case disk::Record::kRecoveryPointDecided: {
      const auto& in = m.recovery_point_decided();
      return RecoveryPointDecided{JobUid(in.job()), Generation(in.generation()),
                                  ReadStateId(r, in.point(), "point")};
    }
    case disk::Record::kPlanMade: return ReadPlan(r, m.plan_made());
    case disk::Record::kAssignmentMade:
      return AssignmentMade{shapes::ReadAssignment(r, m.assignment_made().assignment())};
    case disk::Record::kGenerationResumed:
      return GenerationResumed{JobUid(m.generation_resumed().job()),
                               Generation(m.generation_resumed().generation())};
    case disk::Record::kFailureCounted: {
      const auto& in = m.failure_counted();
      return FailureCounted{JobUid(in.job()), r.ReadStep(in.step(), "step"), Rank(in.rank()),
                            ServerId(in.server()), in.exit_code(), in.signal()};
    }
    case disk::Record::kRecoveryEnded:
      return RecoveryEnded{ReadRecovery(r, m.recovery_ended().recovery())};
    case disk::Record::kManifestCommitted:
      return ManifestCommitted{JobUid(m.manifest_committed().job()),
                               ReadManifest(r, m.manifest_committed().manifest())};
    case disk::Record::kManifestDropped:
      return ManifestDropped{JobUid(m.manifest_dropped().job()),
                             ReadStateId(r, m.manifest_dropped().state(), "state")};
    case disk::Record::kJobEnded: return ReadEnded(r, m.job_ended());
    case disk::Record::kFinishReached:
      return FinishReached{JobUid(m.finish_reached().job()), Generation(m.finish_reached().generation())};
    case disk::Record::kJobForgotten: return JobForgotten{JobUid(m.job_forgotten().job())};
    case disk::Record::RECORD_NOT_SET: break;
  }
  r.Fail("record", "is of a kind this version does not know");
  return JobForgotten{};
}

// ---- state

void WriteJob(const JobEntry& in, disk::JobEntry* out) {
  out->set_uid(in.uid.value);
  shapes::WriteJobSpec(in.spec, out->mutable_spec());
  out->set_order(in.order);
  out->set_submitted_unix_microseconds(in.submitted.unix_microseconds);
  out->set_fenced(in.fenced.value);
  out->set_recovery(in.recovery.value);
  out->set_fence_reason(StoredReason(in.fence_reason));
  out->set_fence_planned(in.fence_planned);
  out->set_resumed(in.resumed.value);
  out->set_finish_reached(in.finish_reached.value);
  for (const ChainLink& link : in.lineage.links()) {
    disk::ChainLink* to = out->add_lineage();
    to->set_generation(link.generation.value);
    to->set_start(link.start.value);
  }
  WriteStateId(in.recovery_point, out->mutable_recovery_point());
  if (in.plan) WritePlan(*in.plan, out->mutable_plan());
  if (in.assignment) shapes::WriteAssignment(*in.assignment, out->mutable_assignment());
  for (const Manifest& manifest : in.manifests) WriteManifest(manifest, out->add_manifests());
  out->set_failures(in.failures);
  for (const FailureEntry& failure : in.recent_failures) {
    disk::FailureEntry* to = out->add_recent_failures();
    to->set_step(failure.step.value);
    to->set_rank(failure.rank.value);
    to->set_server(failure.server.value);
    to->set_exit_code(failure.exit_code);
    to->set_signal(failure.signal);
  }
  if (in.ended) WriteEnded(*in.ended, out->mutable_ended());
}

Lineage ReadLineage(Reader& r, const google::protobuf::RepeatedPtrField<disk::ChainLink>& in) {
  std::vector<ChainLink> links;
  for (const disk::ChainLink& link : in) {
    links.push_back({Generation(link.generation()), r.ReadStep(link.start(), "start")});
    const size_t n = links.size();
    if (n > 1 && (links[n - 1].generation <= links[n - 2].generation ||
                  links[n - 1].start <= links[n - 2].start)) {
      r.Fail("lineage", "does not rise");
      return Lineage();
    }
  }
  return Lineage::FromLinks(std::move(links));
}

JobEntry ReadJob(Reader& r, const disk::JobEntry& in) {
  JobEntry out;
  out.uid = JobUid(in.uid());
  r.In("spec", [&] { out.spec = shapes::ReadJobSpec(r, in.spec()); });
  out.order = in.order();
  out.submitted = WallTime{in.submitted_unix_microseconds()};
  out.fenced = Generation(in.fenced());
  out.recovery = RecoveryId(in.recovery());
  out.fence_reason = r.ReadReason(in.fence_reason(), "fence_reason");
  out.fence_planned = in.fence_planned();
  out.resumed = Generation(in.resumed());
  out.finish_reached = Generation(in.finish_reached());
  out.lineage = ReadLineage(r, in.lineage());
  out.recovery_point = ReadStateId(r, in.recovery_point(), "recovery_point");
  if (in.has_plan()) out.plan = ReadPlan(r, in.plan());
  if (in.has_assignment()) {
    r.In("assignment", [&] { out.assignment = shapes::ReadAssignment(r, in.assignment()); });
  }
  for (const disk::Manifest& manifest : in.manifests()) {
    out.manifests.push_back(ReadManifest(r, manifest));
  }
  out.failures = in.failures();
  for (const disk::FailureEntry& failure : in.recent_failures()) {
    out.recent_failures.push_back({r.ReadStep(failure.step(), "step"), Rank(failure.rank()),
                                   ServerId(failure.server()), failure.exit_code(),
                                   failure.signal()});
  }
  if (in.has_ended()) out.ended = ReadEnded(r, in.ended());
  return out;
}

Status CheckVersion(uint32_t version, const char* what) {
  if (version == kLedgerFormatVersion) return OkStatus();
  if (version == 0) return DataLoss(fmt::format("the ledger's {} has no format version", what));
  return FailedPrecondition(
      fmt::format("the ledger's {} has format version {}; this program reads version {}: use the "
                  "version of everstep that wrote it, or a newer one",
                  what, version, kLedgerFormatVersion));
}

Status AsDataLoss(const Status& status, const char* what) {
  return DataLoss(fmt::format("the ledger's {} is damaged: {}", what, status.message()));
}

}  // namespace

std::string EncodeRecord(const Record& record) {
  disk::Record out;
  out.set_format_version(kLedgerFormatVersion);
  std::visit(RecordWriter{&out}, record);
  return out.SerializeAsString();
}

Result<Record> DecodeRecord(std::string_view bytes) {
  disk::Record in;
  if (!in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return DataLoss("the ledger's record is damaged: it does not parse");
  }
  EVERSTEP_RETURN_IF_ERROR(CheckVersion(in.format_version(), "record"));
  Reader r(Reader::Origin::kOwn);
  Record record = ReadRecord(r, in);
  if (!r.ok()) return AsDataLoss(r.status(), "record");
  return record;
}

std::string EncodeLedgerState(const LedgerState& state) {
  disk::LedgerSnapshot out;
  out.set_format_version(kLedgerFormatVersion);
  out.set_term(state.term.value);
  out.set_next_job_order(state.next_job_order);
  out.set_next_recovery(state.next_recovery);
  out.set_applied(state.applied.value);
  for (const auto& [server, entry] : state.servers) {
    disk::ServerEntry* to = out.add_servers();
    to->set_server(server.value);
    to->set_newest(entry.newest.value);
    to->set_dead_upto(entry.dead_upto.value);
    to->set_start_nonce(entry.start_nonce);
    to->set_failure_domain(entry.failure_domain);
    to->set_draining(entry.draining);
    for (const RequestId& request : entry.drain_requests) to->add_drain_requests(request.value);
  }
  for (const auto& [uid, entry] : state.jobs) WriteJob(entry, out.add_jobs());
  for (const RecoveryRecord& recovery : state.recoveries) {
    WriteRecovery(recovery, out.add_recoveries());
  }
  for (const auto& [request, job] : state.requests) {
    disk::RequestEntry* to = out.add_requests();
    to->set_request(request.value);
    to->set_job(job.value);
  }
  return out.SerializeAsString();
}

Result<LedgerState> DecodeLedgerState(std::string_view bytes) {
  disk::LedgerSnapshot in;
  if (!in.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return DataLoss("the ledger's snapshot is damaged: it does not parse");
  }
  EVERSTEP_RETURN_IF_ERROR(CheckVersion(in.format_version(), "snapshot"));
  Reader r(Reader::Origin::kOwn);
  LedgerState out;
  out.term = Term(in.term());
  out.next_job_order = in.next_job_order();
  out.next_recovery = in.next_recovery();
  out.applied = LedgerSequence(in.applied());
  for (const disk::ServerEntry& server : in.servers()) {
    out.servers[ServerId(server.server())] =
        ServerEntry{Incarnation(server.newest()), Incarnation(server.dead_upto()),
                    server.start_nonce(), server.failure_domain(), server.draining(), {}};
    for (const std::string& request : server.drain_requests()) {
      out.servers[ServerId(server.server())].drain_requests.push_back(RequestId(request));
    }
  }
  for (int i = 0; i < in.jobs_size(); ++i) {
    r.In("jobs", i, [&] {
      JobEntry job = ReadJob(r, in.jobs(i));
      JobUid uid = job.uid;
      out.jobs.emplace(std::move(uid), std::move(job));
    });
  }
  for (int i = 0; i < in.recoveries_size(); ++i) {
    r.In("recoveries", i, [&] { out.recoveries.push_back(ReadRecovery(r, in.recoveries(i))); });
  }
  for (const disk::RequestEntry& request : in.requests()) {
    out.requests[RequestId(request.request())] = JobUid(request.job());
  }
  if (!r.ok()) return AsDataLoss(r.status(), "snapshot");
  return out;
}

}  // namespace everstep
