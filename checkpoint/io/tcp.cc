#include "checkpoint/io/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

namespace everstep::checkpoint {

Result<boost::asio::ip::tcp::endpoint> ResolveEndpoint(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon != std::string::npos && colon + 1 < address.size() && address.size() - colon <= 6 &&
      address.find_first_not_of("0123456789", colon + 1) == std::string::npos) {
    port = std::stoi(address.substr(colon + 1));
  }
  if (port < 0 || port > 65535 || colon == 0) {
    return InvalidArgument(fmt::format("address \"{}\" is not host:port", address));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  boost::system::error_code error;
  const auto literal = boost::asio::ip::make_address(host, error);
  if (!error) return boost::asio::ip::tcp::endpoint(literal, static_cast<uint16_t>(port));
  boost::asio::io_context io;
  boost::asio::ip::tcp::resolver resolver(io);
  const auto found = resolver.resolve(host, std::to_string(port), error);
  if (error || found.empty()) {
    return Unavailable(fmt::format("address \"{}\": {}", address, error ? error.message() : "not found"));
  }
  return found.begin()->endpoint();
}

Result<int> OpenTcpSocket(const boost::asio::ip::tcp& protocol) {
  const int fd = socket(protocol.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd < 0) return ResourceExhausted(fmt::format("open a socket: {}", std::strerror(errno)));
  return fd;
}

void TuneTcpSocket(int fd, Duration user_timeout) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const auto milliseconds =
      static_cast<unsigned>(std::chrono::duration_cast<std::chrono::milliseconds>(user_timeout).count());
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

}  // namespace everstep::checkpoint
