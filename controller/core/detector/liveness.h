// Is a server alive? One object per registered server; fed with every sign of life, asked at deadlines. It gives
// verdicts with reasons and changes nothing else (docs/protocol.md section 7). Loop-only.
#pragma once

#include "controller/core/policy.h"
#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/time.h"

namespace everstep {

class ServerLiveness {
 public:
  enum class Verdict { kAlive, kLate, kProbeNow, kSilent };

  ServerLiveness(Instant now, Incarnation incarnation) : incarnation_(incarnation), heard_(now), voted_(now) {}

  // Only a higher sequence renews the lease. Returns false for a stale or doubled datagram.
  bool OnHeartbeat(uint64_t sequence, Instant now);
  void OnStreamMessage(Instant now) { Hear(now); }
  // A vote in which a rank of this server took part passed.
  void OnVote(Instant now) { voted_ = std::max(voted_, now); }
  void OnStreamConnected(Instant now) { connected_ = true; Hear(now); }
  void OnStreamLost(Instant now);
  // The loop itself was late: nobody loses lease time for that.
  void OnLoopLag(Duration lag) { heard_ += lag; voted_ += lag; if (probe_deadline_ != kNever) probe_deadline_ += lag; }
  void OnProbeStarted(Instant now, const Policy& policy);
  // The port answered, which proves the agent's process but not that it acts.
  void OnPortAnswered(Instant now, const Policy& policy);

  Verdict Judge(Instant now, const Policy& policy) const;
  // When Judge can next change its answer without a new fact.
  Instant NextDeadline(Instant now, const Policy& policy) const;

  bool connected() const { return connected_; }
  Instant heard() const { return heard_; }
  Instant voted() const { return voted_; }
  Incarnation incarnation() const { return incarnation_; }

 private:
  void Hear(Instant now);

  Incarnation incarnation_;
  Instant heard_;                    // newest sign of life of the agent
  Instant voted_;                    // newest vote with a rank of it
  uint64_t sequence_ = 0;
  bool connected_ = true;
  bool probe_wanted_ = false;        // the stream broke: ask the port at once
  Instant probe_deadline_ = kNever;  // a probe is under way until then
  Instant next_probe_ = kNever;      // the port answered although the stream is gone: ask again
};

}  // namespace everstep
