#include "worker/io/rank_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace everstep {
namespace {

constexpr size_t kQueueBytesMax = 64 << 20;
constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsPerTurn = 16;    // so that one rank can't keep the loop
constexpr int kReadsToDrain = 1024;  // more than a socket buffer holds

}  // namespace

Result<std::unique_ptr<RankServer>> RankServer::Create(EventLoop& loop, std::string path, Deliver deliver) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return InvalidArgument("socket path " + path + " is longer than " + std::to_string(sizeof(address.sun_path) - 1) +
                           " bytes: choose a shorter root");
  }
  memcpy(address.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid() || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(listener.get(), 128) != 0) {
    return Internal("cannot listen on " + path + ": " + strerror(errno));
  }
  std::unique_ptr<RankServer> server(new RankServer(loop, std::move(path), std::move(listener), std::move(deliver)));
  RankServer* raw = server.get();
  EVERSTEP_RETURN_IF_ERROR(loop.Watch(raw->listener_.get(), EPOLLIN, [raw](uint32_t) { raw->OnConnectable(); }));
  return server;
}

RankServer::RankServer(EventLoop& loop, std::string path, UniqueFd listener, Deliver deliver)
    : loop_(loop), path_(std::move(path)), listener_(std::move(listener)), deliver_(std::move(deliver)) {}

RankServer::~RankServer() {
  loop_.Unwatch(listener_.get());
  for (auto& [connection, peer] : peers_) loop_.Unwatch(peer.fd.get());
  unlink(path_.c_str());
}

void RankServer::OnConnectable() {
  for (;;) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) return;
    ucred credentials{};
    socklen_t size = sizeof(credentials);
    if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 || credentials.uid != geteuid()) {
      continue;  // of another user: closed without a word
    }
    last_connection_ = last_connection_.Next();
    const Connection connection = last_connection_;
    const int raw = fd.get();
    peers_[connection].fd = std::move(fd);
    const Status watched =
        loop_.Watch(raw, EPOLLIN, [this, connection](uint32_t events) { OnReady(connection, events); });
    if (!watched.ok()) {
      peers_.erase(connection);
      continue;
    }
    deliver_(RankSocketOpened{connection, credentials.pid, getpgid(credentials.pid)});
  }
}

void RankServer::OnReady(Connection connection, uint32_t events) {
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !Read(connection, kReadsPerTurn)) return;
  if ((events & EPOLLOUT) != 0) Write(connection);
}

bool RankServer::Read(Connection connection, int reads_max) {
  for (int reads = 0; reads < reads_max; ++reads) {
    auto it = peers_.find(connection);
    if (it == peers_.end()) return false;
    Peer& peer = it->second;
    char buffer[kReadBytes];
    const ssize_t got = recv(peer.fd.get(), buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) {
      Break(connection);
      return false;
    }
    if (peer.closing) continue;
    peer.reader.Append(std::string_view(buffer, static_cast<size_t>(got)));
    for (;;) {
      auto frame = peer.reader.Next();
      if (!frame.ok()) {
        Break(connection);
        return false;
      }
      if (!frame->has_value()) break;
      auto message = DecodeRankToAgent(**frame);
      if (!message.ok()) {
        Break(connection);
        return false;
      }
      deliver_(RankMessageArrived{connection, std::move(message).value()});
      if (!peers_.contains(connection)) return false;
      if (peer.closing) break;
    }
  }
  return true;
}

void RankServer::DrainAll() {
  std::vector<Connection> all;
  for (const auto& [connection, peer] : peers_) all.push_back(connection);
  for (Connection connection : all) Read(connection, kReadsToDrain);
}

void RankServer::Send(Connection connection, const AgentToRank& message, UniqueFd descriptor) {
  auto it = peers_.find(connection);
  if (it == peers_.end() || it->second.closing) return;
  Outgoing outgoing;
  outgoing.bytes = EncodeFrame(message);
  outgoing.descriptor = std::move(descriptor);
  Peer& peer = it->second;
  if (outgoing.bytes.empty() || peer.queue_bytes + outgoing.bytes.size() > kQueueBytesMax) {
    Break(connection);
    return;
  }
  peer.queue_bytes += outgoing.bytes.size();
  peer.queue.push_back(std::move(outgoing));
  Write(connection);
}

bool RankServer::Write(Connection connection) {
  auto it = peers_.find(connection);
  if (it == peers_.end()) return false;
  Peer& peer = it->second;
  while (!peer.queue.empty()) {
    Outgoing& front = peer.queue.front();
    iovec data{front.bytes.data() + front.written, front.bytes.size() - front.written};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (front.descriptor.valid()) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* item = CMSG_FIRSTHDR(&header);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = front.descriptor.get();
      memcpy(CMSG_DATA(item), &fd, sizeof(fd));
    }
    const ssize_t written = sendmsg(peer.fd.get(), &header, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      loop_.Change(peer.fd.get(), EPOLLIN | EPOLLOUT);
      return true;
    }
    if (written <= 0) {
      Break(connection);
      return false;
    }
    front.descriptor.Reset();
    front.written += static_cast<size_t>(written);
    peer.queue_bytes -= static_cast<size_t>(written);
    if (front.written == front.bytes.size()) peer.queue.pop_front();
  }
  if (peer.closing) {
    Erase(connection);
    return false;
  }
  loop_.Change(peer.fd.get(), EPOLLIN);
  return true;
}

void RankServer::Close(Connection connection) {
  auto it = peers_.find(connection);
  if (it == peers_.end()) return;
  if (it->second.queue.empty()) {
    Erase(connection);
    return;
  }
  it->second.closing = true;
  loop_.At(BootTimeNow() + Seconds(1), [this, connection] { Erase(connection); });
}

void RankServer::Break(Connection connection) {
  auto it = peers_.find(connection);
  if (it == peers_.end()) return;
  const bool tell = !it->second.closing;
  Erase(connection);
  if (tell) deliver_(RankSocketClosed{connection});
}

void RankServer::Erase(Connection connection) {
  auto it = peers_.find(connection);
  if (it == peers_.end()) return;
  loop_.Unwatch(it->second.fd.get());
  peers_.erase(it);
}

}  // namespace everstep
