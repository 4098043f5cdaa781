// The agent's decisions: which rank processes may live on this server, which fences they are under, what the
// controller must be told. Step(event, now) → effects; called by worker/io's loop thread and by the simulator.
// Pure: no clock, socket, process or file. Loop-only.
//
// What it guarantees to the rest of the system:
//  - a command of a lower term, or one already seen in this stream, changes nothing;
//  - a process that was told generation g (by Fence or Assign) never gets Assign, Prepare or Resume of a lower one;
//  - the agent never answers Collect in a live rank's place;
//  - a process spawned once is never spawned again, and none is spawned on a device whose former process, ordered to
//    end, is not reaped;
//  - every fact that something depends on is sent until acknowledged; ranks go on while no controller is reachable.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/prng.h"
#include "proto/base/time.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "worker/core/agent/agent_effect.h"
#include "worker/core/agent/agent_event.h"
#include "worker/core/agent/agent_policy.h"
#include "worker/core/agent/outbox.h"

namespace everstep {

struct AgentCounts {
  uint64_t stale_generation = 0;  // commands and rank messages refused
  uint64_t stale_term = 0;
  uint64_t replayed = 0;          // commands whose sequence was not new
  uint64_t lines_left_out = 0;
};

class AgentCore {
 public:
  // `seed`: of the start nonces; from the OS in production.
  AgentCore(ServerInventory inventory, AgentPolicy policy, uint64_t seed);

  AgentEffects Step(const AgentEvent& event, Instant now);
  // When Step(AgentTimeAdvanced) has something to do; kNever: no deadline.
  Instant NextDeadline() const;

  Incarnation incarnation() const { return incarnation_; }
  Term highest_term() const { return highest_term_; }
  CommandSequence acted() const { return acted_; }
  bool registered() const { return registered_; }
  std::vector<ProcessStatus> ListProcesses() const;
  const AgentCounts& counts() const { return counts_; }
  const Outbox& outbox() const { return outbox_; }

 private:
  enum class ProcessState : uint8_t {
    kWaiting,   // for the reaping of the former process of its device
    kSpawning,  // StartProcess is under way
    kRunning,
  };
  struct Process {
    SpawnProcess spawn;
    ProcessState state = ProcessState::kWaiting;
    int64_t pid = 0;
    bool ending = false;             // an end was ordered
    bool killed = false;             // SIGKILL was sent
    bool unkillable = false;
    Instant kill_at = kNever;        // SIGKILL is due
    Instant unkillable_at = kNever;
    Instant socket_lost_until = kNever;
    std::optional<Connection> connection;
    bool joined = false;
    bool finished = false;
    std::string mesh_address;
    Generation told;                 // Invariant: no Assign, Prepare or Resume below it is passed on
    Generation promised;             // Invariant: promised <= told
    bool collected = false;
    CollectAnswer answer;
    Generation assigned;
    Generation resumed;
    std::optional<AssignRank> held_assignment;  // until it joins
    std::optional<RankConnected> connected;     // of generation `assigned`
    std::optional<RankReady> ready;
    std::optional<RankFailed> failed;           // in generation `assigned`: it steps no more
    Instant lines_window{};
    int32_t lines_in_window = 0;
    int64_t lines_left_out = 0;
  };
  struct Socket {
    int64_t peer_pid = 0;
    int64_t peer_group = 0;
    std::optional<ProcessId> process;
    std::optional<RankHello> held_hello;  // came before ProcessSpawned
  };
  struct GoneProcess {
    JobUid job;
    Fact last;  // ProcessExited or ProcessStartFailed
    Instant noticed;
  };
  // Link and registration (agent_core.cc).
  void On(const ControllerLinkUp& event);
  void On(const ControllerLinkDown& event);
  void On(const CommandArrived& event);
  void On(const StorageWentWrong& event);
  void On(const StopRequested& event);
  void On(const AgentTimeAdvanced& event);
  void Obey(const Welcome& command);
  void Obey(const Refuse& command);
  void Obey(const AcknowledgeFacts& command);
  void Obey(const Probe& command);
  void ProgressRefusal();
  void ProgressStop();
  void Report(Fact fact) { Report(std::move(fact), now_); }
  void Report(Fact fact, Instant noticed);
  void Note(AgentNoticeLevel level, Reason reason, std::string message,
            std::vector<std::pair<std::string, std::string>> keys = {});
  void NoteStale(const char* what, ProcessId process, Generation generation, Generation told);
  template <typename T>
  void Emit(T effect) {
    effects_.push_back(std::move(effect));
  }

  // Life and death of processes (agent_processes.cc).
  void Obey(const SpawnProcess& command);
  void Obey(const KillProcess& command);
  void Obey(const ReleaseJob& command);
  void On(const ProcessSpawned& event);
  void On(const SpawnFailed& event);
  void On(const ProcessExitedObserved& event);
  void On(const LinesCaptured& event);
  void End(ProcessId id, Process& process, Duration grace);
  void EndAll(Duration grace);
  void Kill(ProcessId id, Process& process);
  void Forget(ProcessId id, Fact last, Instant noticed);
  void StartWaiting();
  bool DeviceHeld(const SpawnProcess& spawn) const;
  void FailWaitingOnUnkillable();
  void CheckProcessDeadlines();
  void FinishRelease(const JobUid& job);
  bool AllReapedOrUnkillable() const;

  // Fences, assignments and what ranks say (agent_ranks.cc).
  void Obey(const FenceProcesses& command);
  void Obey(const PrepareProcesses& command);
  void Obey(const AssignProcesses& command);
  void Obey(const ResumeProcesses& command);
  void Obey(const ProtectedStepRaised& command);
  void On(const RankSocketOpened& event);
  void On(const RankMessageArrived& event);
  void On(const RankSocketClosed& event);
  void AcceptHello(Connection connection, Socket& socket, const RankHello& hello);
  void RefuseHello(Connection connection, std::string message);
  void Hear(ProcessId id, Process& process, const RankHello& message);
  void Hear(ProcessId id, Process& process, const RankJoin& message);
  void Hear(ProcessId id, Process& process, const CollectAnswer& message);
  void Hear(ProcessId id, Process& process, const RankConnected& message);
  void Hear(ProcessId id, Process& process, const RankReady& message);
  void Hear(ProcessId id, Process& process, const RankFailed& message);
  void Hear(ProcessId id, Process& process, const SnapshotStaged& message);
  void Hear(ProcessId id, Process& process, const SnapshotWanted& message);
  void Hear(ProcessId id, Process& process, const MetricReported& message);
  void Hear(ProcessId id, Process& process, const RankFinished& message);
  void Tell(const Process& process, AgentToRank message, DescriptorToken descriptor = {});
  void DeliverHeld(Process& process);
  void FenceOne(ProcessId id, Process& process, Generation generation);

  // What passes between ranks, controller and the keeper of snapshots (agent_ranks.cc).
  void Obey(const CopySnapshot& command);
  void Obey(const DropSnapshots& command);
  void On(const KeeperReported& event);
  void On(const SnapshotLoaded& event);
  void On(const SnapshotLoadFailed& event);

  const ServerInventory inventory_;
  const AgentPolicy policy_;
  Prng nonces_;
  uint64_t start_nonce_ = 0;

  // Registration.
  Incarnation incarnation_;
  Term highest_term_;
  CommandSequence acted_;              // of the current stream
  bool link_up_ = false;
  bool registered_ = false;            // Welcome came on the current stream
  Instant hello_deadline_ = kNever;
  bool refused_ = false;
  bool refused_permanent_ = false;
  std::string refused_message_;
  Instant reopen_at_ = kNever;
  Duration refused_pause_{};
  bool stopping_ = false;
  bool exited_ = false;
  Instant flush_until_ = kNever;

  std::map<ProcessId, Process> processes_;      // alive or about to be
  std::map<ProcessId, GoneProcess> gone_;
  std::deque<ProcessId> gone_order_;            // Invariant: the keys of gone_, oldest first
  std::map<Connection, Socket> sockets_;
  std::map<JobUid, bool> releasing_;            // jobs whose memory goes when their last process is reaped
  Outbox outbox_;
  AgentCounts counts_;

  // Valid during one Step.
  Instant now_{};
  AgentEffects effects_;
};

}  // namespace everstep
