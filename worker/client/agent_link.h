// The unix socket to the agent: frames out without blocking, frames and descriptors in. Owned by Session::Impl, which
// calls it under its mutex (Send, Flush) and from its I/O thread (Receive).
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "proto/base/time.h"
#include "proto/model/rank_messages.h"
#include "worker/wire/rank_codec.h"

namespace everstep::client {

inline constexpr size_t kOutgoingBytesMax = 64u << 20;
inline constexpr size_t kDescriptorsMax = 16;  // waiting for their SnapshotProvided

class AgentLink {
 public:
  AgentLink() = default;
  ~AgentLink();
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  // UNAVAILABLE: nobody listens there. INVALID_ARGUMENT: the path is too long.
  Status Connect(const std::string& path);
  int fd() const { return fd_; }

  // Queues one frame and sends what the socket takes. UNAVAILABLE: the agent is gone, or too far behind.
  Status Send(const RankToAgent& message);
  Status Flush();
  bool wants_to_write() const { return !outgoing_.empty(); }
  size_t outgoing_bytes() const { return outgoing_.size(); }

  // Reads what is there without waiting. UNAVAILABLE: the agent closed. INVALID_ARGUMENT: it sent garbage.
  // A SnapshotProvided message has its descriptor in `fd`, which the caller then owns; -1 for all others.
  struct Received {
    AgentToRank message;
    int fd = -1;
  };
  Result<std::vector<Received>> Receive();

 private:
  int fd_ = -1;
  std::string outgoing_;
  FrameReader reader_;
  std::deque<int> descriptors_;
};

}  // namespace everstep::client
