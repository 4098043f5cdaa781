// The names of content-addressed chunks and the only order in which they may be deleted (docs/protocol.md section 5):
// condemn -> wait until the intents opened earlier have closed -> check again -> delete. Called by a store under its
// own lock; thread-compatible, pure.
//
// Why names carry a birth epoch: a delete may land an hour late. Scenario with names by hash alone:
//   1. manifest A, the only one with chunk h, is dropped; delete(h) is sent and delayed;
//   2. a put finds h missing or present, writes or reuses h, commits manifest B;
//   3. the delayed delete(h) lands: B reads a hole.
// Here 2. gets another name, because h's old name is condemned, and 3. hits the condemned name only.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "proto/base/ids.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

// Rises with each intent and is never used again. Birth epochs and intents share it: a chunk is born by one intent.
using Epoch = StrongNumber<struct EpochTag, uint64_t>;

struct ChunkName {
  Epoch birth;         // first, so that what one put wrote lies together
  Digest128 hash{};
  uint64_t bytes = 0;
  auto operator<=>(const ChunkName&) const = default;
};

class ChunkRegistry {
 public:
  // `next`: above every epoch used before (a store keeps it durable).
  explicit ChunkRegistry(Epoch next) : next_(next) {}

  // A put begins. The caller makes the intent durable before it asks Choose.
  Epoch OpenIntent();

  // The name under which the intent refers to this content: a live name that exists, or a new one born by the intent,
  // which the caller must write before it commits. Asking twice within one intent gives the same name.
  // REQUIRES: the intent is open.
  struct Choice {
    ChunkName name;
    bool must_write = false;
  };
  Choice Choose(Epoch intent, const Digest128& hash, uint64_t bytes);

  // The intent's manifest is durable: its names are referenced once more each. Closes the intent.
  void Commit(Epoch intent, std::span<const ChunkName> names);
  // The intent ends without a manifest. What it may have written is condemned.
  void Abandon(Epoch intent);

  // A manifest found when the store opened, or one that is dropped. Names without references are condemned.
  void AddReference(const ChunkName& name);
  void DropReference(const ChunkName& name);

  // The chunk was found damaged: no later Choose gives this name. Manifests that refer to it keep their references.
  void Distrust(const ChunkName& name);

  // Condemned names that may be deleted now: every intent opened before they were condemned has closed and none of
  // those referred to them. Each is returned once; names that such an intent did commit are alive again, and said
  // so by `references`.
  std::vector<ChunkName> TakeDeletable();

  bool condemned(const ChunkName& name) const { return condemned_.contains(name); }
  uint64_t references(const ChunkName& name) const;
  size_t live_count() const { return live_.size(); }
  size_t condemned_count() const { return condemned_.size(); }
  Epoch next() const { return next_; }

 private:
  void Condemn(const ChunkName& name);
  bool AnyIntentBelow(Epoch epoch) const { return !intents_.empty() && intents_.begin()->first < epoch; }

  using Content = std::pair<Digest128, uint64_t>;
  Epoch next_;
  std::map<Epoch, std::set<ChunkName>> intents_;  // open ones, with the names they chose
  std::map<ChunkName, uint64_t> live_;            // referenced by manifests; Invariant: counts are above 0
  std::map<Content, ChunkName> by_content_;       // Invariant: values are in live_, not condemned, not distrusted
  std::set<ChunkName> distrusted_;                // Invariant: keys of live_
  std::map<ChunkName, Epoch> condemned_;          // with the first epoch opened after the condemnation
};

}  // namespace everstep::checkpoint
