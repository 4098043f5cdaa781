#include "controller/sim/describe.h"

#include <fmt/format.h>

#include "proto/model/names.h"

namespace everstep::sim {
namespace {

std::string Text(StateId s) { return fmt::format("({},{})", s.step.value, s.generation.value); }

std::string Text(const SnapshotInfo& s) {
  return fmt::format("{} shard {} {}", SnapshotTierName(s.tier), s.shard.value, Text(s.state));
}

std::string Text(const std::vector<ProcessId>& ids) {
  std::string text;
  for (ProcessId id : ids) text += " " + Short(id);
  return text;
}

struct CommandText {
  std::string operator()(const Welcome& c) const {
    return fmt::format("Welcome incarnation {} keep{}", c.incarnation.value, Text(c.keep));
  }
  std::string operator()(const Refuse& c) const { return "Refuse: " + c.message; }
  std::string operator()(const SpawnProcess& c) const {
    return fmt::format("Spawn {} device {}{}", Short(c.process), c.device.value, c.standby ? " standby" : "");
  }
  std::string operator()(const KillProcess& c) const { return "Kill " + Short(c.process); }
  std::string operator()(const FenceProcesses& c) const {
    return fmt::format("Fence({}){}", c.generation.value, Text(c.processes));
  }
  std::string operator()(const PrepareProcesses& c) const {
    return fmt::format("Prepare({}){}", c.generation.value, Text(c.processes));
  }
  std::string operator()(const AssignProcesses& c) const {
    std::string text = fmt::format("Assign({}) at {}:", c.assignment.generation.value, Text(c.assignment.recovery_point));
    for (const RankAssignment& r : c.assignment.ranks) {
      text += fmt::format(" {}={}@{} {}", r.rank.value, Short(r.process), r.server.value, RestoreActionName(r.action));
      if (r.action == RestoreAction::kFetchFromRank) text += fmt::format("<{}", r.source_rank.value);
      if (r.action == RestoreAction::kFetchFromSnapshot) text += fmt::format("<{}", r.sources[0].server.value);
    }
    return text;
  }
  std::string operator()(const ResumeProcesses& c) const {
    return fmt::format("Resume({}) protected {}", c.generation.value, c.protected_step.value);
  }
  std::string operator()(const ProtectedStepRaised& c) const { return fmt::format("Protected {}", c.step.value); }
  std::string operator()(const CopySnapshot& c) const {
    return fmt::format("Copy shard {} {} from {} to {}", c.source.shard.value, Text(c.source.state),
                       c.source.server.value, SnapshotTierName(c.to));
  }
  std::string operator()(const DropSnapshots& c) const {
    std::string text = "Drop";
    for (const SnapshotInfo& s : c.snapshots) text += " " + Text(s);
    return text;
  }
  std::string operator()(const ReleaseJob&) const { return "Release"; }
  std::string operator()(const AcknowledgeFacts& c) const { return fmt::format("Acknowledge {}", c.upto.value); }
  std::string operator()(const Probe&) const { return "Probe"; }
};

struct FactText {
  std::string operator()(const ProcessStarted& f) const { return "started " + Short(f.process); }
  std::string operator()(const ProcessStartFailed& f) const {
    return fmt::format("start failed {} {}", Short(f.process), ReasonName(f.reason));
  }
  std::string operator()(const ProcessExited& f) const {
    return fmt::format("exited {} signal {} code {} phase {} applied {}{}", Short(f.process), f.signal, f.exit_code,
                       RankPhaseName(f.progress.phase), Text(f.progress.applied), f.finished ? " finished" : "");
  }
  std::string operator()(const ProcessJoined& f) const { return "joined " + Short(f.process); }
  std::string operator()(const ProcessCollected& f) const {
    const RankReport& r = f.answer.report;
    return fmt::format("collected({}) {} {} applied {} gradients {}{}", f.answer.generation.value, Short(f.process),
                       r.memory_valid ? "valid" : "invalid", Text(r.applied), r.gradients.value,
                       f.answer.planned ? " planned" : "");
  }
  std::string operator()(const ProcessConnected& f) const {
    return fmt::format("connected({}) {}", f.connected.generation.value, Short(f.process));
  }
  std::string operator()(const ProcessReady& f) const {
    return fmt::format("ready({}) {} from {}", f.ready.generation.value, Short(f.process), f.ready.restored_from);
  }
  std::string operator()(const ProcessFailed& f) const {
    return fmt::format("failed({}) {} suspects {}: {}", f.failed.generation.value, Short(f.process),
                       f.failed.suspect.value, f.failed.message);
  }
  std::string operator()(const SnapshotHeld& f) const { return "holds " + Text(f.snapshot); }
  std::string operator()(const SnapshotLost& f) const {
    return fmt::format("lost {} {}", Text(f.snapshot), ReasonName(f.reason));
  }
  std::string operator()(const MetricObserved& f) const { return "metric " + f.metric.name; }
  std::string operator()(const LinesPrinted&) const { return "lines"; }
  std::string operator()(const ProbeReturned&) const { return "probe returned"; }
  std::string operator()(const StorageTroubled& f) const { return fmt::format("storage {}", ReasonName(f.reason)); }
};

struct RecordText {
  std::string operator()(const TermStarted& r) const { return fmt::format("TermStarted {}", r.term.value); }
  std::string operator()(const ServerRegistered& r) const {
    return fmt::format("ServerRegistered {} incarnation {}", r.server.value, r.incarnation.value);
  }
  std::string operator()(const ServerDied& r) const {
    return fmt::format("ServerDied {} incarnation {} {}", r.server.value, r.incarnation.value, ReasonName(r.reason));
  }
  std::string operator()(const ServerDrainSet& r) const {
    return fmt::format("ServerDrainSet {} {}", r.server.value, r.draining);
  }
  std::string operator()(const JobSubmitted& r) const { return "JobSubmitted " + r.spec.name; }
  std::string operator()(const GenerationFenced& r) const {
    return fmt::format("GenerationFenced {} {}{}", r.generation.value, ReasonName(r.reason), r.planned ? " planned" : "");
  }
  std::string operator()(const RecoveryPointDecided& r) const {
    return fmt::format("RecoveryPointDecided {} at {}", r.generation.value, Text(r.point));
  }
  std::string operator()(const PlanMade& r) const {
    std::string text = fmt::format("PlanMade {} {}:", r.generation.value, ReasonName(r.reason));
    for (const PlannedSlot& s : r.slots) text += fmt::format(" {}={}@{}", s.rank.value, Short(s.process), s.server.value);
    return text;
  }
  std::string operator()(const AssignmentMade& r) const {
    return fmt::format("AssignmentMade {}", r.assignment.generation.value);
  }
  std::string operator()(const GenerationResumed& r) const { return fmt::format("GenerationResumed {}", r.generation.value); }
  std::string operator()(const FinishReached& r) const { return fmt::format("FinishReached {}", r.generation.value); }
  std::string operator()(const FailureCounted& r) const {
    return fmt::format("FailureCounted rank {} step {} code {} signal {}", r.rank.value, r.step.value, r.exit_code, r.signal);
  }
  std::string operator()(const RecoveryEnded& r) const {
    return fmt::format("RecoveryEnded {} {} steps lost {}", r.recovery.outcome, ReasonName(r.recovery.decision),
                       r.recovery.steps_lost);
  }
  std::string operator()(const ManifestCommitted& r) const { return "ManifestCommitted " + Text(r.manifest.state); }
  std::string operator()(const ManifestDropped& r) const { return "ManifestDropped " + Text(r.state); }
  std::string operator()(const JobEnded& r) const {
    return fmt::format("JobEnded {} {} code {}", JobStateName(r.outcome), ReasonName(r.reason), r.exit_code);
  }
  std::string operator()(const JobForgotten&) const { return "JobForgotten"; }
};

}  // namespace

std::string Short(ProcessId id) { return fmt::format("p{}.{}", id.value >> 40, id.value & 0xffffffffffu); }
std::string Describe(const Command& command) { return std::visit(CommandText{}, command); }
std::string Describe(const Fact& fact) { return std::visit(FactText{}, fact); }
std::string Describe(const Record& record) { return std::visit(RecordText{}, record); }

}  // namespace everstep::sim
