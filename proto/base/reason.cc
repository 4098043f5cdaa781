#include "proto/base/reason.h"

#include <array>

namespace everstep {
namespace {

struct Entry {
  std::string_view name;
  std::string_view text;
};

constexpr std::array kEntries = {
#define EVERSTEP_REASON_ENTRY(name, text) Entry{#name, text},
    EVERSTEP_REASONS(EVERSTEP_REASON_ENTRY)
#undef EVERSTEP_REASON_ENTRY
};

}  // namespace

std::string_view ReasonName(Reason reason) {
  const auto index = static_cast<size_t>(reason);
  return index < kEntries.size() ? kEntries[index].name : "Unknown";
}

std::string_view ReasonText(Reason reason) {
  const auto index = static_cast<size_t>(reason);
  return index < kEntries.size() ? kEntries[index].text : "";
}

std::optional<Reason> ReasonFromName(std::string_view name) {
  for (size_t i = 0; i < kEntries.size(); ++i) {
    if (kEntries[i].name == name) return static_cast<Reason>(i);
  }
  return std::nullopt;
}

}  // namespace everstep
