// Small Linux socket helpers of the host backend. Pure wrappers: no state, any thread.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "proto/base/status.h"
#include "proto/base/time.h"
#include "worker/collective/host/descriptor.h"

namespace everstep::collective {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

// "127.0.0.1:80" or "[::1]:80". Numeric only: resolving names blocks, and agents know their
// addresses. kInvalidArgument: anything else.
Result<SocketAddress> ParseAddress(const std::string& text);
std::string FormatAddress(const SocketAddress& address);
// A numeric address, or the first address of the interface of that name. kInvalidArgument: neither.
Result<SocketAddress> ParseInterface(const std::string& text, uint16_t port);

// TCP_NODELAY, and TCP_USER_TIMEOUT so that data to a host that is gone fails the connection. Best
// effort.
void TuneConnection(int fd, Duration user_timeout);

// Seconds and nanoseconds of the monotonic clock as one number; the deadlines of operations are on
// it.
Duration MonotonicNow();
// For poll(): rounded up, at least 0, capped.
int PollTimeout(Duration remaining);

}  // namespace everstep::collective
