// The rank processes of one agent: their start, shared memory, signals, output and end. Performs AgentCore's process
// effects and turns what the kernel says into events. Loop-only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/model/facts.h"
#include "worker/core/agent/agent_effect.h"
#include "worker/core/agent/agent_event.h"
#include "worker/io/event_loop.h"
#include "worker/io/output_capture.h"
#include "worker/io/shared_memory.h"
#include "worker/io/spawner.h"
#include "worker/io/unique_fd.h"

namespace everstep {

struct SupervisorOptions {
  std::string server;
  std::string root;                           // absolute, exists
  std::string socket_path;
  ProcessCgroups cgroups;                     // none: process groups and marks in the environment must do
  OutputCaptureLimits output;
  // Is given a duplicate of each process's staging memory, before the process starts. May be empty.
  std::function<void(const JobUid&, ProcessId, UniqueFd)> on_staging;
  // A program that ends by itself has said why, and its last lines are worth waiting for; a kill must be told at once.
  Duration own_last_lines_wait = Seconds(2);
  Duration last_lines_wait = Milliseconds(50);  // for the output of a dead process, before its exit is told without
};

class Supervisor {
 public:
  using Deliver = std::function<void(AgentEvent)>;
  // `before_exit` runs before an exit is delivered: what the process said earlier must be delivered first.
  static Result<std::unique_ptr<Supervisor>> Create(EventLoop& loop, SupervisorOptions options, Deliver deliver,
                                                    std::function<void()> before_exit);
  ~Supervisor();

  void Perform(const StartProcess& effect);
  void Perform(const SignalProcess& effect);
  void Perform(const NoteProcessGone& effect);

  // Of a living or dead process that is still known; nullopt otherwise.
  std::optional<Progress> ReadProgress(ProcessId process) const;
  // One for each living process that has a generation.
  std::vector<Heartbeat::Vote> ReadVotes() const;
  size_t alive_count() const;
  // SIGKILL to every process tree, at once: for an exit that can't wait.
  void KillAllNow();

 private:
  struct Entry {
    JobUid job;
    ProgressPageMapping page;
    UniqueFd staging;
    pid_t pid = 0;                            // 0: being started, or reaped
    UniqueFd pidfd;
  };
  Supervisor(EventLoop& loop, SupervisorOptions options, Deliver deliver, std::function<void()> before_exit);
  void OnSpawned(SpawnResult result);
  void OnExit(ProcessId process);
  void ReapOrphans();

  EventLoop& loop_;
  const SupervisorOptions options_;
  const Deliver deliver_;
  const std::function<void()> before_exit_;
  std::map<ProcessId, Entry> entries_;
  int starting_count_ = 0;
  std::unique_ptr<OutputCapture> capture_;
  std::unique_ptr<Spawner> spawner_;
};

}  // namespace everstep
