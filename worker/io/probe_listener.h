// A TCP port that accepts and closes. The controller probes it when it doubts the agent: as long as the agent lives
// the connection succeeds; a refusal by the living host proves the agent dead. Loop-only.
#pragma once

#include <memory>
#include <string>

#include "proto/base/status.h"
#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"

namespace everstep {

class ProbeListener {
 public:
  static Result<std::unique_ptr<ProbeListener>> Create(EventLoop& loop, const std::string& host);
  ~ProbeListener();
  const std::string& address() const { return address_; }

 private:
  explicit ProbeListener(EventLoop& loop) : loop_(loop) {}
  EventLoop& loop_;
  UniqueFd listener_;
  std::string address_;
};

}  // namespace everstep
