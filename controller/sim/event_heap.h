// What is still to happen, by time and, within an instant, in the order in which it was planned. Used by World only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "proto/base/time.h"

namespace everstep::sim {

class EventHeap {
 public:
  void Push(Instant at, std::function<void()> run) {
    uint32_t slot = 0;
    if (free_.empty()) {
      slot = static_cast<uint32_t>(slots_.size());
      slots_.push_back(std::move(run));
    } else {
      slot = free_.back();
      free_.pop_back();
      slots_[slot] = std::move(run);
    }
    // Entries are small, so that the heap moves few bytes; the closures stay where they are.
    heap_.push_back({at, ++sequence_, slot});
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }

  bool empty() const { return heap_.empty(); }
  Instant next() const { return heap_.empty() ? kNever : heap_.front().at; }
  size_t size() const { return heap_.size(); }

  // REQUIRES: !empty().
  std::pair<Instant, std::function<void()>> Pop() {
    std::pop_heap(heap_.begin(), heap_.end(), Later);
    const Entry entry = heap_.back();
    heap_.pop_back();
    std::function<void()> run = std::exchange(slots_[entry.slot], nullptr);
    free_.push_back(entry.slot);
    return {entry.at, std::move(run)};
  }

 private:
  struct Entry {
    Instant at;
    uint64_t sequence;
    uint32_t slot;
  };
  static bool Later(const Entry& a, const Entry& b) {
    return std::tie(a.at, a.sequence) > std::tie(b.at, b.sequence);
  }

  std::vector<Entry> heap_;
  std::vector<std::function<void()>> slots_;
  std::vector<uint32_t> free_;
  uint64_t sequence_ = 0;
};

}  // namespace everstep::sim
