// A whole cluster in one process: the real ControllerCore, AgentCores and SessionCores on one seeded event heap, over a
// simulated network, disks and rank programs. Everything follows from the seed; a run can be repeated exactly. Checkers
// look at effects and deliveries, never at a core's own opinion. Used by tests/sim and by `everstep simulate`.
// Single-threaded.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "controller/core/controller_core.h"
#include "proto/base/prng.h"
#include "worker/core/agent/agent_core.h"
#include "worker/core/session/session_core.h"

namespace everstep::sim {

// What a shard's memory truly holds: the generation in which each of its steps was applied. Two histories of one step
// never look equal. (The model's representation, recovery_model.py.)
using Content = std::vector<uint64_t>;

struct WorldOptions {
  uint64_t seed = 1;
  Policy policy;
  Duration link_min = Microseconds(50), link_max = Microseconds(800);
  Duration sync_min = Microseconds(200), sync_max = Milliseconds(3);       // of the ledger's disk
  Duration compute_min = Milliseconds(5), compute_max = Milliseconds(15);  // of one step on one rank
  Duration start_min = Milliseconds(30), start_max = Milliseconds(120);    // spawn to Join
  Duration snapshot_delay_max = Milliseconds(4);                           // verify, copy, load
  int64_t snapshot_every = 0;      // steps; 0: never
  uint32_t datagram_loss_percent = 0;
  bool check_replay = true;        // replay equals live after every controller step
};

struct Violation { std::string what; };

class World;

// The mesh of one generation: reductions and votes of its ranks.
struct Mesh {
  Generation generation;
  Token token{};
  size_t size = 0;
  struct Member {
    uint64_t process = 0;
    bool arrived = false;        // in ConnectMesh
    bool connected = false;
    bool left = false;           // aborted or dead
    int64_t reduced = 0;         // newest step whose reduction it entered
    int64_t voted = 0;
    int64_t decided = 0;         // newest vote whose result it saw
    int64_t finished = 0;
    bool digest = false;
    uint64_t pending = 0;        // of its newest vote
  };
  std::map<int32_t, Member> members;
};

struct RankNode {
  ProcessId id;
  JobUid job;
  ServerId server;
  DeviceIndex device;
  int64_t pid = 0;
  bool alive = true;
  bool stopped = false;
  std::unique_ptr<session::SessionCore> core;
  Connection connection;
  Content memory;                // truth
  bool torn = false;             // truth: memory is being overwritten
  std::optional<uint64_t> gradients;  // truth: generation of complete gradients of the next step
  std::string mesh_key;
  int32_t rank = -1;
  // The library call that the program waits in.
  enum class Call { kNone, kJoin, kBegin, kGradients, kVoteStart, kVotePassed, kVoteFailed, kApplied, kFinish };
  Call call = Call::kNone;
  int64_t call_step = 0;
  // What it waits for in the mesh.
  enum class Doing { kNothing, kReducing, kVoting, kFinishing, kConnecting, kReceiving, kServing, kDigesting };
  Doing doing = Doing::kNothing;
  uint64_t op = 0;               // rises with each wait: stale completions are dropped
  uint64_t epoch = 0;            // of its program loop: stale closures are dropped
  Generation mesh_generation;
  std::optional<session::ReceiveState> receiving;
  std::optional<session::ServeState> serving;
  std::set<int32_t> served;
  Content provided;              // of a snapshot on its way into memory
  std::deque<std::function<void()>> deferred;  // while stopped
  std::vector<std::pair<int64_t, uint64_t>> applied_log;  // (step, generation)
};

struct AgentNode {
  ServerId id;
  ServerInventory inventory;
  std::unique_ptr<AgentCore> core;
  bool alive = false;
  bool stopped = false;
  uint64_t life = 0;             // rises with each start
  std::optional<SessionId> session;
  std::optional<Welcome> beating;
  uint64_t beats = 0;
  Instant armed = kNever;
  std::map<uint64_t, ProcessId> connections;
  std::map<std::tuple<JobUid, SnapshotTier, StateId, ShardIndex>, Content> copies;
  std::map<uint64_t, Content> descriptors;
  uint64_t next_connection = 1, next_descriptor = 1;
  bool cut = false;              // partitioned from the controller
  std::deque<std::function<void()>> deferred;
};

class World {
 public:
  explicit World(WorldOptions options);
  ~World();

  // ---- building
  void AddServer(const std::string& name, int devices = 1, const std::string& domain = "");
  // Submits a job whose program runs `steps` steps. REQUIRES: the controller is up.
  JobUid Submit(JobSpec spec, int64_t steps);

  // ---- running
  Instant now() const { return now_; }
  bool RunUntil(const std::function<bool()>& done, Duration limit);
  void RunFor(Duration duration);

  // ---- faults
  void KillRank(const JobUid& job, int32_t rank);
  void KillServer(const std::string& name);
  void StartServer(const std::string& name);
  void StopServer(const std::string& name);   // SIGSTOP of everything on it
  void WakeServer(const std::string& name);
  void CutServer(const std::string& name, bool cut);  // from the controller, both ways
  void KillController();
  void StartController();
  void Drain(const std::string& name, bool draining);
  void Cancel(const JobUid& job);

  // ---- looking
  bool controller_up() const { return core_ != nullptr; }
  const LedgerState& ledger() const { return core_->ledger(); }
  ClusterView View() const { return core_->MakeView({now_, {}}); }
  std::optional<JobView> ViewOf(const JobUid& job) const;
  bool Succeeded(const JobUid& job) const;
  RankNode* Member(const JobUid& job, int32_t rank);     // live, by the newest assignment
  RankNode* Find(ProcessId id);
  std::vector<RankNode*> Ranks(const JobUid& job);
  AgentNode& Agent(const std::string& name);
  const std::vector<Violation>& violations() const { return violations_; }
  uint64_t trace_hash() const { return hash_; }
  uint64_t events_run() const { return events_run_; }
  const std::vector<std::string>& trace() const { return trace_; }
  void KeepTrace(bool keep) { keep_trace_ = keep; }
  Prng& faults() { return fault_prng_; }
  // Called after each event, for faults that strike at a named moment.
  std::function<void(const std::string& what, const RankNode* rank)> on_moment;
  std::map<JobUid, int64_t> steps_wanted;
  const std::map<JobUid, Content>& final_contents() const { return final_contents_; }

 private:
  friend struct Wiring;
  struct Pending {
    Instant at;
    uint64_t sequence;
    std::function<void()> run;
    bool operator>(const Pending& o) const { return std::tie(at, sequence) > std::tie(o.at, o.sequence); }
  };
  void At(Instant at, std::function<void()> run);
  void After(Duration delay, std::function<void()> run) { At(now_ + delay, std::move(run)); }
  Duration Between(Duration low, Duration high);
  Duration Link() { return Between(options_.link_min, options_.link_max); }
  void Trace(const std::string& line);
  void Violate(const std::string& what);

  // controller
  void FeedController(const Event& event);
  void Perform(Effects effects);
  void ReleaseEffects();
  void PerformOne(const EffectBody& body);
  void ArmController();
  void CheckController(const Effects& effects);

  // agents
  void FeedAgent(AgentNode& agent, const AgentEvent& event);
  void PerformAgent(AgentNode& agent, AgentEffects effects);
  void ArmAgent(AgentNode& agent);
  void LinkUp(AgentNode& agent, Duration delay);
  void Beat(const ServerId& id, uint64_t life);
  void ToController(AgentNode& agent, SessionId session, std::function<void()> deliver);
  void OnServer(AgentNode& agent, uint64_t life, std::function<void()> run);
  void BreakStream(AgentNode& agent, bool tell_agent);

  // ranks
  void StartRank(AgentNode& agent, const StartProcess& start);
  void KillProcess(RankNode& rank, int signal, int exit_code);
  void FeedRank(RankNode& rank, const session::Event& event);
  void CallRank(RankNode& rank, RankNode::Call call, const session::Event& event);
  // Runs on the rank unless it died or moved on (`op` 0: whatever it does); waits while it is stopped.
  void OnRank(ProcessId id, uint64_t op, Duration delay, std::function<void(RankNode&)> run);
  uint64_t Wait(RankNode& rank, RankNode::Doing doing);
  void PerformRank(RankNode& rank, const session::Effect& effect);
  void Answered(RankNode& rank, const session::CallAnswered& answer);
  void NextStep(RankNode& rank);
  void EnterVote(RankNode& rank, const session::CallAnswered& ballot);
  void Connect(RankNode& rank, const session::ConnectMesh& work);
  void Abort(RankNode& rank, Generation generation);
  void LeaveMesh(RankNode& rank, bool died);
  void FailWait(RankNode& rank, int32_t suspect);
  Mesh* MeshOf(const RankNode& rank);
  void CheckReductions(Mesh& mesh);
  void TryTransfers(const std::string& key);
  void CheckDigests(const std::string& key);
  Content Expected(const JobUid& job, int64_t step) const;
  void Moment(const std::string& what, const RankNode& rank);

  WorldOptions options_;
  Prng prng_, fault_prng_;
  Instant now_{};
  uint64_t sequence_ = 0;
  std::priority_queue<Pending, std::vector<Pending>, std::greater<>> heap_;
  uint64_t events_run_ = 0;

  // controller
  std::unique_ptr<ControllerCore> core_;
  uint64_t controller_life_ = 0;
  std::vector<std::pair<LedgerSequence, Record>> durable_;
  std::deque<std::pair<LedgerSequence, Record>> appending_;
  bool syncing_ = false;
  LedgerSequence durable_upto_;
  std::deque<Effect> held_;
  Instant controller_armed_ = kNever;
  uint64_t next_session_ = 1;
  std::map<SessionId, ServerId> sessions_;
  std::map<SessionId, Instant> to_agent_at_, to_controller_at_;
  LedgerState replayed_;
  std::map<uint64_t, std::pair<Status, JobUid>> replies_;
  uint64_t next_call_ = 1;

  std::map<ServerId, AgentNode> agents_;
  std::map<ProcessId, RankNode> ranks_;
  std::map<std::string, Mesh> meshes_;
  int64_t next_pid_ = 1000;
  std::map<JobUid, Generation> newest_chain_;   // from durable records: highest generation whose point is durable
  std::map<JobUid, Lineage> durable_lineage_;
  std::map<JobUid, Content> final_contents_;
  std::map<JobUid, std::map<int64_t, uint64_t>> voted_;
  std::vector<Violation> violations_;
  std::vector<std::string> trace_;
  bool keep_trace_ = false;
  uint64_t hash_ = 1469598103934665603u;
};

}  // namespace everstep::sim
