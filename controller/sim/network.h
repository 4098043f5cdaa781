// The network between one server and everybody else. Its stream to the controller, its datagrams and its links to other
// servers fail apart, each stream direction by itself. Used by World only.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/sim/options.h"
#include "proto/base/prng.h"
#include "proto/base/time.h"

namespace everstep::sim {

struct ServerLinks {
  bool up_cut = false;         // agent to controller, the stream
  bool down_cut = false;       // controller to agent, the stream
  bool datagrams_cut = false;
  bool peers_cut = false;      // to all other servers
  Duration slow{};             // added to each message of the stream

  bool stream_cut() const { return up_cut || down_cut; }
  bool any_cut() const { return stream_cut() || datagrams_cut || peers_cut; }
};

class Network {
 public:
  Network(const WorldOptions& options, Prng& prng) : options_(options), prng_(prng) {}

  Duration Between(Duration low, Duration high) {
    if (high <= low || options_.fixed_times) return low;
    return Duration(prng_.Between(low.count(), high.count()));
  }
  Duration Link() { return Between(options_.link_min, options_.link_max); }

  // When each copy of one datagram arrives: lost, once, twice, or after younger ones.
  std::vector<Duration> Datagram(const ServerLinks& links) {
    std::vector<Duration> arrivals;
    if (links.datagrams_cut) return arrivals;
    if (options_.datagram_loss_percent > 0 && prng_.Chance(options_.datagram_loss_percent, 100)) return arrivals;
    arrivals.push_back(Link());
    if (options_.datagram_double_percent > 0 && prng_.Chance(options_.datagram_double_percent, 100)) {
      arrivals.push_back(Link() + Between(Duration(0), Seconds(2)));
    }
    if (options_.datagram_late_percent > 0 && prng_.Chance(options_.datagram_late_percent, 100)) {
      arrivals[0] += Between(Duration(0), Seconds(1));
    }
    return arrivals;
  }

 private:
  const WorldOptions& options_;
  Prng& prng_;
};

}  // namespace everstep::sim
