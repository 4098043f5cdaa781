// The bytes of one heartbeat datagram. Agents encode, the controller's heartbeat socket decodes; both ends use this
// codec only. Thread-safe: pure functions.
//
// Layout, little-endian:
//   u32 magic "EVHB" · u8 version · u8 name length · u8 vote count · u8 zero
//   u64 key id · u64 incarnation · u64 sequence · u64 loop counter · u64 acted command
//   name bytes
//   votes, each: varint process · varint generation · varint step · u8 phase      (varint: LEB128, at most 10 bytes)
//   16 bytes: HMAC-SHA256 over all that precedes, cut to 128 bits
// A datagram is at most kHeartbeatBytesMax, so that it is never fragmented. Votes that don't fit are left out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/model/facts.h"

namespace everstep {

inline constexpr size_t kHeartbeatBytesMax = 1200;
inline constexpr size_t kHeartbeatVotesMax = 64;
inline constexpr size_t kHeartbeatNameBytesMax = 200;
inline constexpr size_t kHeartbeatMacBytes = 16;

using HeartbeatKey = std::array<uint8_t, 32>;

// The key of an id, or null when the id is unknown. Called at most once per datagram; the pointer must stay valid
// until DecodeHeartbeat returns.
using HeartbeatKeyLookup = std::function<const HeartbeatKey*(uint64_t key_id)>;

// The datagram. Votes beyond kHeartbeatVotesMax, or that do not fit, and negative steps are left out; a name beyond
// kHeartbeatNameBytesMax is cut (names are validated long before).
std::string EncodeHeartbeat(const Heartbeat& heartbeat, uint64_t key_id, const HeartbeatKey& key);

struct DecodedHeartbeat {
  uint64_t key_id = 0;
  Heartbeat heartbeat;
};

// The content of an authentic datagram. kInvalidArgument: not a heartbeat, or malformed · kNotFound: the key id is
// unknown (the sender needs a new key; no evidence of anything else) · kPermissionDenied: the code does not match.
Result<DecodedHeartbeat> DecodeHeartbeat(std::string_view bytes, const HeartbeatKeyLookup& lookup);

}  // namespace everstep
