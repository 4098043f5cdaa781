// What both ends of a transfer need from TCP: sockets that no child process inherits (Asio's own calls open them
// without close-on-exec, and a fork may come in between), user timeouts, addresses. Thread-safe functions.
#pragma once

#include <utility>  // Boost 1.74's awaitable.hpp forgets it

#include <boost/asio.hpp>

#include <chrono>
#include <string>

#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::checkpoint {

// "host:port"; a literal address is not looked up. Blocks while a name is resolved.
//   INVALID_ARGUMENT: no such form. UNAVAILABLE: the name can't be resolved.
Result<boost::asio::ip::tcp::endpoint> ResolveEndpoint(const std::string& address);

// Non-blocking, close-on-exec. RESOURCE_EXHAUSTED: no descriptors.
Result<int> OpenTcpSocket(const boost::asio::ip::tcp& protocol);
// TCP_NODELAY, and TCP_USER_TIMEOUT so that a peer that is gone is noticed while we send.
void TuneTcpSocket(int fd, Duration user_timeout);

}  // namespace everstep::checkpoint
