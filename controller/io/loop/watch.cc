#include "controller/io/loop/watch.h"

#include <utility>

namespace everstep {

Watcher::Taken Watcher::Take() {
  std::lock_guard lock(mutex_);
  return std::exchange(queue_, {});
}

void Watcher::Add(const WatchItem& item) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = queue_.items.empty();
    if (queue_.items.size() >= kWatchItemsMax) {
      queue_.items.pop_front();
      ++queue_.dropped;
    }
    queue_.items.push_back(item);
  }
  if (first) notify_();
}

std::shared_ptr<Watcher> WatchHub::Subscribe(const JobUid& job, std::function<void()> notify) {
  std::lock_guard lock(mutex_);
  std::erase_if(watchers_, [](const auto& entry) { return entry.second.expired(); });
  if (watchers_.size() >= kWatchersMax) return nullptr;
  auto watcher = std::make_shared<Watcher>(std::move(notify));
  watchers_.emplace(job, watcher);
  return watcher;
}

void WatchHub::Publish(const JobUid& job, const WatchItem& item) {
  std::vector<std::shared_ptr<Watcher>> found;
  {
    std::lock_guard lock(mutex_);
    const auto [first, last] = watchers_.equal_range(job);
    for (auto it = first; it != last; ++it) {
      if (auto watcher = it->second.lock()) found.push_back(std::move(watcher));
    }
  }
  for (const auto& watcher : found) watcher->Add(item);
}

}  // namespace everstep
