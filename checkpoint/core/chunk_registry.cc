#include "checkpoint/core/chunk_registry.h"

#include "proto/base/check.h"
#include "proto/base/mutation.h"

namespace everstep::checkpoint {

Epoch ChunkRegistry::OpenIntent() {
  const Epoch intent = next_;
  next_ = next_.Next();
  intents_.try_emplace(intent);
  return intent;
}

ChunkRegistry::Choice ChunkRegistry::Choose(Epoch intent, const Digest128& hash, uint64_t bytes) {
  const auto open = intents_.find(intent);
  EVERSTEP_CHECK(open != intents_.end());
  const ChunkName own{intent, hash, bytes};
  if (open->second.contains(own)) return {own, false};
  if (const auto found = by_content_.find({hash, bytes}); found != by_content_.end()) {
    open->second.insert(found->second);
    return {found->second, false};
  }
  open->second.insert(own);
  return {own, true};
}

void ChunkRegistry::Commit(Epoch intent, std::span<const ChunkName> names) {
  EVERSTEP_CHECK(intents_.contains(intent));
  for (const ChunkName& name : names) AddReference(name);
  Abandon(intent);
}

void ChunkRegistry::Abandon(Epoch intent) {
  const auto open = intents_.find(intent);
  if (open == intents_.end()) return;
  const std::set<ChunkName> chosen = std::move(open->second);
  intents_.erase(open);
  for (const ChunkName& name : chosen) {
    if (name.birth == intent && !live_.contains(name)) Condemn(name);
  }
}

void ChunkRegistry::AddReference(const ChunkName& name) {
  ++live_[name];
  // A name that was condemned while an earlier intent held it stays out of by_content_: the name is alive for the
  // manifests that refer to it, and nobody else takes it up.
  if (condemned_.contains(name) || distrusted_.contains(name)) return;
  by_content_.try_emplace({name.hash, name.bytes}, name);
}

void ChunkRegistry::Distrust(const ChunkName& name) {
  if (!live_.contains(name)) return;
  distrusted_.insert(name);
  if (const auto found = by_content_.find({name.hash, name.bytes});
      found != by_content_.end() && found->second == name) {
    by_content_.erase(found);
  }
}

void ChunkRegistry::DropReference(const ChunkName& name) {
  const auto found = live_.find(name);
  EVERSTEP_CHECK(found != live_.end());
  if (--found->second > 0) return;
  live_.erase(found);
  distrusted_.erase(name);
  Condemn(name);
}

void ChunkRegistry::Condemn(const ChunkName& name) {
  if (const auto found = by_content_.find({name.hash, name.bytes});
      found != by_content_.end() && found->second == name && !Mutated(Mutation::kDeleteWithoutCondemning)) {
    by_content_.erase(found);
  }
  // A second condemnation (an earlier intent had revived it) starts the wait anew.
  condemned_[name] = next_;
}

std::vector<ChunkName> ChunkRegistry::TakeDeletable() {
  std::vector<ChunkName> deletable;
  for (auto it = condemned_.begin(); it != condemned_.end();) {
    if (live_.contains(it->first) || AnyIntentBelow(it->second)) {
      ++it;
      continue;
    }
    deletable.push_back(it->first);
    it = condemned_.erase(it);
  }
  return deletable;
}

uint64_t ChunkRegistry::references(const ChunkName& name) const {
  const auto found = live_.find(name);
  return found == live_.end() ? 0 : found->second;
}

}  // namespace everstep::checkpoint
