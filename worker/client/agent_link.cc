#include "worker/client/agent_link.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <utility>
#include <variant>

namespace everstep::client {

AgentLink::~AgentLink() {
  for (const int fd : descriptors_) close(fd);
  if (fd_ >= 0) close(fd_);
}

Status AgentLink::Connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return InvalidArgument("EVERSTEP_AGENT_SOCKET is '" + path + "': a socket's path has at most " +
                           std::to_string(sizeof address.sun_path - 1) + " bytes");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) return Unavailable(std::string("no socket: ") + std::strerror(errno));
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return Unavailable("no agent at EVERSTEP_AGENT_SOCKET '" + path + "': " + std::strerror(errno));
  }
  return OkStatus();
}

Status AgentLink::Send(const RankToAgent& message) {
  const std::string frame = EncodeFrame(message);
  if (frame.empty()) return InvalidArgument("a message to the agent exceeds a limit of the wire");
  if (outgoing_.size() + frame.size() > kOutgoingBytesMax) return Unavailable("the agent does not read its socket");
  outgoing_ += frame;
  return Flush();
}

Status AgentLink::Flush() {
  size_t sent = 0;
  while (sent < outgoing_.size()) {
    const ssize_t count = send(fd_, outgoing_.data() + sent, outgoing_.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      return Unavailable(std::string("the agent's socket: ") + std::strerror(errno));
    }
    sent += static_cast<size_t>(count);
  }
  outgoing_.erase(0, sent);
  return OkStatus();
}

Result<std::vector<AgentLink::Received>> AgentLink::Receive() {
  std::vector<Received> received;
  std::array<char, 1u << 16> buffer;
  while (true) {
    iovec vector{buffer.data(), buffer.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsMax)> control{};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t count = recvmsg(fd_, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); count >= 0 && c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < fds; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        if (descriptors_.size() < kDescriptorsMax) {
          descriptors_.push_back(fd);
        } else {
          close(fd);
        }
      }
    }
    if (count <= 0) {
      // What came before the end is still heard: it says why.
      if (!received.empty()) break;
      return Unavailable(count == 0 ? "it closed its socket" : std::strerror(errno));
    }
    reader_.Append(std::string_view(buffer.data(), static_cast<size_t>(count)));
    while (true) {
      EVERSTEP_ASSIGN_OR_RETURN(const std::optional<std::string_view> frame, reader_.Next());
      if (!frame) break;
      EVERSTEP_ASSIGN_OR_RETURN(AgentToRank message, DecodeAgentToRank(*frame));
      Received& next = received.emplace_back(Received{std::move(message), -1});
      if (std::holds_alternative<SnapshotProvided>(next.message)) {
        if (descriptors_.empty()) return InvalidArgument("a snapshot came without its descriptor");
        next.fd = std::exchange(descriptors_.front(), -1);
        descriptors_.pop_front();
      }
    }
  }
  return received;
}

}  // namespace everstep::client
