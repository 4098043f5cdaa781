// A real ControllerCore with hand-written agents around it, played at the level of facts and commands, in deterministic
// time. It is no simulator: nothing happens that a test did not ask for, except that agents obey commands at once while
// their switches say so. After every step it checks what must always hold:
//   - the records appended so far, replayed, equal core.ledger();
//   - no effect leaves before the records that make it true (`after` names them, and they were appended before it);
//   - generations rise; no command carries one below the ledger's;
//   - a device is given to a process only after the one before it was reaped;
//   - nobody keeps, rolls forward or serves a state that it does not hold.
// Single-threaded; used by the tests of this folder.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "controller/core/controller_core.h"

namespace everstep::testing {

struct FakeProcess {
  SpawnProcess spawn;
  int64_t pid = 0;
  bool joined = false;
  bool kill_ordered = false;
  bool memory_valid = false;
  StateId applied;
  Generation gradients;              // complete gradients of applied.step + 1
  Generation promised;
  bool collected = false;
  Generation assigned;
  Generation resumed;
  Rank rank{-1};
  ShardIndex shard{0};
  Step vote_passed;
  std::optional<Digest128> digest;   // what it says instead of the truth, once or for good
  bool digest_stays = false;
  RankReport Report() const { return {memory_valid, memory_valid ? applied : StateId{}, gradients}; }
};

struct FakeAgent {
  ServerInventory inventory;
  uint64_t nonce = 0;
  Incarnation incarnation;
  std::optional<SessionId> session;
  bool refused = false;
  uint64_t facts = 0;
  uint64_t heartbeats = 0;
  std::map<ProcessId, FakeProcess> processes;
  std::deque<std::pair<FactSequence, Fact>> unacknowledged;
  std::vector<Command> held;         // came while hears was false
  std::vector<std::pair<JobUid, SnapshotInfo>> snapshots;

  // What it does by itself.
  bool beats = true;                 // datagrams
  bool hears = true;                 // false: stopped; commands pile up
  bool starts = true, joins = true, collects = true, connects = true, readies = true, reaps = true, copies = true;
  bool copies_fail = false;          // says so
  ProbeOutcome probe = ProbeOutcome::kConnected;
};

class FakeCluster {
 public:
  explicit FakeCluster(Policy policy = {}, uint64_t seed = 1);

  // ---- the world
  int compare_every = 1;             // of the steps that append records: how many are compared with their replay
  Duration sync{};                   // how long after it a fence is durable; the core hears of it then
  FakeAgent& AddServer(const std::string& name, int devices = 1, const std::string& domain = "");
  void AddServers(int count, int devices = 1);   // s1, s2, …
  void Connect(const std::string& name, uint32_t protocol_version = kProtocolVersion);  // hello with what it has
  void Disconnect(const std::string& name);      // its stream breaks
  void RestartAgent(const std::string& name);    // a new agent process; its ranks are gone without a word
  void Vanish(const std::string& name);          // its processes are gone without a word
  void FreezeServer(const std::string& name);    // neither hears nor beats; its port does not answer
  void Wake(const std::string& name);            // hears again what piled up
  void RestartController();                      // a new core over the ledger; every stream is gone
  void ConnectAll();
  void Advance(Duration by);                     // heartbeats and deadlines in between
  void Beat(const std::string& name);

  // ---- facts
  void Say(FakeAgent& agent, Fact fact);         // queued; sent again until acknowledged
  void Exit(ProcessId process, int exit_code, int signal = 0, bool finished = false);
  void KillRank(const JobUid& job, int rank) { Exit(RankOf(job, rank).id, 0, 9); }
  void StepTo(const JobUid& job, int64_t step);  // every member applied `step`, and its heartbeats say so
  void Hold(const std::string& server, const JobUid& job, StateId state, int shard, SnapshotTier tier);
  // The pending generation rode in the vote of `step`; all members leave together after it.
  void LeaveAtBoundary(const JobUid& job, int64_t step);
  void Feed(const Event& event);                 // one event, and everything that follows from it

  // ---- operators
  ReplyToOperator Submit(JobSpec spec, const std::string& request = "");
  JobUid Run(JobSpec spec);                      // submits; must be accepted
  ReplyToOperator Cancel(const std::string& job);
  ReplyToOperator Drain(const std::string& server, bool draining = true);
  ReplyToOperator Call(OperatorRequest request, const std::string& request_id = "", bool dry_run = false);

  // ---- what became of it
  struct Located {
    ProcessId id;
    std::string server;
    FakeProcess* process;
  };
  Located RankOf(const JobUid& job, int rank);
  std::vector<Located> Members(const JobUid& job);
  FakeAgent& Agent(const std::string& name) { return agents_.at(ServerId(name)); }
  const JobEntry& Entry(const JobUid& job) const { return core_->ledger().jobs.at(job); }
  JobView View(const JobUid& job) const;
  ServerView Server(const std::string& name) const;
  JobState State(const JobUid& job) const { return View(job).state; }
  uint64_t Fenced(const JobUid& job) const { return Entry(job).fenced.value; }
  std::map<int, std::string> Places(const JobUid& job);  // rank -> server, of the newest assignment or plan
  ControllerCore& core() { return *core_; }
  const LedgerState& ledger() const { return core_->ledger(); }
  Instant now() const { return now_; }
  // Everything since the last ClearTrace: "append GenerationFenced 2", "s1 Fence 2", "notice Recovery started".
  const std::vector<std::string>& trace() const { return trace_; }
  void ClearTrace() { trace_.clear(); }
  void Forget();                                 // all that was only kept for a test to look at, for long runs
  std::vector<std::string> Lines(const std::string& prefix_or_word) const;  // of the trace, those that contain it
  std::vector<std::string> Orders() const;                                  // appends and commands, no notices or acks
  int Count(const std::string& word) const { return static_cast<int>(Lines(word).size()); }
  struct Sent {
    ServerId server;
    LedgerSequence after;
    Command command;
  };
  const std::vector<Sent>& sent() const { return sent_; }
  const std::vector<Record>& log() const { return log_; }

 private:
  struct Delivery {
    ServerId server;
    SessionId session;
    Command command;
  };
  void Perform(const Effects& effects);
  void CheckCommand(const Effect& effect, const SendCommand& send);
  void Pump();
  void Obey(FakeAgent& agent, const Command& command);
  void Reap(FakeAgent& agent, ProcessId process);
  Now Time() const { return {now_, WallTime{now_.time_since_epoch().count() / 1000}}; }

  ControllerOptions options_;
  std::unique_ptr<ControllerCore> core_;
  Instant now_{Seconds(1000)};
  Instant next_beat_{Seconds(1000)};
  std::map<ServerId, FakeAgent> agents_;
  std::deque<std::variant<Event, Delivery>> queue_;
  std::vector<std::pair<Instant, Event>> timers_;
  std::vector<Record> log_;
  LedgerState replay_;
  std::map<std::string, LedgerSequence> made_;   // "fenced JOB 2" -> the record that made it true
  std::map<ProcessId, LedgerSequence> planned_;
  std::map<JobUid, Generation> highest_;
  std::map<SessionId, std::pair<ServerId, uint64_t>> sessions_;  // newest command sequence
  struct Device {
    ServerId server;
    DeviceIndex device;
  };
  std::map<ProcessId, Device> occupied_;         // told to start, and not reaped
  int appended_steps_ = 0;
  std::vector<std::string> trace_;
  std::vector<Sent> sent_;
  std::vector<ReplyToOperator> replies_;
  uint64_t session_counter_ = 0;
  uint64_t nonce_counter_ = 100;
  uint64_t call_counter_ = 0;
  int64_t pid_counter_ = 1000;
};

// A job that every test starts from: one rank per server.
JobSpec Spec(const std::string& name, int wanted, int min = 1);

}  // namespace everstep::testing
