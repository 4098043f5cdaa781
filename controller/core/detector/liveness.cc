#include "controller/core/detector/liveness.h"

#include <algorithm>

#include "proto/base/mutation.h"

namespace everstep {

void ServerLiveness::Hear(Instant now) {
  heard_ = std::max(heard_, now);
  if (connected_) {
    probe_deadline_ = kNever;
    probe_wanted_ = false;
    next_probe_ = kNever;
  }
}

bool ServerLiveness::OnHeartbeat(uint64_t sequence, Instant now) {
  if (sequence <= sequence_) return false;
  sequence_ = sequence;
  Hear(now);
  return true;
}

void ServerLiveness::OnStreamLost(Instant now) {
  connected_ = false;
  probe_wanted_ = true;
  probe_deadline_ = kNever;
  next_probe_ = now;
}

void ServerLiveness::OnProbeStarted(Instant now, const Policy& policy) {
  probe_wanted_ = false;
  next_probe_ = kNever;
  probe_deadline_ = now + policy.probe_timeout;
}

void ServerLiveness::OnPortAnswered(Instant now, const Policy& policy) {
  // A process that is being torn down may close its stream before its listener: with the stream gone, ask again soon.
  if (!connected_) {
    probe_deadline_ = kNever;
    next_probe_ = now + std::max<Duration>(Milliseconds(10), policy.heartbeat_interval / 10);
  }
}

ServerLiveness::Verdict ServerLiveness::Judge(Instant now, const Policy& policy) const {
  if (!connected_ && (probe_wanted_ || now >= next_probe_)) return Verdict::kProbeNow;
  const Instant lease_end = heard_ + policy.lease;
  if (now < lease_end) return now - heard_ > policy.lease / 2 ? Verdict::kLate : Verdict::kAlive;
  if (connected_) {
    // Datagrams may be lost alone: ask over the stream before anybody dies.
    if (Mutated(Mutation::kSkipProbe)) return Verdict::kSilent;
    if (probe_deadline_ == kNever) return Verdict::kProbeNow;
    if (now < probe_deadline_) return Verdict::kLate;
  }
  // A vote that passed proves that its ranks live.
  if (now < voted_ + policy.lease && !Mutated(Mutation::kIgnoreVotes)) return Verdict::kLate;
  return Verdict::kSilent;
}

Instant ServerLiveness::NextDeadline(Instant now, const Policy& policy) const {
  Instant next = kNever;
  auto consider = [&](Instant at) {
    if (at > now) next = std::min(next, at);
  };
  if (!connected_) consider(next_probe_);
  consider(heard_ + policy.lease / 2 + Duration(1));
  consider(heard_ + policy.lease);
  if (probe_deadline_ != kNever) consider(probe_deadline_);
  consider(voted_ + policy.lease);
  return next;
}

}  // namespace everstep
