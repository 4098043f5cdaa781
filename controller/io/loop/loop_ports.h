// The loop's doors to the rest of the shell: where effects go, and where heartbeats come from. Implemented by
// controller/io/shell (wiring) and by tests.
#pragma once

#include <vector>

#include "controller/core/effect.h"
#include "controller/core/event.h"
#include "proto/base/time.h"

namespace everstep {

// Performs effects that are allowed to leave. Called on the loop's thread, in the effects' order; must not block.
class LoopOutputs {
 public:
  virtual ~LoopOutputs() = default;
  virtual void Send(const SendCommand& effect) = 0;
  virtual void Close(const CloseSession& effect) = 0;
  virtual void Probe(const StartProbe& effect) = 0;
  virtual void Reply(const ReplyToOperator& effect) = 0;
  virtual void Notify(const Notice& effect, WallTime wall) = 0;
  virtual void Forward(const ForwardLines& effect) = 0;
  virtual void Forward(const ForwardMetric& effect) = 0;
  virtual void Measure(const Measured& effect) = 0;

  // What the loop sees of itself.
  virtual void Stepped(Duration /*duration*/) {}
  virtual void Turned(size_t /*queue_length*/) {}
  virtual void Appended(Duration /*duration*/) {}  // called on the store's thread
};

// Heartbeats that have arrived, newest per server. Called on the loop's thread.
class HeartbeatSource {
 public:
  virtual ~HeartbeatSource() = default;
  // With `drain`, what still waits in the socket is read first: queued datagrams come before timers.
  virtual std::vector<Heartbeat> Take(bool drain) = 0;
};

}  // namespace everstep
