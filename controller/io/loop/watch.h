// Watchers of a job: each has a bounded queue of what happened; a slow one loses the oldest and is told how many.
// Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "controller/core/effect.h"
#include "proto/base/time.h"

namespace everstep {

struct WatchedNotice { Notice notice; WallTime wall; };
using WatchItem = std::variant<ForwardLines, ForwardMetric, WatchedNotice>;

inline constexpr size_t kWatchItemsMax = 4096;
inline constexpr size_t kWatchersMax = 256;

class Watcher {
 public:
  // `notify` is called without locks after an item was added to an empty queue, on the thread that added it.
  explicit Watcher(std::function<void()> notify) : notify_(std::move(notify)) {}

  struct Taken { std::deque<WatchItem> items; uint64_t dropped = 0; };
  Taken Take();

 private:
  friend class WatchHub;
  void Add(const WatchItem& item);

  const std::function<void()> notify_;
  std::mutex mutex_;
  Taken queue_;  // guarded by mutex_
};

class WatchHub {
 public:
  // Null when there are kWatchersMax already. The watcher is dropped when the caller lets go of it.
  std::shared_ptr<Watcher> Subscribe(const JobUid& job, std::function<void()> notify);
  void Publish(const JobUid& job, const WatchItem& item);

 private:
  std::mutex mutex_;
  std::multimap<JobUid, std::weak_ptr<Watcher>> watchers_;  // guarded by mutex_
};

}  // namespace everstep
