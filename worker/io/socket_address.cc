#include "worker/io/socket_address.h"

#include <netinet/in.h>

#include <cerrno>
#include <cstring>

namespace everstep {

Result<SocketAddress> ResolveAddress(const std::string& host_and_port, int socket_type) {
  const size_t colon = host_and_port.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == host_and_port.size()) {
    return InvalidArgument("address " + host_and_port + " is not host:port");
  }
  std::string host = host_and_port.substr(0, colon);
  const std::string port = host_and_port.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = socket_type;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return InvalidArgument("address " + host_and_port + ": " + gai_strerror(error));
  }
  SocketAddress address;
  memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

Result<UniqueFd> ListenTcp(const std::string& host, std::string& address) {
  const bool v6 = host.find(':') != std::string::npos;
  EVERSTEP_ASSIGN_OR_RETURN(const SocketAddress any, ResolveAddress(v6 ? "[" + host + "]:0" : host + ":0", SOCK_STREAM));
  UniqueFd fd(socket(any.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || bind(fd.get(), any.get(), any.size) != 0 || listen(fd.get(), 64) != 0) {
    return Unavailable("cannot listen on " + host + ": " + strerror(errno));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size);
  const uint16_t port = bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                    : reinterpret_cast<sockaddr_in*>(&bound)->sin_port;
  address = (v6 ? "[" + host + "]" : host) + ":" + std::to_string(ntohs(port));
  return fd;
}

}  // namespace everstep
