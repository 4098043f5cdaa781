#include "worker/io/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace everstep {

Instant BootTimeNow() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return Instant(std::chrono::seconds(now.tv_sec) + Duration(now.tv_nsec));
}

Result<std::unique_ptr<EventLoop>> EventLoop::Create() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !wake.valid()) {
    return Internal(std::string("cannot create an event loop: ") + strerror(errno));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = static_cast<uint32_t>(wake.get());  // serial 0
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return Internal(std::string("cannot watch the loop's own event: ") + strerror(errno));
  }
  return std::unique_ptr<EventLoop>(new EventLoop(std::move(epoll), std::move(wake)));
}

EventLoop::~EventLoop() = default;

Status EventLoop::Watch(int fd, uint32_t epoll_events, Ready ready) {
  const uint64_t serial = next_serial_++ & 0xffffffffu;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = (serial << 32) | static_cast<uint32_t>(fd);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return Internal(std::string("cannot watch a descriptor: ") + strerror(errno));
  }
  watched_[fd] = Watched{serial, std::make_shared<Ready>(std::move(ready))};
  return OkStatus();
}

void EventLoop::Change(int fd, uint32_t epoll_events) {
  auto it = watched_.find(fd);
  if (it == watched_.end()) return;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = (it->second.serial << 32) | static_cast<uint32_t>(fd);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::Unwatch(int fd) {
  if (watched_.erase(fd) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::At(Instant when, Task task) {
  const TimerId id{when, next_timer_++};
  timers_.emplace(id, std::move(task));
  return id;
}

void EventLoop::Cancel(const TimerId& timer) { timers_.erase(timer); }

void EventLoop::Post(Task task) {
  bool first = false;
  {
    std::lock_guard lock(posted_mutex_);
    first = posted_.empty();
    posted_.push_back(std::move(task));
  }
  if (first) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  }
}

void EventLoop::Stop() {
  stopped_.store(true);
  Post([] {});
}

void EventLoop::RunPosted() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes = ::read(wake_.get(), &count, sizeof(count));
  std::vector<Task> tasks;
  {
    std::lock_guard lock(posted_mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) {
    if (stopped_.load()) return;
    task();
  }
}

void EventLoop::RunTimers() {
  const Instant now = BootTimeNow();
  while (!timers_.empty() && timers_.begin()->first.first <= now && !stopped_.load()) {
    Task task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    task();
  }
}

void EventLoop::RunWhile(const std::function<bool()>& wanted) {
  std::array<epoll_event, 64> events{};
  while (!stopped_.load() && wanted()) {
    int timeout_ms = -1;
    if (!timers_.empty()) {
      const Duration wait = timers_.begin()->first.first - BootTimeNow();
      const int64_t ms = wait.count() <= 0 ? 0 : (wait.count() + 999'999) / 1'000'000;
      timeout_ms = static_cast<int>(std::min<int64_t>(ms, 60'000));
    }
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
    turns_.fetch_add(1, std::memory_order_relaxed);
    for (int i = 0; i < count && !stopped_.load(); ++i) {
      const uint64_t data = events[static_cast<size_t>(i)].data.u64;
      const int fd = static_cast<int>(data & 0xffffffffu);
      if ((data >> 32) == 0) {
        RunPosted();
        continue;
      }
      auto it = watched_.find(fd);
      if (it == watched_.end() || it->second.serial != (data >> 32)) continue;
      const std::shared_ptr<Ready> ready = it->second.ready;  // survives its own Unwatch
      (*ready)(events[static_cast<size_t>(i)].events);
    }
    RunTimers();
  }
}

}  // namespace everstep
