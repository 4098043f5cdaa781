#include "controller/core/planner/calibration.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

namespace everstep::planner {

double Calibration::Ratio(const std::string& name) const {
  const auto at = entries.find(name);
  return at == entries.end() ? 1 : at->second.ratio;
}

void Calibration::Observe(const std::string& name, double measured, double predicted) {
  if (!(measured > 0) || !(predicted > 0) || !std::isfinite(measured) || !std::isfinite(predicted)) return;
  Entry& entry = entries[name];
  const double sample = std::clamp(measured / predicted, entry.ratio / 2, entry.ratio * 2);
  entry.ratio = entry.samples == 0 ? sample : entry.ratio + (sample - entry.ratio) / 5;
  ++entry.samples;
}

std::string Calibration::Serialize() const {
  std::string text;
  for (const auto& [name, entry] : entries) text += fmt::format("{} {} {}\n", name, entry.ratio, entry.samples);
  return text;
}

Result<Calibration> Calibration::Parse(std::string_view text) {
  Calibration calibration;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    const size_t first = line.find(' ');
    const size_t second = first == std::string_view::npos ? first : line.find(' ', first + 1);
    Entry entry;
    bool good = second != std::string_view::npos && first > 0;
    if (good) {
      const auto ratio = std::from_chars(line.data() + first + 1, line.data() + second, entry.ratio);
      const auto samples = std::from_chars(line.data() + second + 1, line.data() + line.size(), entry.samples);
      good = ratio.ec == std::errc() && ratio.ptr == line.data() + second && samples.ec == std::errc() &&
             samples.ptr == line.data() + line.size() && std::isfinite(entry.ratio) && entry.ratio > 0 &&
             entry.samples >= 0;
    }
    if (!good) return InvalidArgument(fmt::format("calibration: \"{}\" is not \"class ratio samples\"", line));
    calibration.entries[std::string(line.substr(0, first))] = entry;
  }
  return calibration;
}

bool SpeedWatch::Observe(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) return false;
  ++since_change_;
  if (reference_ <= 0) {
    reference_ = seconds;
    return true;
  }
  const double speed = reference_ / seconds;  // relative to the reference
  const int32_t direction = speed < 1 - policy_.slower ? -1 : speed > 1 + policy_.faster ? 1 : 0;
  if (direction == 0 || direction != direction_) {
    direction_ = direction;
    outside_ = 0;
  }
  if (direction == 0) return false;
  average_ = outside_ == 0 ? seconds : average_ + (seconds - average_) / 5;
  ++outside_;
  if (outside_ < policy_.steps || since_change_ < policy_.dwell_steps) return false;
  reference_ = average_;
  outside_ = 0;
  direction_ = 0;
  since_change_ = 0;
  return true;
}

}  // namespace everstep::planner
