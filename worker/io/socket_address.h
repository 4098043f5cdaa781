// Text to socket addresses and back, for the agent's own TCP and UDP sockets. Thread-safe; resolving may block.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <string>

#include "proto/base/status.h"
#include "worker/io/unique_fd.h"

namespace everstep {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// "host:port" or "[v6]:port". kInvalidArgument: not of that form, or the host is unknown.
Result<SocketAddress> ResolveAddress(const std::string& host_and_port, int socket_type);

// A listening TCP socket on `host`, any port; `address` becomes "host:port".
Result<UniqueFd> ListenTcp(const std::string& host, std::string& address);

}  // namespace everstep
