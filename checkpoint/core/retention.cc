#include "checkpoint/core/retention.h"

#include <algorithm>
#include <map>

namespace everstep::checkpoint {

std::vector<StateId> ChooseDropped(const std::vector<RetentionEntry>& entries, size_t complete_kept) {
  std::map<StateId, RetentionEntry> states;
  for (const RetentionEntry& entry : entries) {
    auto [it, added] = states.try_emplace(entry.state, entry);
    if (added) continue;
    it->second.complete &= entry.complete;
    it->second.pinned |= entry.pinned;
    it->second.on_chain &= entry.on_chain;
  }
  const size_t kept_max = std::max<size_t>(complete_kept, 1);
  size_t complete_seen = 0;
  std::vector<StateId> dropped;
  for (auto it = states.rbegin(); it != states.rend(); ++it) {
    const RetentionEntry& entry = it->second;
    bool keep = entry.pinned;
    if (entry.on_chain && entry.complete) {
      keep |= complete_seen < kept_max;
      ++complete_seen;
    } else if (entry.on_chain) {
      keep |= complete_seen == 0;
    }
    if (!keep) dropped.push_back(entry.state);
  }
  std::reverse(dropped.begin(), dropped.end());
  return dropped;
}

}  // namespace everstep::checkpoint
