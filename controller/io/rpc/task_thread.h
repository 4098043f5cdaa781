// One thread that runs short tasks in order, so that neither the loop nor gRPC's threads build large answers.
// Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace everstep {

class TaskThread {
 public:
  TaskThread() : thread_([this] { Run(); }) {}
  ~TaskThread() { Stop(); }

  // After Stop the task is run on the caller's thread, so that no call stays unanswered.
  void Post(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      if (!stopping_) {
        tasks_.push_back(std::move(task));
        task = nullptr;
      }
    }
    if (task) {
      task();
    } else {
      work_.notify_one();
    }
  }

  // Runs what was posted, then ends. Idempotent.
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::thread thread_;
};

}  // namespace everstep
