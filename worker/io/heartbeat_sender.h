// Sends heartbeat datagrams from the main loop, so that a loop that is stuck stops beating. Loop-only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"

namespace everstep {

class HeartbeatSender {
 public:
  // `make` fills in all but server, sequence and loop counter.
  HeartbeatSender(EventLoop& loop, ServerId server, std::function<Heartbeat()> make);
  ~HeartbeatSender();

  // To the address of `welcome`, with its key, at once and then at its interval. kInvalidArgument: no such address.
  Status Start(const Welcome& welcome);
  void Stop();
  uint64_t sent_count() const { return sequence_; }

 private:
  void Beat();

  EventLoop& loop_;
  const ServerId server_;
  const std::function<Heartbeat()> make_;
  Welcome welcome_;
  UniqueFd socket_;
  uint64_t sequence_ = 0;  // rises for the agent's whole life
  size_t first_vote_ = 0;
  std::optional<EventLoop::TimerId> timer_;
};

}  // namespace everstep
