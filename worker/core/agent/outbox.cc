#include "worker/core/agent/outbox.h"

#include <utility>

namespace everstep {

Outbox::Kind Outbox::KindOf(const Fact& fact) {
  if (std::holds_alternative<MetricObserved>(fact) || std::holds_alternative<LinesPrinted>(fact) ||
      std::holds_alternative<ProbeReturned>(fact)) {
    return Kind::kProgress;
  }
  // AgentHello lists the snapshots that are held, so the controller learns of these in another way.
  if (std::holds_alternative<SnapshotHeld>(fact) || std::holds_alternative<SnapshotLost>(fact) ||
      std::holds_alternative<StorageTroubled>(fact)) {
    return Kind::kSnapshot;
  }
  return Kind::kNeeded;
}

SendFact Outbox::Sending(const Entry& entry, Instant now) {
  SendFact sending{entry.sequence, entry.fact};
  if (auto* exited = std::get_if<ProcessExited>(&sending.fact)) exited->noticed_ago = now - entry.noticed;
  return sending;
}

bool Outbox::DropOldest(Kind kind) {
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->kind != kind) continue;
    if (kind == Kind::kProgress) --progress_count_;
    entries_.erase(it);
    ++dropped_count_;
    return true;
  }
  return false;
}

void Outbox::MakeRoom() {
  if (progress_count_ > policy_.outbox_progress_facts_max) DropOldest(Kind::kProgress);
  while (entries_.size() > policy_.outbox_facts_max) {
    if (progress_count_ > 0 && DropOldest(Kind::kProgress)) continue;
    if (DropOldest(Kind::kSnapshot)) continue;
    // AgentHello lists the processes too, so even these losses heal at the next registration.
    if (!DropOldest(Kind::kNeeded)) return;
  }
}

void Outbox::Add(Fact fact, Instant noticed, bool connected, Instant now, AgentEffects& effects) {
  last_ = last_.Next();
  const Kind kind = KindOf(fact);
  if (kind == Kind::kProgress) ++progress_count_;
  entries_.push_back({last_, std::move(fact), noticed, kind});
  if (connected) effects.push_back(Sending(entries_.back(), now));
  MakeRoom();
}

void Outbox::SendAll(Instant now, AgentEffects& effects) const {
  for (const Entry& entry : entries_) effects.push_back(Sending(entry, now));
}

void Outbox::Acknowledge(FactSequence upto) {
  while (!entries_.empty() && entries_.front().sequence <= upto) {
    if (entries_.front().kind == Kind::kProgress) --progress_count_;
    entries_.pop_front();
  }
}

}  // namespace everstep
