// The agent's shell: owns the main loop and AgentCore, feeds it what happens, performs what it wants. One per process;
// main.cc wires it, tests run it too. Loop-only, except RequestStop.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/model/server.h"
#include "worker/core/agent/agent_core.h"
#include "worker/io/controller_link.h"
#include "worker/io/event_loop.h"
#include "worker/io/heartbeat_sender.h"
#include "worker/io/probe_listener.h"
#include "worker/io/rank_server.h"
#include "worker/io/root_directory.h"
#include "worker/io/snapshot_service.h"
#include "worker/io/supervisor.h"

namespace everstep {

struct AgentShellOptions {
  std::string controller;            // host:port
  ServerInventory inventory;         // probe_address and root_directory are filled in
  std::string root;                  // absolute, locked by the caller, leftovers killed
  AgentPolicy policy;
  uint64_t seed = 0;                 // from the OS
  OutputCaptureLimits output;
  ProcessCgroups cgroups;
  // Makes the keeper of snapshots; empty: this server keeps none, and says so when asked to.
  std::function<Result<std::unique_ptr<SnapshotService>>(SnapshotService::Handler)> make_snapshots;
};

class AgentShell {
 public:
  static Result<std::unique_ptr<AgentShell>> Create(AgentShellOptions options);
  ~AgentShell();

  // Runs the loop until the core wants to exit; returns the exit code.
  int Run();
  // As on SIGTERM. Thread-safe.
  void RequestStop();
  const std::string& exit_message() const { return exit_message_; }

 private:
  explicit AgentShell(AgentShellOptions options);
  Status Start();
  // Queues an event; the core is never entered twice.
  void Deliver(AgentEvent event);
  void Perform(AgentEffect effect);
  void ArmTimer();

  void Perform(SayHello& effect);
  void Perform(SendFact& effect);
  void Perform(SendToRank& effect);
  void Perform(KeepStaged& effect);
  void Perform(LoadSnapshot& effect);
  void Perform(CopyForKeeping& effect);
  void Perform(NoteProcessGone& effect);
  void Perform(StartHeartbeats& effect);
  void OnControllerMessage(const v1::ControllerMessage& message);

  AgentShellOptions options_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<AgentCore> core_;
  std::unique_ptr<ProbeListener> probe_;
  std::unique_ptr<RankServer> rank_server_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<SnapshotService> snapshots_;
  std::unique_ptr<HeartbeatSender> heartbeats_;
  std::unique_ptr<ControllerLink> link_;

  std::deque<AgentEvent> events_;
  bool stepping_ = false;
  std::optional<EventLoop::TimerId> timer_;
  Instant timer_at_ = kNever;
  std::map<uint64_t, UniqueFd> descriptors_;   // by DescriptorToken
  uint64_t last_descriptor_ = 0;
  std::optional<int> exit_code_;
  std::string exit_message_;
};

}  // namespace everstep
