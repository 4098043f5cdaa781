// One thread's epoll loop: descriptors, timers and functions posted by other threads. The agent's main loop owns
// AgentCore; output capture has a loop of its own, so that a slow disk never delays a command or a heartbeat.
// Loop-only, except Post, Stop and turns, which are thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proto/base/status.h"
#include "proto/base/time.h"
#include "worker/io/unique_fd.h"

namespace everstep {

// CLOCK_BOOTTIME: goes on while the machine sleeps, as leases do.
Instant BootTimeNow();

class EventLoop {
 public:
  using Ready = std::function<void(uint32_t epoll_events)>;
  using Task = std::function<void()>;
  using TimerId = std::pair<Instant, uint64_t>;

  static Result<std::unique_ptr<EventLoop>> Create();
  ~EventLoop();

  // Calls `ready` in each turn in which one of `epoll_events` holds. The caller keeps the descriptor open until Unwatch.
  Status Watch(int fd, uint32_t epoll_events, Ready ready);
  void Change(int fd, uint32_t epoll_events);
  // `ready` is never called again, also not in the current turn.
  void Unwatch(int fd);

  TimerId At(Instant when, Task task);
  void Cancel(const TimerId& timer);

  // Runs `task` on the loop's thread, soon. Tasks posted before Stop took effect may never run. The queue has no
  // limit of its own: each poster has a bounded number of tasks in flight, and says so.
  void Post(Task task);
  void Run() { RunWhile([] { return true; }); }
  // Until Stop, or until `wanted`, asked before each turn, says no.
  void RunWhile(const std::function<bool()>& wanted);
  void Stop();
  uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }

 private:
  struct Watched {
    uint64_t serial = 0;
    std::shared_ptr<Ready> ready;
  };
  EventLoop(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  void RunPosted();
  void RunTimers();

  UniqueFd epoll_;
  UniqueFd wake_;
  std::unordered_map<int, Watched> watched_;
  uint64_t next_serial_ = 1;
  std::map<TimerId, Task> timers_;
  uint64_t next_timer_ = 1;
  std::atomic<bool> stopped_{false};
  std::atomic<uint64_t> turns_{0};

  std::mutex posted_mutex_;
  std::vector<Task> posted_;  // guarded by posted_mutex_
};

}  // namespace everstep
