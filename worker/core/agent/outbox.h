// Facts on their way to the controller: numbered once, kept until acknowledged, sent again on each new stream.
// Bounded: facts that nothing depends on go first, and every loss is counted. Used by AgentCore. Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>

#include "worker/core/agent/agent_effect.h"
#include "worker/core/agent/agent_policy.h"

namespace everstep {

class Outbox {
 public:
  explicit Outbox(const AgentPolicy& policy) : policy_(policy) {}

  // Numbers and keeps a fact, and appends its SendFact when `connected`. `noticed`: of ProcessExited, whose
  // noticed_ago is worked out at each sending.
  void Add(Fact fact, Instant noticed, bool connected, Instant now, AgentEffects& effects);
  // A new stream: everything not acknowledged is sent again, in order.
  void SendAll(Instant now, AgentEffects& effects) const;
  void Acknowledge(FactSequence upto);

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  uint64_t dropped_count() const { return dropped_count_; }

 private:
  enum class Kind : uint8_t { kProgress, kSnapshot, kNeeded };
  struct Entry {
    FactSequence sequence;
    Fact fact;
    Instant noticed;
    Kind kind = Kind::kNeeded;
  };
  static Kind KindOf(const Fact& fact);
  static SendFact Sending(const Entry& entry, Instant now);
  bool DropOldest(Kind kind);
  void MakeRoom();

  AgentPolicy policy_;
  std::deque<Entry> entries_;        // Invariant: sequences rise; at most policy_.outbox_facts_max
  FactSequence last_{0};
  size_t progress_count_ = 0;        // Invariant: entries of kind kProgress
  uint64_t dropped_count_ = 0;
};

}  // namespace everstep
