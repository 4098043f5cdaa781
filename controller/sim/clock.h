// The clock of one machine: it runs a little too fast or too slow, and its wall time may jump. Monotonic readings never
// go back (CLOCK_BOOTTIME). Used by World only.
#pragma once

#include <cstdint>

#include "proto/base/time.h"

namespace everstep::sim {

inline constexpr Instant kWorldStart = Instant(Seconds(1000));

struct Clock {
  int64_t drift_ppm = 0;       // parts in a million, either way
  Duration wall_offset{};      // jumps

  Instant Local(Instant world) const {
    const int64_t d = (world - kWorldStart).count();
    return kWorldStart + Duration(d + static_cast<int64_t>(static_cast<__int128>(d) * drift_ppm / 1000000));
  }
  // The first world instant at which Local has reached `local`.
  Instant World(Instant local) const {
    if (local == kNever) return kNever;
    if (drift_ppm == 0) return local;
    const int64_t d = (local - kWorldStart).count();
    return kWorldStart + Duration(static_cast<int64_t>(static_cast<__int128>(d) * 1000000 / (1000000 + drift_ppm)) + 2);
  }
  WallTime Wall(Instant world) const {
    return {((world - kWorldStart) + wall_offset).count() / 1000 + 1700000000000000};
  }
};

}  // namespace everstep::sim
