// A whole cluster in one process: the real ControllerCore, AgentCores, SessionCores, snapshot custody and chunk registry
// on one seeded event heap, over a simulated network, clocks, disks and rank programs. Everything follows from the
// seed; a run can be repeated exactly. Cut by concept: world_controller.cc, world_agents.cc, world_keeper.cc,
// world_ranks.cc, world_meshes.cc, world_faults.cc. Used by tests/sim and by whoever simulates. Single-threaded.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "controller/core/controller_core.h"
#include "controller/sim/checker.h"
#include "controller/sim/event_heap.h"
#include "controller/sim/ledger_disk.h"
#include "controller/sim/network.h"
#include "controller/sim/nodes.h"
#include "controller/sim/options.h"

namespace everstep::sim {

struct Violation { std::string checker; std::string what; };

class World {
 public:
  explicit World(WorldOptions options);
  ~World();

  // ---- building
  void AddServer(const std::string& name, int devices = 1, const std::string& domain = "");
  // Submits a job whose program runs `steps` steps; waits for the reply. Nothing when the controller died meanwhile.
  std::optional<JobUid> TrySubmit(JobSpec spec, int64_t steps);
  JobUid Submit(JobSpec spec, int64_t steps);   // REQUIRES: the controller stays up

  // ---- running
  Instant now() const { return now_; }
  bool RunUntil(const std::function<bool()>& done, Duration limit);
  void RunFor(Duration duration);
  void CheckEnd();                              // after all jobs ended and everything settled

  // ---- faults; each is traced and counted
  void KillRank(const JobUid& job, int32_t rank);
  void KillProcess(ProcessId id);
  void CrashProgram(ProcessId id, int exit_code);
  void StopRank(ProcessId id);                  // SIGSTOP of one process
  void WakeRank(ProcessId id);
  void MakeUnkillable(ProcessId id, bool unkillable);
  void KillServer(const std::string& name);
  void StartServer(const std::string& name);
  void StopServer(const std::string& name);     // SIGSTOP of everything on it
  void WakeServer(const std::string& name);
  void SlowServer(const std::string& name, int64_t factor);
  void BreakDevice(const std::string& name, DeviceIndex device, bool broken);
  void Link(const std::string& name, const ServerLinks& links);
  void Cut(const std::string& name, bool cut);  // from the controller, both ways, datagrams too
  void ResetStream(const std::string& name);
  // A leader that was replaced wakes and says once more what it once said.
  void RepeatOldLeader();
  void CrashAgentIn(const std::string& name, int64_t effects);
  void StopAgentIn(const std::string& name, int64_t effects);
  void CrashControllerIn(int64_t effects);
  void DiskOf(const std::string& name, bool full, bool failing, Duration slow);
  void CorruptStore(const std::string& name);
  void KillController();
  void StartController();
  void StopController();                        // SIGSTOP
  void WakeController();
  void LedgerDisk(bool failing, Duration slow);
  void BackUpLedger();
  void RestoreLedger();                         // REQUIRES: the controller is down
  void JumpWallClock(Duration by);
  void Drain(const std::string& name, bool draining);
  void Cancel(const JobUid& job);
  void HealAll();

  // ---- looking
  bool controller_up() const { return core_ != nullptr; }
  bool controller_stopped() const { return controller_stopped_; }
  // Whether the step that is being looked at had timers of its own to serve.
  bool timers_due() const { return timers_due_; }
  bool has_backup() const { return backup_.has_value(); }
  ClusterView View() const { return core_->MakeView(NowOfController()); }
  std::optional<JobView> ViewOf(const JobUid& job) const;
  bool Succeeded(const JobUid& job) const;
  std::optional<JobEnded> EndOf(const JobUid& job) const;
  RankNode* Member(const JobUid& job, int32_t rank);     // live, by the newest mesh
  RankNode* Find(ProcessId id);
  std::vector<RankNode*> Ranks(const JobUid& job);
  AgentNode& Agent(const std::string& name);
  const std::map<ServerId, AgentNode>& agents() const { return agents_; }
  const std::map<ProcessId, RankNode>& ranks() const { return ranks_; }
  const std::map<std::string, Mesh>& meshes() const { return meshes_; }
  const Mesh* MeshOf(const RankNode& rank) const;
  // What all records decided on add up to, and the durable ones of them.
  const LedgerState& decided() const { return decided_; }
  const LedgerState& durable() const { return durable_; }
  const LedgerState& live() const { return core_->ledger(); }
  // The chain's content after `step`, by durable records.
  Content ChainContent(const JobUid& job, int64_t step) const;
  const WorldOptions& options() const { return options_; }
  int64_t steps_passed(const JobUid& job) const;         // truth: votes that passed, over all generations
  int faults() const { return faults_; }
  const std::map<std::string, int>& fault_counts() const { return fault_counts_; }
  Instant last_fault() const { return last_fault_; }
  uint64_t restores() const { return restores_; }
  const std::vector<Violation>& violations() const { return violations_; }
  uint64_t trace_hash() const { return hash_; }
  uint64_t events_run() const { return events_run_; }
  uint64_t heartbeats() const { return heartbeats_; }
  const std::vector<std::string>& trace() const { return trace_; }
  void KeepTrace(bool keep) { keep_trace_ = keep; }
  const std::set<std::string>& marks() const { return marks_; }
  const std::map<JobUid, int64_t>& steps_wanted() const { return steps_wanted_; }
  // Of the newest generation that finished.
  const std::map<JobUid, Content>& final_contents() const { return final_contents_; }
  Prng& fault_prng() { return fault_prng_; }
  // Called at named moments of ranks, for faults that strike there.
  std::function<void(const std::string& what, const RankNode& rank)> on_moment;
  // Exit code that programs of this job end with at a step (user errors); -1: none.
  std::map<JobUid, std::pair<int64_t, int>> program_fails;

  void Violate(const std::string& checker, const std::string& what);

 private:
  void At(Instant at, std::function<void()> run) { heap_.Push(std::max(at, now_), std::move(run)); }
  void After(Duration delay, std::function<void()> run) { At(now_ + delay, std::move(run)); }
  Duration Between(Duration low, Duration high) { return network_.Between(low, high); }
  void Trace(const std::string& line);
  void Fault(const std::string& kind, const std::string& line);
  void Mark(const char* mark) { marks_.insert(mark); }
  template <typename F>
  void Tell(const F& tell) {
    for (auto& checker : checkers_) tell(*checker);
  }

  // controller
  Now NowOfController() const { return {controller_clock_.Local(now_), controller_clock_.Wall(now_)}; }
  void FeedController(const Event& event);
  void Perform(const Event& cause, Effects effects);
  void StartSync();
  void OnSynced(size_t count);
  void ReleaseEffects();
  void PerformOne(const EffectBody& body);
  void Deliver(const ServerId& id, const SendCommand& sent);
  void ArmController();
  bool CountControllerEffect();

  // agents
  void FeedAgent(AgentNode& agent, const AgentEvent& event);
  void PerformAgent(AgentNode& agent, AgentEffects effects, size_t first = 0);
  void ArmAgent(AgentNode& agent);
  void LinkUp(AgentNode& agent, Duration delay);
  void Beat(AgentNode& agent, uint64_t life);
  void ToController(AgentNode& agent, SessionId session, std::function<void()> deliver);
  void OnServer(AgentNode& agent, uint64_t life, std::function<void()> run);
  void TellDown(AgentNode& agent);
  void BreakStream(AgentNode& agent, bool tell_agent);
  void SettleWell(AgentNode& agent);
  void SayHelloFrom(AgentNode& agent, const SayHello& hello);
  void SendToRankFrom(AgentNode& agent, const SendToRank& send);

  // snapshots
  void PerformCustody(AgentNode& agent, const checkpoint::CustodyEffects& effects);
  void StageOf(AgentNode& agent, const KeepStaged& staged);
  void MakeCopyOn(AgentNode& agent, const checkpoint::MakeCopy& make);
  void Store(AgentNode& agent, const CopySnapshot& command, const Content& content);
  void Unstore(AgentNode& agent, const CopyKey& key);
  void SweepStore(AgentNode& agent);
  void LoadOn(AgentNode& agent, const LoadSnapshot& load);
  // The bytes that `agent` holds of this copy; an error when it does not, or can't read them.
  Result<Content> ReadCopy(AgentNode& agent, const JobUid& job, ShardState what, SnapshotTier tier);
  bool Reaches(const AgentNode& from, const AgentNode& to) const;

  // ranks
  void Resume(RankNode& rank);
  void StartRank(AgentNode& agent, const StartProcess& start);
  void EndProcess(RankNode& rank, int signal, int exit_code);
  void FeedRank(RankNode& rank, const session::Event& event);
  void CallRank(RankNode& rank, RankNode::Call call, const session::Event& event);
  // Runs on the rank unless it died or moved on (`op` 0: whatever it does); waits while it is stopped.
  void OnRank(ProcessId id, uint64_t op, Duration delay, std::function<void(RankNode&)> run);
  uint64_t Wait(RankNode& rank, RankNode::Doing doing);
  void PerformRank(RankNode& rank, const session::Effect& effect);
  void TellAgent(RankNode& rank, const RankToAgent& message);
  void Answered(RankNode& rank, const session::CallAnswered& answer);
  void Rejoin(RankNode& rank);
  void Compute(RankNode& rank);
  void ApplyStep(RankNode& rank);
  void TakeSnapshot(RankNode& rank);
  void KeepSlots(RankNode& rank, const session::KeepSnapshots& keep);
  void NextStep(RankNode& rank);
  void RunOpaque(RankNode& rank);

  // meshes
  Mesh* FindMesh(const RankNode& rank);
  bool Split(const Mesh& mesh) const;
  void FailSplit(Mesh& mesh);
  void EnterVote(RankNode& rank, const session::CallAnswered& ballot);
  void Connect(RankNode& rank, const session::ConnectMesh& work);
  void Abort(RankNode& rank, Generation generation);
  void LeaveMesh(RankNode& rank, bool died);
  void FailWait(RankNode& rank, int32_t suspect);
  void CheckMesh(Mesh& mesh);
  void TryTransfers(const std::string& key);
  void CheckDigests(const std::string& key);
  void Moment(const char* what, const RankNode& rank);

  const WorldOptions options_;
  Prng prng_, fault_prng_;
  Network network_;
  Instant now_ = kWorldStart;
  EventHeap heap_;
  uint64_t events_run_ = 0, heartbeats_ = 0;

  // controller
  std::unique_ptr<ControllerCore> core_;
  Clock controller_clock_;
  uint64_t controller_life_ = 0;
  bool controller_stopped_ = false;
  bool timers_due_ = false;
  Instant controller_stopped_at_ = kNever;
  std::deque<std::function<void()>> controller_deferred_;
  sim::LedgerDisk disk_;
  bool syncing_ = false;
  LedgerSequence durable_upto_;
  std::deque<Effect> held_;
  Instant controller_armed_ = kNever;
  std::optional<int64_t> controller_crash_in_;
  uint64_t next_session_ = 1;
  std::map<SessionId, ServerId> sessions_;
  std::map<SessionId, Instant> to_agent_at_, to_controller_at_;
  LedgerState decided_, durable_;
  std::optional<size_t> backup_;
  Term highest_term_;
  uint64_t restores_ = 0;
  uint32_t appends_since_check_ = 0;
  std::deque<std::pair<ServerId, SendCommand>> said_;  // newest last: what RepeatOldLeader may draw
  std::map<uint64_t, std::pair<Status, JobUid>> replies_;
  uint64_t next_call_ = 1;

  std::map<ServerId, AgentNode> agents_;
  std::map<ProcessId, RankNode> ranks_;
  std::map<std::string, Mesh> meshes_;
  int64_t next_pid_ = 1000;
  std::map<JobUid, int64_t> steps_wanted_, steps_passed_;
  std::map<JobUid, Content> final_contents_;
  std::map<JobUid, Generation> finished_in_;
  std::vector<std::unique_ptr<Checker>> checkers_;
  std::vector<Violation> violations_;
  std::vector<std::string> trace_;
  std::set<std::string> marks_;
  std::map<std::string, int> fault_counts_;
  int faults_ = 0;
  Instant last_fault_{};
  bool keep_trace_ = false;
  uint64_t hash_ = 1469598103934665603u;
};

}  // namespace everstep::sim
