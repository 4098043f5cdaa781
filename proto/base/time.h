// Core time. `Instant` belongs to a clock type without now(): code in core/ cannot read a clock, it is given
// one. Shells make instants from CLOCK_BOOTTIME; the simulator makes them from its event heap.
#pragma once

#include <chrono>
#include <cstdint>

namespace everstep {

using Duration = std::chrono::nanoseconds;

struct CoreClock {
  using duration = Duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<CoreClock>;
  static constexpr bool is_steady = true;
};

using Instant = CoreClock::time_point;

inline constexpr Instant kNever = Instant::max();

constexpr Duration Milliseconds(int64_t n) { return std::chrono::milliseconds(n); }
constexpr Duration Microseconds(int64_t n) { return std::chrono::microseconds(n); }
constexpr Duration Seconds(int64_t n) { return std::chrono::seconds(n); }
constexpr double ToMilliseconds(Duration d) { return std::chrono::duration<double, std::milli>(d).count(); }
constexpr double ToSeconds(Duration d) { return std::chrono::duration<double>(d).count(); }

// Wall time for people (ages, log lines). Never used for a decision. Microseconds since the Unix epoch.
struct WallTime {
  int64_t unix_microseconds = 0;
  constexpr auto operator<=>(const WallTime&) const = default;
};

}  // namespace everstep
