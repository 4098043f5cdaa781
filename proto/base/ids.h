// Strong identifiers. Every number or name that identifies something has a type of its own, so that two of
// them cannot be swapped. Values are plain data, usable on any thread.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace everstep {

// An integer with a name. Ordered, hashable, never implicitly converted.
template <typename Tag, typename Value>
struct StrongNumber {
  using value_type = Value;
  Value value{};

  constexpr StrongNumber() = default;
  constexpr explicit StrongNumber(Value v) : value(v) {}
  constexpr auto operator<=>(const StrongNumber&) const = default;
  constexpr StrongNumber Next() const { return StrongNumber(static_cast<Value>(value + 1)); }
};

// A string with a name.
template <typename Tag>
struct StrongName {
  std::string value;

  StrongName() = default;
  explicit StrongName(std::string v) : value(std::move(v)) {}
  auto operator<=>(const StrongName&) const = default;
  bool empty() const { return value.empty(); }
};

using ServerId = StrongName<struct ServerIdTag>;      // unique name of a server: "s03"
using JobUid = StrongName<struct JobUidTag>;          // never reused, unlike the job's name
using RequestId = StrongName<struct RequestIdTag>;    // chosen by the caller of a mutation
using DeviceIndex = StrongNumber<struct DeviceIndexTag, int32_t>;  // within one server
using Rank = StrongNumber<struct RankTag, int32_t>;
using Step = StrongNumber<struct StepTag, int64_t>;   // number of optimizer steps applied
using Generation = StrongNumber<struct GenerationTag, uint64_t>;   // 0: none yet
using Incarnation = StrongNumber<struct IncarnationTag, uint64_t>; // of one agent; 0: none yet
using ProcessId = StrongNumber<struct ProcessIdTag, uint64_t>;     // one spawn of a rank process, allotted by the controller
using Term = StrongNumber<struct TermTag, uint64_t>;               // of one controller's leadership
using LedgerSequence = StrongNumber<struct LedgerSequenceTag, uint64_t>;
using CommandSequence = StrongNumber<struct CommandSequenceTag, uint64_t>;
using FactSequence = StrongNumber<struct FactSequenceTag, uint64_t>;
using SessionId = StrongNumber<struct SessionIdTag, uint64_t>;     // one stream of one agent
using CallId = StrongNumber<struct CallIdTag, uint64_t>;           // one operator call that waits for a reply
using RecoveryId = StrongNumber<struct RecoveryIdTag, uint64_t>;   // unique within the cluster

}  // namespace everstep

template <typename Tag, typename Value>
struct std::hash<everstep::StrongNumber<Tag, Value>> {
  size_t operator()(const everstep::StrongNumber<Tag, Value>& id) const noexcept {
    return std::hash<Value>{}(id.value);
  }
};
template <typename Tag>
struct std::hash<everstep::StrongName<Tag>> {
  size_t operator()(const everstep::StrongName<Tag>& id) const noexcept {
    return std::hash<std::string>{}(id.value);
  }
};
