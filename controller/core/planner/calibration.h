// What measured step times teach the cost model: how much slower or faster than predicted each class of operation is, and
// when a rank's speed has changed for long enough to act on it. Plain data: the caller keeps it, and persists its text.
// Pure, thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace everstep::planner {

// Ratios measured / predicted, by class: "compute/A100-80", "network". 1 where nothing was measured.
struct Calibration {
  struct Entry {
    double ratio = 1;
    int64_t samples = 0;
    bool operator==(const Entry&) const = default;
  };
  std::map<std::string, Entry> entries;

  double Ratio(const std::string& name) const;
  // Moves the class's average by a fifth towards measured / predicted; a single sample never moves it by more than a
  // factor of two. Ignores what is no positive number.
  void Observe(const std::string& name, double measured, double predicted);

  std::string Serialize() const;  // "compute/A100-80 1.08 52\n", sorted by class
  static Result<Calibration> Parse(std::string_view text);
  bool operator==(const Calibration&) const = default;
};

// Decides when shares are to be cut anew: a speed must stay out of its band for `steps` steps in a row, the band for
// recovering is wider, and changes keep a distance.
struct SpeedPolicy {
  double slower = 0.15;            // below (1 - slower) of the reference
  double faster = 0.25;            // above (1 + faster)
  int32_t steps = 5;
  int32_t dwell_steps = 50;
};
class SpeedWatch {
 public:
  explicit SpeedWatch(SpeedPolicy policy) : policy_(policy) {}
  // The time of one micro-batch of this rank in this step. True: its speed has changed; Speed() is the new reference.
  bool Observe(double seconds);
  double Speed() const { return reference_ > 0 ? 1 / reference_ : 0; }  // micro-batches per second; 0: nothing seen

 private:
  SpeedPolicy policy_;
  double average_ = 0;             // over the current run of steps out of the band
  double reference_ = 0;           // seconds
  int32_t outside_ = 0;
  int32_t direction_ = 0;
  int32_t since_change_ = 0;
};

}  // namespace everstep::planner
