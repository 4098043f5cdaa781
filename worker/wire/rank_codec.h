// The codec of the unix stream socket between a rank process and its agent. Called by the rank library's I/O thread
// and by the agent's loop. Pure functions and a thread-compatible reader; no I/O.
//
// A frame, all numbers little-endian:
//
//   | u32 length of what follows (2 .. kFrameBytesMax) | u16 type | body |
//
//   type  message              type  message
//   ----  -------------------  ----  -------------------
//      1  RankHello             101  HelloAccepted
//      2  RankJoin              102  HelloRefused
//      3  CollectAnswer         103  FenceRank
//      4  RankConnected         104  PrepareSwitch
//      5  RankReady             105  AssignRank
//      6  RankFailed            106  ResumeRank
//      7  SnapshotStaged        107  SnapshotProtected
//      8  SnapshotWanted        108  SnapshotProvided
//      9  MetricReported        109  SnapshotUnavailable
//     10  RankFinished          110  StopRank
//
// A body is the message's fields in the order of proto/model/rank_messages.h (and of the structs it names):
//
//   integers, strong numbers   their width          bool          u8, 0 or 1
//   double                     the 8 bytes          enum          its underlying width, known values only
//   string, strong name        u32 count, bytes     vector        u32 count, elements
//   std::array of bytes        the bytes            struct        its fields
//
// Encoding is canonical: a frame that decodes is byte for byte what the decoded message encodes to. Counts are
// checked against a named limit and against the bytes present before anything is allocated.
//
// SnapshotProvided comes with one file descriptor: SCM_RIGHTS on the sendmsg that carries the first byte of its
// frame. A receiver queues descriptors as they arrive; each SnapshotProvided takes the oldest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/model/rank_messages.h"

namespace everstep {

inline constexpr size_t kFrameBytesMax = 16u << 20;   // type and body
inline constexpr size_t kFrameHeaderBytes = 4;
inline constexpr size_t kWireStringBytesMax = 1u << 16;
inline constexpr size_t kWireTensorsMax = 16384;      // of one shard
inline constexpr size_t kWireDimensionsMax = 8;       // of one tensor
inline constexpr size_t kWireRanksMax = 16384;        // of one assignment
inline constexpr size_t kWireSourcesMax = 64;         // of one rank's restore

// The whole frame, length included. Empty when it would exceed a limit above (the message must not be sent).
std::string EncodeFrame(const RankToAgent& message);
std::string EncodeFrame(const AgentToRank& message);

// `frame`: type and body, as FrameReader::Next returns it.
// INVALID_ARGUMENT: unknown type, a limit exceeded, a value out of range, too few or too many bytes.
Result<RankToAgent> DecodeRankToAgent(std::string_view frame);
Result<AgentToRank> DecodeAgentToRank(std::string_view frame);

// Cuts a byte stream into frames. Holds at most one frame and what was appended behind it. Thread-compatible.
class FrameReader {
 public:
  void Append(std::string_view bytes);
  // The next complete frame without its length; nullopt: more bytes are needed. The view lives until the next call
  // of Append or Next.
  // INVALID_ARGUMENT: a length out of range; the stream can't be followed any more and every later call says so.
  Result<std::optional<std::string_view>> Next();
  size_t buffered_bytes() const { return buffer_.size() - begin_; }

 private:
  std::string buffer_;
  size_t begin_ = 0;  // Invariant: bytes before it were returned already.
  bool broken_ = false;
};

}  // namespace everstep
