#include "worker/collective/host/socket_transport.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace everstep::collective {
namespace {

constexpr char kLeaveByte = 'L';
constexpr char kAbortByte = 'A';
constexpr size_t kInlineBytes = 4096;  // messages up to this travel in one buffer with their header
constexpr size_t kStreamCallBytes =
    256 * 1024;  // per system call, so that both directions take turns
constexpr Duration kLeaveTimeout = Seconds(5);  // for a peer that does not read what was sent to it

}  // namespace

struct SocketTransport::Link {
  int32_t peer = 0;
  Descriptor socket;
  uint32_t messages_sent = 0;
  uint32_t messages_received = 0;
  std::atomic<bool> ended{false};  // the watch saw it leave in good order
};

// Precedes each message and each stream.
struct SocketTransport::Header {
  uint32_t number = 0;  // of the message on this link and in this direction
  uint8_t kind = 0;
  uint8_t type = 0;
  uint8_t reduce = 0;
  uint8_t check = 0xe5;
  uint64_t bytes = 0;
};

SocketTransport::SocketTransport(int32_t rank, int32_t size, Duration operation_timeout,
                                 std::unique_ptr<MeshConnector> connector,
                                 std::map<int32_t, Descriptor> links)
    : rank_(rank),
      size_(size),
      operation_timeout_(operation_timeout),
      connector_(std::move(connector)),
      watch_(::epoll_create1(EPOLL_CLOEXEC)),
      links_(static_cast<size_t>(size)) {
  EVERSTEP_CHECK(watch_.valid());
  for (auto& [peer, socket] : links) EVERSTEP_CHECK(Adopt(peer, std::move(socket)).ok());
}

SocketTransport::~SocketTransport() = default;

Status SocketTransport::Adopt(int32_t peer, Descriptor socket) {
  auto link = std::make_unique<Link>();
  link->peer = peer;
  link->socket = std::move(socket);
  epoll_event event{};
  event.events = EPOLLRDHUP;  // EPOLLHUP and EPOLLERR come unasked
  event.data.ptr = link.get();
  if (::epoll_ctl(watch_.get(), EPOLL_CTL_ADD, link->socket.get(), &event) != 0) {
    return Internal(fmt::format("cannot watch a connection: errno {}", errno));
  }
  std::lock_guard lock(links_mutex_);
  links_[static_cast<size_t>(peer)] = std::move(link);
  return OkStatus();
}

Status SocketTransport::LinkTo(int32_t peer, Link*& link) {
  link = links_[static_cast<size_t>(peer)].get();
  if (link != nullptr) return OkStatus();
  const std::array<int32_t, 1> peers = {peer};
  const std::array<int, 1> abort_fds = {shutdown_.fd()};
  Result<std::map<int32_t, Descriptor>> made =
      connector_->Connect(peers, operation_timeout_, abort_fds);
  if (!made.ok()) return made.status();
  EVERSTEP_RETURN_IF_ERROR(Adopt(peer, std::move(made->at(peer))));
  link = links_[static_cast<size_t>(peer)].get();
  // Shutdown may have come before the link was on its list.
  return shutdown_.triggered() ? Aborted("shut down") : OkStatus();
}

void SocketTransport::Begin(MessageTag tag) {
  tag_ = tag;
  deadline_ = Duration::zero();
}

SocketTransport::Header SocketTransport::MakeHeader(Link& link, size_t bytes) const {
  return Header{.number = link.messages_sent++,
                .kind = tag_.kind,
                .type = tag_.type,
                .reduce = tag_.reduce,
                .bytes = bytes};
}

Status SocketTransport::CheckHeader(const Header& header, Link& link, size_t bytes) const {
  const Header expected{.number = link.messages_received,
                        .kind = tag_.kind,
                        .type = tag_.type,
                        .reduce = tag_.reduce,
                        .bytes = bytes};
  ++link.messages_received;
  if (std::memcmp(&header, &expected, sizeof(Header)) == 0) return OkStatus();
  return Internal(fmt::format(
      "ranks disagree: rank {} sent message {} of operation {} ({}, {}) with {} bytes where rank "
      "{} is in message {} of "
      "operation {} ({}, {}) with {} bytes",
      link.peer, header.number, header.kind, header.type, header.reduce, header.bytes, rank_,
      expected.number, expected.kind, expected.type, expected.reduce, expected.bytes));
}

Status SocketTransport::LinkFailed(Link& link, const char* what) {
  if (shutdown_.triggered()) return Aborted("shut down");
  char urgent = 0;
  const bool told =
      ::recv(link.socket.get(), &urgent, 1, MSG_OOB | MSG_DONTWAIT) == 1 || link.ended.load();
  if (told && urgent == kAbortByte) return Aborted(fmt::format("rank {} aborted", link.peer));
  int32_t nobody = kNobody;
  failed_peer_.compare_exchange_strong(nobody, link.peer);
  if (told) return Aborted(fmt::format("rank {} left while it was needed", link.peer));
  return Aborted(fmt::format("lost rank {}: {}", link.peer, what));
}

// Sends what the socket takes of header and data. `sent` counts both and is advanced.
Status SocketTransport::SendSome(Link& link, const void* header, size_t header_bytes,
                                 const void* data, size_t bytes, size_t& sent) {
  iovec parts[2];
  int count = 0;
  if (sent < header_bytes) {
    parts[count++] = {const_cast<char*>(static_cast<const char*>(header)) + sent,
                      header_bytes - sent};
  }
  const size_t data_sent = sent < header_bytes ? 0 : sent - header_bytes;
  if (data_sent < bytes)
    parts[count++] = {const_cast<char*>(static_cast<const char*>(data)) + data_sent,
                      bytes - data_sent};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<size_t>(count);
  const ssize_t rc = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (rc >= 0) {
    sent += static_cast<size_t>(rc);
    return OkStatus();
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return OkStatus();
  return LinkFailed(link, std::strerror(errno));
}

Status SocketTransport::ReceiveSome(Link& link, void* data, size_t bytes, size_t& got) {
  const ssize_t rc = ::recv(link.socket.get(), data, bytes, MSG_DONTWAIT);
  if (rc > 0) {
    got += static_cast<size_t>(rc);
    return OkStatus();
  }
  if (rc == 0) return LinkFailed(link, "connection closed");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return OkStatus();
  return LinkFailed(link, std::strerror(errno));
}

Status SocketTransport::DrainWatch() {
  std::array<epoll_event, 16> events;
  while (true) {
    const int count = ::epoll_wait(watch_.get(), events.data(), events.size(), 0);
    if (count <= 0) return OkStatus();
    for (int i = 0; i < count; ++i) {
      auto& link = *static_cast<Link*>(events[static_cast<size_t>(i)].data.ptr);
      char urgent = 0;
      const bool told = ::recv(link.socket.get(), &urgent, 1, MSG_OOB | MSG_DONTWAIT) == 1;
      if (!told || urgent != kLeaveByte) {
        if (shutdown_.triggered()) return Aborted("shut down");
        if (told) return Aborted(fmt::format("rank {} aborted", link.peer));
        return LinkFailed(link, "connection closed or reset");
      }
      // Left in good order: what it sent before is still to be read; only needing more of it is an
      // error.
      link.ended.store(true);
      ::epoll_ctl(watch_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
    }
  }
}

// Returns when one of the links may have become ready. Either may be null.
Status SocketTransport::Wait(const Link* readable, const Link* writable) {
  const Duration now = MonotonicNow();
  if (deadline_ == Duration::zero()) deadline_ = now + operation_timeout_;
  if (now >= deadline_) {
    return DeadlineExceeded(fmt::format(
        "operation timed out after {} ms waiting {}{}{}", operation_timeout_.count() / 1'000'000,
        readable != nullptr ? fmt::format("for rank {}", readable->peer) : "",
        readable != nullptr && writable != nullptr ? " and " : "",
        writable != nullptr ? fmt::format("to send to rank {}", writable->peer) : ""));
  }
  std::array<pollfd, 4> polled;
  size_t count = 0;
  polled[count++] = {shutdown_.fd(), POLLIN, 0};
  polled[count++] = {watch_.get(), POLLIN, 0};
  if (readable != nullptr) polled[count++] = {readable->socket.get(), POLLIN, 0};
  if (writable != nullptr) polled[count++] = {writable->socket.get(), POLLOUT, 0};
  const int rc = ::poll(polled.data(), count, PollTimeout(deadline_ - now));
  if (rc < 0 && errno != EINTR) return Internal(fmt::format("poll failed: errno {}", errno));
  if (rc <= 0) return OkStatus();
  if (polled[0].revents != 0) return Aborted("shut down");
  if (polled[1].revents != 0) return DrainWatch();
  return OkStatus();
}

Status SocketTransport::Exchange(const Outgoing& out, const Incoming& in) {
  Link* to = nullptr;
  Link* from = nullptr;
  if (out.peer != kNobody) EVERSTEP_RETURN_IF_ERROR(LinkTo(out.peer, to));
  if (in.peer != kNobody) EVERSTEP_RETURN_IF_ERROR(LinkTo(in.peer, from));

  // Small messages travel with their header in one buffer and one system call.
  alignas(16) std::byte out_inline[sizeof(Header) + kInlineBytes];
  alignas(16) std::byte in_inline[sizeof(Header) + kInlineBytes];
  Header out_header;
  size_t sent = 0;
  const size_t out_total = to == nullptr ? 0 : sizeof(Header) + out.bytes;
  const bool out_small = out.bytes <= kInlineBytes;
  if (to != nullptr) {
    out_header = MakeHeader(*to, out.bytes);
    if (out_small) {
      std::memcpy(out_inline, &out_header, sizeof(Header));
      if (out.bytes != 0) std::memcpy(out_inline + sizeof(Header), out.data, out.bytes);
    }
  }
  size_t got = 0;
  const size_t in_total = from == nullptr ? 0 : sizeof(Header) + in.bytes;
  const bool in_small = in.bytes <= kInlineBytes;
  bool header_checked = false;

  while (sent < out_total || got < in_total) {
    const size_t before = sent + got;
    if (sent < out_total) {
      EVERSTEP_RETURN_IF_ERROR(
          out_small ? SendSome(*to, out_inline, out_total, nullptr, 0, sent)
                    : SendSome(*to, &out_header, sizeof(Header), out.data, out.bytes, sent));
    }
    if (got < in_total) {
      if (in_small) {
        EVERSTEP_RETURN_IF_ERROR(ReceiveSome(*from, in_inline + got, in_total - got, got));
      } else if (got < sizeof(Header)) {
        EVERSTEP_RETURN_IF_ERROR(ReceiveSome(*from, in_inline + got, sizeof(Header) - got, got));
      } else {
        const size_t at = got - sizeof(Header);
        EVERSTEP_RETURN_IF_ERROR(
            ReceiveSome(*from, static_cast<std::byte*>(in.data) + at, in.bytes - at, got));
      }
      if (!header_checked && got >= sizeof(Header)) {
        Header header;
        std::memcpy(&header, in_inline, sizeof(Header));
        EVERSTEP_RETURN_IF_ERROR(CheckHeader(header, *from, in.bytes));
        header_checked = true;
      }
    }
    if (sent + got != before) continue;
    EVERSTEP_RETURN_IF_ERROR(
        Wait(got < in_total ? from : nullptr, sent < out_total ? to : nullptr));
  }
  if (from != nullptr && in_small && in.bytes != 0)
    std::memcpy(in.data, in_inline + sizeof(Header), in.bytes);
  return OkStatus();
}

// One pass along a ring or chain. Both directions advance whenever their socket lets them; bytes go
// out as soon as the bytes they depend on came in (and were reduced).
class SocketTransport::StreamRun {
 public:
  StreamRun(SocketTransport& transport, const StreamPlan& plan)
      : transport_(transport), plan_(plan) {
    for (const StreamReceive& piece : plan.receives) receive_total_ += piece.bytes;
    for (const StreamSend& piece : plan.sends) send_total_ += piece.bytes;
    for (size_t i = 0; i < plan.head; ++i) head_bytes_ += plan.sends[i].bytes;
  }

  Status Run() {
    if (!plan_.receives.empty()) EVERSTEP_RETURN_IF_ERROR(transport_.LinkTo(plan_.from, from_));
    if (!plan_.sends.empty()) EVERSTEP_RETURN_IF_ERROR(transport_.LinkTo(plan_.to, to_));
    if (to_ != nullptr) out_header_ = transport_.MakeHeader(*to_, send_total_);
    while (Sending() || Receiving()) {
      const size_t before = sent_ + header_got_ + taken_;
      if (Receiving()) EVERSTEP_RETURN_IF_ERROR(ReceiveOnce());
      if (Sending() && Sendable() > 0) EVERSTEP_RETURN_IF_ERROR(SendOnce());
      if (sent_ + header_got_ + taken_ != before) continue;
      EVERSTEP_RETURN_IF_ERROR(transport_.Wait(Receiving() ? from_ : nullptr,
                                               Sending() && Sendable() > 0 ? to_ : nullptr));
    }
    return OkStatus();
  }

 private:
  bool Sending() const { return to_ != nullptr && sent_ < sizeof(Header) + send_total_; }
  bool Receiving() const {
    return from_ != nullptr && (header_got_ < sizeof(Header) || ready_ < receive_total_);
  }
  // Bytes, header included, that may be sent now and are not.
  size_t Sendable() const {
    return sizeof(Header) + std::min(send_total_, head_bytes_ + ready_) - sent_;
  }

  Status SendOnce() {
    // Position within the pieces of what follows the header.
    while (send_piece_ < plan_.sends.size() && send_offset_ == plan_.sends[send_piece_].bytes) {
      ++send_piece_;
      send_offset_ = 0;
    }
    const size_t header_left = sizeof(Header) - std::min(sent_, sizeof(Header));
    size_t bytes = 0;
    const std::byte* data = nullptr;
    if (send_piece_ < plan_.sends.size()) {
      const StreamSend& piece = plan_.sends[send_piece_];
      data = piece.data + send_offset_;
      bytes = std::min({piece.bytes - send_offset_, Sendable() - header_left, kStreamCallBytes});
    }
    size_t moved = 0;
    const auto* header =
        reinterpret_cast<const std::byte*>(&out_header_) + (sizeof(Header) - header_left);
    EVERSTEP_RETURN_IF_ERROR(transport_.SendSome(*to_, header, header_left, data, bytes, moved));
    sent_ += moved;
    send_offset_ += moved - std::min(moved, header_left);
    return OkStatus();
  }

  Status ReceiveOnce() {
    if (header_got_ < sizeof(Header)) {
      EVERSTEP_RETURN_IF_ERROR(
          transport_.ReceiveSome(*from_, reinterpret_cast<std::byte*>(&in_header_) + header_got_,
                                 sizeof(Header) - header_got_, header_got_));
      if (header_got_ < sizeof(Header)) return OkStatus();
      EVERSTEP_RETURN_IF_ERROR(transport_.CheckHeader(in_header_, *from_, receive_total_));
    }
    while (receive_piece_ < plan_.receives.size() &&
           receive_offset_ == plan_.receives[receive_piece_].bytes) {
      ++receive_piece_;
      receive_offset_ = 0;
    }
    if (receive_piece_ == plan_.receives.size()) return OkStatus();
    const StreamReceive& piece = plan_.receives[receive_piece_];
    const size_t left = piece.bytes - receive_offset_;
    size_t got = 0;
    if (piece.other == nullptr) {
      EVERSTEP_RETURN_IF_ERROR(transport_.ReceiveSome(*from_, piece.into + receive_offset_,
                                                      std::min(left, kStreamCallBytes), got));
      taken_ += got;
      receive_offset_ += got;
      ready_ += got;
      return OkStatus();
    }
    // Into scratch, then reduce whole elements; a split element waits at the front for its rest.
    std::vector<std::byte>& scratch = transport_.scratch_;
    if (scratch.size() < kStreamCallBytes) scratch.resize(kStreamCallBytes);
    const size_t want = std::min(left - partial_, kStreamCallBytes - partial_);
    EVERSTEP_RETURN_IF_ERROR(transport_.ReceiveSome(*from_, scratch.data() + partial_, want, got));
    taken_ += got;
    const size_t count = (partial_ + got) / plan_.element_bytes;
    const size_t whole = count * plan_.element_bytes;
    const size_t rest = partial_ + got - whole;
    if (count > 0) {
      plan_.reduce(piece.into + receive_offset_, scratch.data(), piece.other + receive_offset_,
                   count);
      if (piece.divide) plan_.divide(piece.into + receive_offset_, count, plan_.divisor);
      if (rest > 0) std::memmove(scratch.data(), scratch.data() + whole, rest);
    }
    partial_ = rest;
    receive_offset_ += whole;
    ready_ += whole;
    return OkStatus();
  }

  SocketTransport& transport_;
  const StreamPlan& plan_;
  Link* from_ = nullptr;
  Link* to_ = nullptr;
  size_t receive_total_ = 0;
  size_t send_total_ = 0;
  size_t head_bytes_ = 0;

  Header out_header_;
  size_t sent_ = 0;  // header included
  size_t send_piece_ = 0;
  size_t send_offset_ = 0;

  Header in_header_;
  size_t header_got_ = 0;
  size_t taken_ = 0;  // bytes read after the header
  size_t ready_ = 0;  // of those, bytes complete in memory (and reduced)
  size_t receive_piece_ = 0;
  size_t receive_offset_ = 0;
  size_t partial_ = 0;  // bytes of a split element in scratch
};

Status SocketTransport::Stream(const StreamPlan& plan) { return StreamRun(*this, plan).Run(); }

Status SocketTransport::CheckHealth() {
  if (shutdown_.triggered()) return Aborted("shut down");
  return DrainWatch();
}

std::optional<int32_t> SocketTransport::failed_peer() const {
  const int32_t peer = failed_peer_.load();
  if (peer == kNobody) return std::nullopt;
  return peer;
}

// The descriptors stay open (the operation's thread may be using their numbers), but nothing moves
// over them any more. A link on which everything sent has arrived ends with an urgent byte and a
// normal close. On any other the close would wait behind data that a busy peer is not reading, so
// it is reset: dissolving the association does that at once.
void SocketTransport::Shutdown() {
  if (!shutdown_.Trigger(Aborted("shut down"))) return;
  std::lock_guard lock(links_mutex_);
  for (const std::unique_ptr<Link>& link : links_) {
    if (link == nullptr) continue;
    const int fd = link->socket.get();
    int unsent = 0;
    const bool drained = ::ioctl(fd, SIOCOUTQ, &unsent) == 0 && unsent == 0;
    if (drained && ::send(fd, &kAbortByte, 1, MSG_OOB | MSG_NOSIGNAL | MSG_DONTWAIT) == 1) {
      ::shutdown(fd, SHUT_RDWR);
      continue;
    }
    sockaddr nothing{};
    nothing.sa_family = AF_UNSPEC;
    if (::connect(fd, &nothing, sizeof(nothing)) != 0) ::shutdown(fd, SHUT_RDWR);
  }
}

void SocketTransport::Leave() {
  std::lock_guard lock(links_mutex_);
  const Duration deadline = MonotonicNow() + std::min(kLeaveTimeout, operation_timeout_);
  for (const std::unique_ptr<Link>& link : links_) {
    if (link == nullptr) continue;
    const int fd = link->socket.get();
    // Data still on its way is delivered before the close; the urgent byte tells that the close is
    // meant. It needs room in the send buffer, which a peer that is slow to read makes only in
    // time.
    while (::send(fd, &kLeaveByte, 1, MSG_OOB | MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
           (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      const Duration left = deadline - MonotonicNow();
      pollfd polled{fd, POLLOUT, 0};
      if (left <= Duration::zero() || ::poll(&polled, 1, PollTimeout(left)) == 0) break;
    }
    ::shutdown(fd, SHUT_WR);
  }
}

}  // namespace everstep::collective
