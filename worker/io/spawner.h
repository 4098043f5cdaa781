// Starts rank processes. One thread for the agent's whole life: the parent-death signal of a child follows the thread
// that forked it, so this thread must not end before the agent does. Everything that blocks on a disk around a start
// (directories, secret files, exec) happens here, in the order of the requests; results are posted to the main loop.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/base/reason.h"
#include "proto/base/status.h"
#include "proto/model/commands.h"
#include "worker/io/event_loop.h"
#include "worker/io/process_cgroup.h"
#include "worker/io/unique_fd.h"

namespace everstep {

struct SpawnRequest {
  SpawnProcess spawn;
  std::vector<std::pair<std::string, std::string>> environment;
  std::string server;                // for messages
  std::string root;                  // absolute
  std::string socket_path;
  ProcessCgroups cgroups;            // the process enters its own before it runs the program
  int page_fd = -1;                  // stay open until the result
  int staging_fd = -1;
};

struct SpawnResult {
  ProcessId process;
  pid_t pid = 0;                     // 0: it failed, see reason and message
  UniqueFd pidfd;
  UniqueFd output;                   // read end of the process's stdout and stderr
  Reason reason = Reason::kNone;
  std::string message;
};

// What is under the root for one process. kInvalidArgument: the job's uid can't be part of a path.
struct ProcessPaths {
  std::string working_directory;
  std::string output_directory;
  std::string log_file;
};
Result<ProcessPaths> PathsOf(const std::string& root, const JobUid& job, ProcessId process);

// Environment entry by which every process under an agent of `root` is known.
std::string RootMark(const std::string& root);

class Spawner {
 public:
  // `loop` outlives the spawner.
  explicit Spawner(EventLoop& loop);
  ~Spawner();

  // `done` runs on the loop, once; at most AgentPolicy::processes_max are under way.
  void Start(SpawnRequest request, std::function<void(SpawnResult)> done);
  // Kills what the (reaped) process left behind, and removes its empty directories. Precedes any later Start.
  void Sweep(const std::string& root, const ProcessCgroups& cgroups, const JobUid& job, ProcessId process);

 private:
  void Run();
  EventLoop& loop_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::thread thread_;
};

}  // namespace everstep
