// The unix socket on which rank processes reach their agent: accepts, checks who connects, frames, passes file
// descriptors. Loop-only.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "proto/base/status.h"
#include "worker/core/agent/agent_event.h"
#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"
#include "worker/wire/rank_codec.h"

namespace everstep {

class RankServer {
 public:
  using Deliver = std::function<void(AgentEvent)>;
  // Listens on `path`, which is replaced if it exists (the caller holds the root's lock).
  static Result<std::unique_ptr<RankServer>> Create(EventLoop& loop, std::string path, Deliver deliver);
  ~RankServer();

  // `descriptor`, if valid, goes with the message's first byte. A connection whose reader is too slow is closed.
  void Send(Connection connection, const AgentToRank& message, UniqueFd descriptor);
  // After what was sent is written, or a second later. No RankSocketClosed follows.
  void Close(Connection connection);
  // Reads and delivers everything that has arrived by now.
  void DrainAll();

 private:
  struct Outgoing {
    std::string bytes;
    size_t written = 0;
    UniqueFd descriptor;
  };
  struct Peer {
    UniqueFd fd;
    FrameReader reader;
    std::deque<Outgoing> queue;
    size_t queue_bytes = 0;
    bool closing = false;
  };
  RankServer(EventLoop& loop, std::string path, UniqueFd listener, Deliver deliver);
  void OnConnectable();
  void OnReady(Connection connection, uint32_t events);
  // False: the connection is gone.
  bool Read(Connection connection, int reads_max);
  bool Write(Connection connection);
  void Break(Connection connection);
  void Erase(Connection connection);

  EventLoop& loop_;
  const std::string path_;
  UniqueFd listener_;
  const Deliver deliver_;
  std::map<Connection, Peer> peers_;
  Connection last_connection_{0};
};

}  // namespace everstep
