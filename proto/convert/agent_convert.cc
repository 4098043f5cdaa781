#include "proto/convert/agent_convert.h"

#include <cmath>

#include "proto/convert/reader.h"
#include "proto/convert/shapes.h"

namespace everstep {
namespace {

using shapes::EnumTo;
using shapes::ReadDigest;
using shapes::ReadSnapshot;
using shapes::ReadStateId;
using shapes::WriteDigest;
using shapes::WriteSnapshot;
using shapes::WriteStateId;

constexpr Duration kLongest = std::chrono::hours(24 * 365);

// ---- shapes of this stream only

void WriteReport(const RankReport& in, v1::RankReport* out) {
  out->set_memory_valid(in.memory_valid);
  WriteStateId(in.applied, out->mutable_applied());
  out->set_gradients_generation(in.gradients.value);
}

RankReport ReadReport(Reader& r, const v1::RankReport& in) {
  RankReport out;
  out.memory_valid = in.memory_valid();
  out.applied = ReadStateId(r, in.applied(), "applied");
  out.gradients = Generation(in.gradients_generation());
  return out;
}

void WriteProgress(const Progress& in, v1::Progress* out) {
  out->set_phase(EnumTo<v1::RankPhase>(in.phase));
  out->set_memory_valid(in.memory_valid);
  WriteStateId(in.applied, out->mutable_applied());
  out->set_generation(in.generation.value);
  out->set_vote_passed(in.vote_passed.value);
  out->set_collective_sequence(in.collective_sequence);
}

Progress ReadProgress(Reader& r, const v1::Progress& in) {
  Progress out;
  out.phase = r.Enum(in.phase(), RankPhase::kFinished, "phase");
  out.memory_valid = in.memory_valid();
  out.applied = ReadStateId(r, in.applied(), "applied");
  out.generation = Generation(in.generation());
  out.vote_passed = r.ReadStep(in.vote_passed(), "vote_passed");
  out.collective_sequence = in.collective_sequence();
  return out;
}

template <typename Lines>
void WriteLines(const std::vector<std::string>& in, Lines* out) {
  const size_t skipped = in.size() > kLinesMax ? in.size() - kLinesMax : 0;
  for (size_t i = skipped; i < in.size(); ++i) *out->Add() = in[i].substr(0, kLineBytesMax);
}

template <typename Lines>
std::vector<std::string> ReadLines(Reader& r, const Lines& in, const char* field) {
  std::vector<std::string> out;
  if (!r.ListFits(in.size(), kLinesMax, field)) return out;
  out.reserve(in.size());
  for (const std::string& line : in) {
    if (line.size() > kLineBytesMax) r.Fail(field, "has a line that is too long");
    out.push_back(line);
  }
  return out;
}

template <typename Pb>
JobUid ReadJob(Reader& r, const Pb& in) {
  return JobUid(r.Name(in.job(), "job"));
}

template <typename Pb>
ProcessId ReadProcess(Reader& r, const Pb& in) {
  return ProcessId(r.AboveZero(in.process(), "process"));
}

template <typename Pb>
std::vector<ProcessId> ReadProcesses(Reader& r, const Pb& in) {
  std::vector<ProcessId> out;
  if (!r.ListFits(in.processes_size(), kProcessesMax, "processes")) return out;
  for (uint64_t process : in.processes()) out.push_back(ProcessId(process));
  return out;
}

// ---- hello and heartbeat

void WriteInventory(const ServerInventory& in, v1::ServerInventory* out) {
  out->set_server(in.server.value);
  out->set_failure_domain(ToUtf8(in.failure_domain, kNameBytesMax));
  out->set_host(in.host);
  out->set_probe_address(in.probe_address);
  out->set_transfer_address(in.transfer_address);
  out->set_root_directory(ToUtf8(in.root_directory, kPathBytesMax));
  out->set_version(ToUtf8(in.version, kNameBytesMax));
  out->set_cpu_count(in.cpu_count);
  out->set_memory_bytes(in.memory_bytes);
  for (const Device& device : in.devices) {
    v1::Device* to = out->add_devices();
    to->set_index(device.index.value);
    to->set_kind(EnumTo<v1::DeviceKind>(device.kind));
    to->set_model(ToUtf8(device.model, kNameBytesMax));
    to->set_memory_bytes(device.memory_bytes);
    to->set_speed(device.speed);
    to->set_uuid(ToUtf8(device.uuid, kNameBytesMax));
  }
}

ServerInventory ReadInventory(Reader& r, const v1::ServerInventory& in) {
  ServerInventory out;
  out.server = ServerId(r.Name(in.server(), "server"));
  out.failure_domain = r.Text(in.failure_domain(), "failure_domain", kNameBytesMax);
  out.host = r.Text(in.host(), "host", kAddressBytesMax);
  out.probe_address = r.Address(in.probe_address(), "probe_address");
  out.transfer_address = r.Address(in.transfer_address(), "transfer_address");
  out.root_directory = r.Text(in.root_directory(), "root_directory", kPathBytesMax);
  out.version = r.Text(in.version(), "version", kNameBytesMax);
  out.cpu_count = in.cpu_count();
  out.memory_bytes = in.memory_bytes();
  if (!r.ListFits(in.devices_size(), kDevicesMax, "devices")) return out;
  for (int i = 0; i < in.devices_size(); ++i) {
    r.In("devices", i, [&] {
      const v1::Device& from = in.devices(i);
      Device device;
      device.index = DeviceIndex(r.Number32(from.index(), 0, INT32_MAX, "index"));
      device.kind = r.Enum(from.kind(), DeviceKind::kGpu, "kind");
      device.model = r.Text(from.model(), "model", kNameBytesMax);
      device.memory_bytes = from.memory_bytes();
      device.speed = from.speed();
      device.uuid = r.Text(from.uuid(), "uuid", kNameBytesMax);
      if (!std::isfinite(device.speed) || device.speed <= 0) r.Fail("speed", "is not above 0");
      out.devices.push_back(std::move(device));
    });
  }
  return out;
}

AgentHello ReadHello(Reader& r, const v1::AgentHello& in) {
  AgentHello out;
  out.protocol_version = in.protocol_version();
  r.In("inventory", [&] { out.inventory = ReadInventory(r, in.inventory()); });
  out.start_nonce = in.start_nonce();
  out.incarnation = Incarnation(in.incarnation());
  out.highest_term = Term(in.highest_term());
  if (r.ListFits(in.processes_size(), kProcessesMax, "processes")) {
    for (int i = 0; i < in.processes_size(); ++i) {
      r.In("processes", i, [&] {
        const v1::ProcessStatus& from = in.processes(i);
        ProcessStatus process;
        process.job = ReadJob(r, from);
        process.process = ReadProcess(r, from);
        process.device = DeviceIndex(r.Number32(from.device(), 0, INT32_MAX, "device"));
        process.pid = r.Number(from.pid(), 0, INT64_MAX, "pid");
        process.joined = from.joined();
        process.mesh_address = r.Address(from.mesh_address(), "mesh_address");
        process.promised = Generation(from.promised());
        process.collected = from.collected();
        r.In("report", [&] { process.report = ReadReport(r, from.report()); });
        process.assigned = Generation(from.assigned());
        r.In("progress", [&] { process.progress = ReadProgress(r, from.progress()); });
        out.processes.push_back(std::move(process));
      });
    }
  }
  if (r.ListFits(in.snapshots_size(), kSnapshotsMax, "snapshots")) {
    for (int i = 0; i < in.snapshots_size(); ++i) {
      r.In("snapshots", i, [&] {
        out.snapshots.emplace_back(ReadJob(r, in.snapshots(i)),
                                   ReadSnapshot(r, in.snapshots(i).snapshot()));
      });
    }
  }
  return out;
}

Heartbeat ReadHeartbeat(Reader& r, const v1::Heartbeat& in) {
  Heartbeat out;
  out.server = ServerId(r.Name(in.server(), "server"));
  out.incarnation = Incarnation(r.AboveZero(in.incarnation(), "incarnation"));
  out.sequence = in.sequence();
  out.loop_counter = in.loop_counter();
  out.acted = CommandSequence(in.acted());
  if (!r.ListFits(in.votes_size(), 64, "votes")) return out;
  for (const v1::Heartbeat::Vote& vote : in.votes()) {
    out.votes.push_back({ProcessId(vote.process()), Generation(vote.generation()),
                         r.ReadStep(vote.step(), "step"),
                         r.Enum(vote.phase(), RankPhase::kFinished, "phase")});
  }
  return out;
}

// ---- facts, written

struct FactWriter {
  v1::FactMessage* out;

  template <typename Pb, typename M>
  static Pb* Common(Pb* to, const M& in) {
    to->set_job(in.job.value);
    to->set_process(in.process.value);
    return to;
  }
  void operator()(const ProcessStarted& in) {
    Common(out->mutable_process_started(), in)->set_pid(in.pid);
  }
  void operator()(const ProcessStartFailed& in) {
    auto* to = Common(out->mutable_process_start_failed(), in);
    to->set_reason(std::string(ReasonName(in.reason)));
    to->set_message(ToUtf8(in.message));
  }
  void operator()(const ProcessExited& in) {
    auto* to = Common(out->mutable_process_exited(), in);
    to->set_exit_code(in.exit_code);
    to->set_signal(in.signal);
    to->set_finished(in.finished);
    WriteProgress(in.progress, to->mutable_progress());
    WriteLines(in.last_lines, to->mutable_last_lines());
    WriteDuration(in.noticed_ago, to->mutable_noticed_ago());
  }
  void operator()(const ProcessJoined& in) {
    auto* to = Common(out->mutable_process_joined(), in);
    to->set_pid(in.pid);
    to->set_mesh_address(in.mesh_address);
  }
  void operator()(const ProcessCollected& in) {
    auto* to = Common(out->mutable_process_collected(), in);
    to->set_generation(in.answer.generation.value);
    WriteReport(in.answer.report, to->mutable_report());
    to->set_planned(in.answer.planned);
  }
  void operator()(const ProcessConnected& in) {
    Common(out->mutable_process_connected(), in)->set_generation(in.connected.generation.value);
  }
  void operator()(const ProcessReady& in) {
    auto* to = Common(out->mutable_process_ready(), in);
    to->set_generation(in.ready.generation.value);
    WriteDigest(in.ready.shard_digest, to->mutable_shard_digest());
    to->set_bytes_restored(in.ready.bytes_restored);
    to->set_restored_from(ToUtf8(in.ready.restored_from, kPathBytesMax));
  }
  void operator()(const ProcessFailed& in) {
    auto* to = Common(out->mutable_process_failed(), in);
    to->set_generation(in.failed.generation.value);
    to->set_suspect(in.failed.suspect.value);
    to->set_code(static_cast<int>(in.failed.code));
    to->set_message(ToUtf8(in.failed.message));
  }
  void operator()(const SnapshotHeld& in) {
    out->mutable_snapshot_held()->set_job(in.job.value);
    WriteSnapshot(in.snapshot, out->mutable_snapshot_held()->mutable_snapshot());
  }
  void operator()(const SnapshotLost& in) {
    auto* to = out->mutable_snapshot_lost();
    to->set_job(in.job.value);
    WriteSnapshot(in.snapshot, to->mutable_snapshot());
    to->set_reason(std::string(ReasonName(in.reason)));
    to->set_message(ToUtf8(in.message));
  }
  void operator()(const MetricObserved& in) {
    auto* to = Common(out->mutable_metric_observed(), in);
    to->set_step(in.metric.step.value);
    to->set_name(ToUtf8(in.metric.name, kNameBytesMax));
    to->set_value(in.metric.value);
  }
  void operator()(const LinesPrinted& in) {
    WriteLines(in.lines, Common(out->mutable_lines_printed(), in)->mutable_lines());
  }
  void operator()(const ProbeReturned& in) { out->mutable_probe_returned()->set_nonce(in.nonce); }
  void operator()(const StorageTroubled& in) {
    auto* to = out->mutable_storage_troubled();
    to->set_reason(std::string(ReasonName(in.reason)));
    to->set_message(ToUtf8(in.message));
  }
};

// ---- facts, read

ProcessExited ReadExited(Reader& r, const v1::ProcessExited& in) {
  ProcessExited out;
  out.job = ReadJob(r, in);
  out.process = ReadProcess(r, in);
  out.exit_code = r.Number32(in.exit_code(), 0, 255, "exit_code");
  out.signal = r.Number32(in.signal(), 0, 127, "signal");
  out.finished = in.finished();
  r.In("progress", [&] { out.progress = ReadProgress(r, in.progress()); });
  out.last_lines = ReadLines(r, in.last_lines(), "last_lines");
  out.noticed_ago = r.ReadDuration(in.noticed_ago(), Duration(0), kLongest, "noticed_ago");
  return out;
}

ProcessFailed ReadFailed(Reader& r, const v1::ProcessFailed& in) {
  ProcessFailed out{ReadJob(r, in), ReadProcess(r, in), {}};
  out.failed.generation = Generation(in.generation());
  out.failed.suspect = Rank(r.Number32(in.suspect(), -1, kRanksMax, "suspect"));
  out.failed.code = static_cast<StatusCode>(
      r.Number(in.code(), 1, static_cast<int>(StatusCode::kDataLoss), "code"));
  out.failed.message = r.Text(in.message(), "message");
  return out;
}

Fact ReadFact(Reader& r, const v1::FactMessage& m) {
  switch (m.fact_case()) {
    case v1::FactMessage::kProcessStarted: {
      const auto& in = m.process_started();
      return ProcessStarted{ReadJob(r, in), ReadProcess(r, in), r.Number(in.pid(), 0, INT64_MAX, "pid")};
    }
    case v1::FactMessage::kProcessStartFailed: {
      const auto& in = m.process_start_failed();
      return ProcessStartFailed{ReadJob(r, in), ReadProcess(r, in), r.ReadReason(in.reason(), "reason"),
                                r.Text(in.message(), "message")};
    }
    case v1::FactMessage::kProcessExited: return ReadExited(r, m.process_exited());
    case v1::FactMessage::kProcessJoined: {
      const auto& in = m.process_joined();
      return ProcessJoined{ReadJob(r, in), ReadProcess(r, in), r.Number(in.pid(), 0, INT64_MAX, "pid"),
                           r.Address(in.mesh_address(), "mesh_address")};
    }
    case v1::FactMessage::kProcessCollected: {
      const auto& in = m.process_collected();
      ProcessCollected out{ReadJob(r, in), ReadProcess(r, in), {}};
      out.answer.generation = Generation(r.AboveZero(in.generation(), "generation"));
      r.In("report", [&] { out.answer.report = ReadReport(r, in.report()); });
      out.answer.planned = in.planned();
      return out;
    }
    case v1::FactMessage::kProcessConnected: {
      const auto& in = m.process_connected();
      return ProcessConnected{ReadJob(r, in), ReadProcess(r, in),
                              RankConnected{Generation(r.AboveZero(in.generation(), "generation"))}};
    }
    case v1::FactMessage::kProcessReady: {
      const auto& in = m.process_ready();
      ProcessReady out{ReadJob(r, in), ReadProcess(r, in), {}};
      out.ready.generation = Generation(r.AboveZero(in.generation(), "generation"));
      out.ready.shard_digest = ReadDigest(in.shard_digest());
      out.ready.bytes_restored = in.bytes_restored();
      out.ready.restored_from = r.Text(in.restored_from(), "restored_from", kPathBytesMax);
      return out;
    }
    case v1::FactMessage::kProcessFailed: return ReadFailed(r, m.process_failed());
    case v1::FactMessage::kSnapshotHeld:
      return SnapshotHeld{ReadJob(r, m.snapshot_held()), ReadSnapshot(r, m.snapshot_held().snapshot())};
    case v1::FactMessage::kSnapshotLost: {
      const auto& in = m.snapshot_lost();
      return SnapshotLost{ReadJob(r, in), ReadSnapshot(r, in.snapshot()),
                          r.ReadReason(in.reason(), "reason"), r.Text(in.message(), "message")};
    }
    case v1::FactMessage::kMetricObserved: {
      const auto& in = m.metric_observed();
      return MetricObserved{ReadJob(r, in), ReadProcess(r, in),
                            MetricReported{r.ReadStep(in.step(), "step"),
                                           r.Text(in.name(), "name", kNameBytesMax), in.value()}};
    }
    case v1::FactMessage::kLinesPrinted: {
      const auto& in = m.lines_printed();
      return LinesPrinted{ReadJob(r, in), ReadProcess(r, in), ReadLines(r, in.lines(), "lines")};
    }
    case v1::FactMessage::kProbeReturned: return ProbeReturned{m.probe_returned().nonce()};
    case v1::FactMessage::kStorageTroubled:
      return StorageTroubled{r.ReadReason(m.storage_troubled().reason(), "reason"),
                             r.Text(m.storage_troubled().message(), "message")};
    case v1::FactMessage::FACT_NOT_SET: break;
  }
  r.Fail("fact", "is missing or of a kind this version does not know");
  return ProbeReturned{};
}

// ---- commands, written

template <typename Pb>
void WriteProcesses(const std::vector<ProcessId>& in, Pb* out) {
  for (ProcessId process : in) out->add_processes(process.value);
}

struct CommandWriter {
  v1::ControllerMessage* out;

  void operator()(const Welcome& in) {
    auto* to = out->mutable_welcome();
    to->set_incarnation(in.incarnation.value);
    WriteDuration(in.heartbeat_interval, to->mutable_heartbeat_interval());
    to->set_heartbeat_address(in.heartbeat_address);
    to->set_heartbeat_key_id(in.heartbeat_key_id);
    to->set_heartbeat_key(std::string(in.heartbeat_key.begin(), in.heartbeat_key.end()));
    for (ProcessId process : in.keep) to->add_keep(process.value);
  }
  void operator()(const Refuse& in) {
    out->mutable_refuse()->set_message(ToUtf8(in.message));
    out->mutable_refuse()->set_permanent(in.permanent);
  }
  void operator()(const SpawnProcess& in) {
    auto* to = out->mutable_spawn_process();
    to->set_job(in.job.value);
    to->set_process(in.process.value);
    to->set_device(in.device.value);
    to->set_standby(in.standby);
    to->set_restart_count(in.restart_count);
    to->set_rank(in.rank.value);
    to->set_world_size(in.world_size);
    to->set_local_rank(in.local_rank);
    to->set_local_world_size(in.local_world_size);
    to->set_master_address(in.master_address);
    to->set_master_port(in.master_port);
    to->set_generation(in.generation.value);
    shapes::WriteJobSpec(in.spec, to->mutable_spec());
  }
  void operator()(const KillProcess& in) {
    auto* to = out->mutable_kill_process();
    to->set_job(in.job.value);
    to->set_process(in.process.value);
    WriteDuration(in.grace, to->mutable_grace());
  }
  void operator()(const FenceProcesses& in) {
    auto* to = out->mutable_fence_processes();
    to->set_job(in.job.value);
    to->set_generation(in.generation.value);
    WriteProcesses(in.processes, to);
  }
  void operator()(const PrepareProcesses& in) {
    auto* to = out->mutable_prepare_processes();
    to->set_job(in.job.value);
    to->set_generation(in.generation.value);
    WriteProcesses(in.processes, to);
  }
  void operator()(const AssignProcesses& in) {
    shapes::WriteAssignment(in.assignment, out->mutable_assign_processes()->mutable_assignment());
  }
  void operator()(const ResumeProcesses& in) {
    auto* to = out->mutable_resume_processes();
    to->set_job(in.job.value);
    to->set_generation(in.generation.value);
    to->set_protected_step(in.protected_step.value);
  }
  void operator()(const ProtectedStepRaised& in) {
    out->mutable_protected_step_raised()->set_job(in.job.value);
    out->mutable_protected_step_raised()->set_step(in.step.value);
  }
  void operator()(const CopySnapshot& in) {
    auto* to = out->mutable_copy_snapshot();
    to->set_job(in.job.value);
    shapes::WriteSource(in.source, to->mutable_source());
    WriteDigest(in.digest, to->mutable_digest());
    to->set_bytes(in.bytes);
    to->set_to(EnumTo<v1::SnapshotTier>(in.to));
  }
  void operator()(const DropSnapshots& in) {
    out->mutable_drop_snapshots()->set_job(in.job.value);
    for (const SnapshotInfo& snapshot : in.snapshots) {
      WriteSnapshot(snapshot, out->mutable_drop_snapshots()->add_snapshots());
    }
  }
  void operator()(const ReleaseJob& in) { out->mutable_release_job()->set_job(in.job.value); }
  void operator()(const AcknowledgeFacts& in) {
    out->mutable_acknowledge_facts()->set_upto(in.upto.value);
  }
  void operator()(const Probe& in) { out->mutable_probe()->set_nonce(in.nonce); }
};

// ---- commands, read

Welcome ReadWelcome(Reader& r, const v1::Welcome& in) {
  Welcome out;
  out.incarnation = Incarnation(r.AboveZero(in.incarnation(), "incarnation"));
  out.heartbeat_interval =
      r.ReadDuration(in.heartbeat_interval(), Milliseconds(1), Seconds(3600), "heartbeat_interval");
  out.heartbeat_address = r.Address(in.heartbeat_address(), "heartbeat_address");
  out.heartbeat_key_id = in.heartbeat_key_id();
  if (in.heartbeat_key().size() == out.heartbeat_key.size()) {
    for (size_t i = 0; i < out.heartbeat_key.size(); ++i) {
      out.heartbeat_key[i] = static_cast<uint8_t>(in.heartbeat_key()[i]);
    }
  } else {
    r.Fail("heartbeat_key", "needs 32 bytes");
  }
  if (r.ListFits(in.keep_size(), kProcessesMax, "keep")) {
    for (uint64_t process : in.keep()) out.keep.push_back(ProcessId(process));
  }
  return out;
}

SpawnProcess ReadSpawn(Reader& r, const v1::SpawnProcess& in) {
  SpawnProcess out;
  out.job = ReadJob(r, in);
  out.process = ReadProcess(r, in);
  out.device = DeviceIndex(r.Number32(in.device(), 0, INT32_MAX, "device"));
  out.standby = in.standby();
  out.restart_count = r.Number32(in.restart_count(), 0, INT32_MAX, "restart_count");
  out.rank = Rank(r.Number32(in.rank(), -1, kRanksMax, "rank"));
  out.world_size = r.Number32(in.world_size(), 0, kRanksMax, "world_size");
  out.local_rank = r.Number32(in.local_rank(), 0, kRanksMax, "local_rank");
  out.local_world_size = r.Number32(in.local_world_size(), 0, kRanksMax, "local_world_size");
  out.master_address = r.Text(in.master_address(), "master_address", kAddressBytesMax);
  out.master_port = r.Number32(in.master_port(), 0, 65535, "master_port");
  out.generation = Generation(in.generation());
  r.In("spec", [&] { out.spec = shapes::ReadJobSpec(r, in.spec()); });
  return out;
}

CopySnapshot ReadCopy(Reader& r, const v1::CopySnapshot& in) {
  CopySnapshot out;
  out.job = ReadJob(r, in);
  r.In("source", [&] { out.source = shapes::ReadSource(r, in.source()); });
  out.digest = ReadDigest(in.digest());
  out.bytes = in.bytes();
  out.to = r.Enum(in.to(), SnapshotTier::kStored, "to");
  return out;
}

DropSnapshots ReadDrop(Reader& r, const v1::DropSnapshots& in) {
  DropSnapshots out{ReadJob(r, in), {}};
  if (!r.ListFits(in.snapshots_size(), kSnapshotsMax, "snapshots")) return out;
  for (int i = 0; i < in.snapshots_size(); ++i) {
    r.In("snapshots", i, [&] { out.snapshots.push_back(ReadSnapshot(r, in.snapshots(i))); });
  }
  return out;
}

Command ReadCommand(Reader& r, const v1::ControllerMessage& m) {
  switch (m.command_case()) {
    case v1::ControllerMessage::kWelcome: return ReadWelcome(r, m.welcome());
    case v1::ControllerMessage::kRefuse: return Refuse{r.Text(m.refuse().message(), "message"), m.refuse().permanent()};
    case v1::ControllerMessage::kSpawnProcess: return ReadSpawn(r, m.spawn_process());
    case v1::ControllerMessage::kKillProcess: {
      const auto& in = m.kill_process();
      return KillProcess{ReadJob(r, in), ReadProcess(r, in),
                         r.ReadDuration(in.grace(), Duration(0), kLongest, "grace")};
    }
    case v1::ControllerMessage::kFenceProcesses: {
      const auto& in = m.fence_processes();
      return FenceProcesses{ReadJob(r, in), Generation(r.AboveZero(in.generation(), "generation")),
                            ReadProcesses(r, in)};
    }
    case v1::ControllerMessage::kPrepareProcesses: {
      const auto& in = m.prepare_processes();
      return PrepareProcesses{ReadJob(r, in), Generation(r.AboveZero(in.generation(), "generation")),
                              ReadProcesses(r, in)};
    }
    case v1::ControllerMessage::kAssignProcesses: {
      AssignProcesses out;
      r.In("assignment", [&] {
        out.assignment = shapes::ReadAssignment(r, m.assign_processes().assignment());
      });
      return out;
    }
    case v1::ControllerMessage::kResumeProcesses: {
      const auto& in = m.resume_processes();
      return ResumeProcesses{ReadJob(r, in), Generation(r.AboveZero(in.generation(), "generation")),
                             r.ReadStep(in.protected_step(), "protected_step")};
    }
    case v1::ControllerMessage::kProtectedStepRaised:
      return ProtectedStepRaised{ReadJob(r, m.protected_step_raised()),
                                 r.ReadStep(m.protected_step_raised().step(), "step")};
    case v1::ControllerMessage::kCopySnapshot: return ReadCopy(r, m.copy_snapshot());
    case v1::ControllerMessage::kDropSnapshots: return ReadDrop(r, m.drop_snapshots());
    case v1::ControllerMessage::kReleaseJob: return ReleaseJob{ReadJob(r, m.release_job())};
    case v1::ControllerMessage::kAcknowledgeFacts:
      return AcknowledgeFacts{FactSequence(m.acknowledge_facts().upto())};
    case v1::ControllerMessage::kProbe: return Probe{m.probe().nonce()};
    case v1::ControllerMessage::COMMAND_NOT_SET: break;
  }
  r.Fail("command", "is missing or of a kind this version does not know");
  return Probe{};
}

}  // namespace

v1::AgentMessage ToMessage(const AgentHello& hello) {
  v1::AgentMessage message;
  v1::AgentHello* out = message.mutable_hello();
  out->set_protocol_version(hello.protocol_version);
  WriteInventory(hello.inventory, out->mutable_inventory());
  out->set_start_nonce(hello.start_nonce);
  out->set_incarnation(hello.incarnation.value);
  out->set_highest_term(hello.highest_term.value);
  for (const ProcessStatus& process : hello.processes) {
    v1::ProcessStatus* to = out->add_processes();
    to->set_job(process.job.value);
    to->set_process(process.process.value);
    to->set_device(process.device.value);
    to->set_pid(process.pid);
    to->set_joined(process.joined);
    to->set_mesh_address(process.mesh_address);
    to->set_promised(process.promised.value);
    to->set_collected(process.collected);
    WriteReport(process.report, to->mutable_report());
    to->set_assigned(process.assigned.value);
    WriteProgress(process.progress, to->mutable_progress());
  }
  for (const auto& [job, snapshot] : hello.snapshots) {
    v1::HeldSnapshot* to = out->add_snapshots();
    to->set_job(job.value);
    WriteSnapshot(snapshot, to->mutable_snapshot());
  }
  return message;
}

v1::AgentMessage ToMessage(FactSequence sequence, const Fact& fact) {
  v1::AgentMessage message;
  message.mutable_fact()->set_sequence(sequence.value);
  std::visit(FactWriter{message.mutable_fact()}, fact);
  return message;
}

v1::AgentMessage ToMessage(const Heartbeat& heartbeat) {
  v1::AgentMessage message;
  v1::Heartbeat* out = message.mutable_heartbeat();
  out->set_server(heartbeat.server.value);
  out->set_incarnation(heartbeat.incarnation.value);
  out->set_sequence(heartbeat.sequence);
  out->set_loop_counter(heartbeat.loop_counter);
  out->set_acted(heartbeat.acted.value);
  for (const Heartbeat::Vote& vote : heartbeat.votes) {
    v1::Heartbeat::Vote* to = out->add_votes();
    to->set_process(vote.process.value);
    to->set_generation(vote.generation.value);
    to->set_step(vote.step.value);
    to->set_phase(EnumTo<v1::RankPhase>(vote.phase));
  }
  return message;
}

Result<FromAgent> FromMessage(const v1::AgentMessage& message) {
  Reader r;
  FromAgent out;
  switch (message.body_case()) {
    case v1::AgentMessage::kHello:
      r.In("hello", [&] { out = ReadHello(r, message.hello()); });
      break;
    case v1::AgentMessage::kFact:
      r.In("fact", [&] {
        const FactSequence sequence(r.AboveZero(message.fact().sequence(), "sequence"));
        out = SequencedFact{sequence, ReadFact(r, message.fact())};
      });
      break;
    case v1::AgentMessage::kHeartbeat:
      r.In("heartbeat", [&] { out = ReadHeartbeat(r, message.heartbeat()); });
      break;
    case v1::AgentMessage::BODY_NOT_SET:
      r.Fail("body", "is missing or of a kind this version does not know");
      break;
  }
  if (!r.ok()) return r.status();
  return out;
}

v1::ControllerMessage ToMessage(const CommandHeader& header, const Command& command) {
  v1::ControllerMessage message;
  message.set_term(header.term.value);
  message.set_sequence(header.sequence.value);
  std::visit(CommandWriter{&message}, command);
  return message;
}

Result<ReceivedCommand> FromMessage(const v1::ControllerMessage& message) {
  Reader r;
  ReceivedCommand out;
  out.header.term = Term(message.term());
  out.header.sequence = CommandSequence(message.sequence());
  out.command = ReadCommand(r, message);
  if (!r.ok()) return r.status();
  return out;
}

}  // namespace everstep
