#include "worker/collective/host/socket_util.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>

namespace everstep::collective {
namespace {

Result<SocketAddress> Resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0 || found == nullptr) {
    return InvalidArgument(fmt::format("'{}' port '{}' is not a numeric address", host, port));
  }
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

}  // namespace

Result<SocketAddress> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0)
    return InvalidArgument(fmt::format("'{}' is not host:port", text));
  std::string host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  return Resolve(host, text.substr(colon + 1));
}

std::string FormatAddress(const SocketAddress& address) {
  char host[INET6_ADDRSTRLEN] = "";
  if (address.storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
    ::inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
    return fmt::format("[{}]:{}", host, ntohs(v6->sin6_port));
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
  ::inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
  return fmt::format("{}:{}", host, ntohs(v4->sin_port));
}

Result<SocketAddress> ParseInterface(const std::string& text, uint16_t port) {
  Result<SocketAddress> numeric = Resolve(text, std::to_string(port));
  if (numeric.ok()) return numeric;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return InvalidArgument("cannot list the interfaces");
  SocketAddress address;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || text != entry->ifa_name) continue;
    const int family = entry->ifa_addr->sa_family;
    // An IPv4 address is preferred: a link-local IPv6 one would need a scope that peers do not
    // share.
    if (family == AF_INET) {
      std::memcpy(&address.storage, entry->ifa_addr, sizeof(sockaddr_in));
      reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = htons(port);
      address.bytes = sizeof(sockaddr_in);
      break;
    }
    if (family == AF_INET6 && address.bytes == 0) {
      std::memcpy(&address.storage, entry->ifa_addr, sizeof(sockaddr_in6));
      reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = htons(port);
      address.bytes = sizeof(sockaddr_in6);
    }
  }
  ::freeifaddrs(list);
  if (address.bytes == 0)
    return InvalidArgument(fmt::format("'{}' is neither an address nor an interface", text));
  return address;
}

void TuneConnection(int fd, Duration user_timeout) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  const auto timeout_ms = static_cast<unsigned>(std::clamp<int64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(user_timeout).count(), 1000,
      3'600'000));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
}

Duration MonotonicNow() { return std::chrono::steady_clock::now().time_since_epoch(); }

int PollTimeout(Duration remaining) {
  if (remaining <= Duration::zero()) return 0;
  const int64_t ms = (remaining.count() + 999'999) / 1'000'000;
  return static_cast<int>(std::min<int64_t>(ms, 60'000));
}

}  // namespace everstep::collective
