// The agent's stream to the controller: opens it, opens it again after it broke, carries messages both ways.
// Everything is loop-only; gRPC's threads only post to the loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "everstep/v1/agent.pb.h"
#include "proto/base/prng.h"
#include "worker/io/event_loop.h"

namespace everstep {

struct ControllerLinkOptions {
  std::string controller;              // host:port
  Duration reconnect_first = Milliseconds(20);
  Duration reconnect_max = Seconds(1);
  uint64_t seed = 1;                   // of the waits' scatter
};

class ControllerLink {
 public:
  struct Handler {
    std::function<void()> on_up;       // an attempt begins: the first Send must be the hello
    std::function<void(std::string)> on_down;
    std::function<void(const v1::ControllerMessage&)> on_message;
  };
  // `loop` outlives the link.
  ControllerLink(EventLoop& loop, ControllerLinkOptions options, Handler handler);
  // Waits until gRPC has let go of the stream.
  ~ControllerLink();

  void Open();
  // Ends the stream, if any; on_down follows only when `reopen` (then a new attempt does, too).
  void Close(bool reopen);
  // Dropped when no stream is open. What can be in flight is bounded by the sender (AgentCore's outbox).
  void Send(v1::AgentMessage message);
  // Asks for all that was sent to be written, then closes for good. Waits at most `limit`.
  void Finish(Duration limit);

 private:
  class Session;
  void Attempt();
  void OnMessage(uint64_t serial, const v1::ControllerMessage& message);
  void OnDone(uint64_t serial, std::string message);

  EventLoop& loop_;
  const ControllerLinkOptions options_;
  const Handler handler_;
  Prng scatter_;
  bool wanted_ = false;
  Duration backoff_;
  uint64_t serial_ = 0;                // of the current session; messages of older ones are dropped
  std::shared_ptr<Session> session_;
  std::optional<EventLoop::TimerId> retry_;
};

}  // namespace everstep
