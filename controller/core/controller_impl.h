// The insides of ControllerCore, cut by concept: servers.cc (who is alive), recovery/*.cc (the phases), reconcile.cc
// (spares, standbys, drains, regrowth), snapshots.cc (protection and manifests), operators.cc, adoption.cc and
// view/make_view.cc. Private to controller/core. Loop-only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "controller/core/controller_core.h"
#include "controller/core/controller_state.h"
#include "controller/core/planner/placement.h"
#include "proto/base/prng.h"

namespace everstep {

class ControllerCore::Impl {
 public:
  Impl(ControllerOptions options, LedgerState ledger);

  Effects Start(Now now);
  Effects Step(const Event& event, Now now);
  Instant NextDeadline() const;
  const LedgerState& ledger() const { return ledger_; }
  ClusterView MakeView(Now now) const;

 private:
  // ---- effects (controller_core.cc)
  void Append(Record record);
  void Push(EffectBody body);
  void Send(ServerRow& server, Command command);
  void SendTo(const ServerId& server, Command command);
  void Note(NoticeLevel level, Reason reason, std::string what, const ServerId& server, const JobRow* job,
            std::vector<std::pair<std::string, std::string>> keys = {});

  // ---- servers.cc
  void OnAgentConnected(const AgentConnected& event);
  void OnAgentDisconnected(const AgentDisconnected& event);
  void OnHeartbeat(const Heartbeat& heartbeat);
  void OnProbe(const ProbeFinished& event);
  void Register(const AgentConnected& event);
  void Welcomed(ServerRow& server, const AgentHello& hello);
  void AcceptReports(ServerRow& server, const AgentHello& hello);
  void AcceptSnapshots(ServerRow& server, const AgentHello& hello);
  void ResendTo(ServerRow& server);
  void JudgeServers();
  void StartProbing(ServerRow& server);
  void DeclareDead(ServerRow& server, Reason reason, const std::string& evidence);
  bool HoldForMassSilence(ServerRow& server);
  void ReleaseFreezeIfOver();
  ServerRow* FindServer(const ServerId& id);
  ServerRow* FindSession(SessionId session);
  bool Usable(const ServerRow& server) const;      // for new placements
  bool Draining(const ServerId& server) const;
  ServerState StateOf(const ServerRow& server) const;

  // ---- facts.cc
  void OnFact(const FactReceived& event);
  void Handle(ServerRow& server, const ProcessStarted& fact);
  void Handle(ServerRow& server, const ProcessStartFailed& fact);
  void Handle(ServerRow& server, const ProcessExited& fact);
  void Handle(ServerRow& server, const ProcessJoined& fact);
  void Handle(ServerRow& server, const ProcessCollected& fact);
  void Handle(ServerRow& server, const ProcessConnected& fact);
  void Handle(ServerRow& server, const ProcessReady& fact);
  void Handle(ServerRow& server, const ProcessFailed& fact);
  void Handle(ServerRow& server, const SnapshotHeld& fact);
  void Handle(ServerRow& server, const SnapshotLost& fact);
  void Handle(ServerRow& server, const MetricObserved& fact);
  void Handle(ServerRow& server, const LinesPrinted& fact);
  void Handle(ServerRow& server, const ProbeReturned& fact);
  void Handle(ServerRow& server, const StorageTroubled& fact);
  ProcessRow* FindProcess(ProcessId id);
  ProcessRow* OwnProcess(ServerRow& server, const JobUid& job, ProcessId id);
  void CountStale(const char* kind);

  // ---- recovery/losses.cc
  struct Loss {
    ProcessRow* process = nullptr;
    Reason reason = Reason::kNone;
    std::string evidence;
    Duration noticed_ago{};
  };
  void LoseProcesses(JobRow& job, std::vector<Loss> losses);
  void LoseTogether(std::map<JobUid, std::vector<Loss>> losses);
  void RememberProof(JobRow& job, const ProcessRow& process);
  void RememberLost(JobRow& job, const ProcessRow& process);
  bool CountFailure(JobRow& job, const ProcessRow& process, const ProcessExited& fact);
  bool FinishIfAllFinished(JobRow& job);
  bool Finishing(const JobRow& job) const;   // a member of this generation came to its end: every step is done

  // ---- recovery/: recovery.cc, collect.cc, plan.cc, assign.cc, closing.cc
  void StartRecovery(JobRow& job, Reason reason, const std::string& evidence, Duration noticed_ago, bool planned);
  void OnFenceDurable(const FenceBecameDurable& event);
  void FenceMembers(JobRow& job);
  void CheckCollected(JobRow& job);
  void Decide(JobRow& job);
  bool AwaitsCheckpoint(JobRow& job, StateId point);
  RecoveryInputs GatherInputs(JobRow& job);
  void TryPlan(JobRow& job);
  PlacementRequest BuildRequest(JobRow& job, bool keep_draining, bool* foreign_of_higher);
  bool EveryShardHasSource(JobRow& job);
  void Amend(JobRow& job, const std::string& evidence);
  void SpawnPlanned(JobRow& job, ProcessRow& process);
  void CheckGathered(JobRow& job);
  void MakeAssignment(JobRow& job);
  void ResumeOpaque(JobRow& job);
  void CheckReady(JobRow& job);
  void DistrustMemory(JobRow& job, const std::string& evidence);
  void CloseRecovery(JobRow& job, const std::string& outcome);
  void NoteCommitted(JobRow& job, everstep::Step step);
  void EnterPhase(JobRow& job, RecoveryPhase phase);
  void OnStageDeadline(JobRow& job);
  void EndJob(JobRow& job, JobState outcome, Reason reason, int32_t exit_code, const std::string& message);
  void Kill(ProcessRow& process, Duration grace);
  void SetStage(JobRow& job, JobStage stage, Instant deadline);

  // ---- reconcile.cc
  void Reconcile();
  void ReconcileStandbys(JobRow& job);
  void ReconcileWidth(JobRow& job);
  void ReconcileDrain(JobRow& job);
  ProcessRow* SpawnStandby(JobRow& job, bool avoid_members);
  std::vector<JobRow*> JobsByClaim();
  bool HigherClaim(const JobRow& a, const JobRow& b) const;
  int32_t MissingRanks(const JobRow& job) const;
  bool AnotherLacksRanks(const JobRow& job) const;
  void TakeBackStandby(const JobRow& job);
  bool Avoids(const JobRow& job, const ServerId& server) const;
  void CheckStandbys(JobRow& job);
  ProcessRow* Occupant(const ServerId& server, DeviceIndex device);
  int32_t WorldWanted(const JobEntry& entry) const;
  int32_t WorldMin(const JobEntry& entry) const;
  int32_t WorldMax(const JobEntry& entry) const;
  int32_t WorldToPlan(const JobRow& job, int32_t staying) const;
  int32_t DevicesLacking(const JobRow& job);
  int32_t DevicesFreeFor(const JobRow& job);
  int32_t NeededByOthers(const JobRow& job, std::string* who);
  int32_t GrowthPossible(const JobRow& job);
  void GiveBack(JobRow& job);
  int32_t StandbysOf(const JobRow& job);
  int32_t RanksAhead(const JobRow& job);
  const JobRow* LowerContender(const JobRow& job);

  // ---- snapshots.cc
  void AdvanceProtection(JobRow& job);
  void AdvanceManifests(JobRow& job);
  void AskForPeerCopy(JobRow& job, const SnapshotInfo& source, const std::vector<SnapshotInfo>& holders);
  void ForgetSnapshotsOf(const ServerId& server);
  std::string DomainOf(const ServerId& server) const;
  bool InOneDomain(const JobRow& job) const;

  // ---- operators.cc
  void OnOperator(const OperatorCalled& event);
  void Handle(const OperatorCalled& call, const SubmitJob& request);
  void Handle(const OperatorCalled& call, const CancelJob& request);
  void Handle(const OperatorCalled& call, const SetDrain& request);
  void Reply(const OperatorCalled& call, Status status, JobUid job, std::string message);

  // ---- adoption.cc
  void BeginAdoption(JobRow& job);
  void CheckAdoption(JobRow& job, bool final);

  const JobEntry& Entry(const JobRow& job) const;
  JobRow* FindJob(const JobUid& uid);
  std::vector<ProcessRow*> ProcessesOf(const JobUid& job);
  std::vector<const ProcessRow*> ProcessesOf(const JobUid& job) const;
  JobState StateOf(const JobRow& job) const;
  ProcessRow& NewProcess(const JobUid& job, const ServerId& server, DeviceIndex device);

  ControllerOptions options_;
  const Policy& policy_;
  LedgerState ledger_;
  Prng prng_;
  Now now_{};
  Effects effects_;
  std::map<ServerId, ServerRow> servers_;
  std::map<SessionId, ServerId> sessions_;
  std::map<JobUid, JobRow> jobs_;
  std::map<ProcessId, ProcessRow> processes_;
  std::map<JobUid, std::set<ProcessId>> job_processes_;
  std::map<ServerId, std::set<ProcessId>> server_processes_;
  uint64_t process_counter_ = 0;
  Instant next_judgement_ = kNever;  // Invariant: no server's verdict can change before it without a new fact
  Instant adoption_deadline_ = kNever;
  Instant registered_by_{};          // servers that only the ledger knows are expected to connect until then
  bool dirty_ = false;               // something changed that Reconcile should look at
  // A server registers anew: what died with its old incarnation counts once it is known what the new one holds.
  bool hold_losses_ = false;
  bool hold_copies_ = false;         // the list of a hello is taken whole before anything is decided on it
  std::map<JobUid, std::vector<Loss>> losses_held_;
  bool frozen_ = false;
  Instant frozen_since_ = kNever;
  uint64_t event_sequence_ = 0;
  std::deque<EventView> events_;
};

}  // namespace everstep
