#include "controller/io/heartbeat/heartbeat_receiver.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace everstep {
namespace {

constexpr int kBatch = 64;
constexpr int kGatherMilliseconds = 5;  // small beside any lease; one wake-up for many datagrams
constexpr int kReceiveBufferBytes = 8 << 20;  // a second of 16,000 servers

Result<addrinfo*> Resolve(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return InvalidArgument(fmt::format("\"{}\" is not host:port", address));
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (error != 0) {
    return FailedPrecondition(fmt::format("heartbeat address {} cannot be used: {}", address, gai_strerror(error)));
  }
  return found;
}

std::string BoundAddress(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length);
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  ::getnameinfo(reinterpret_cast<sockaddr*>(&storage), length, host, sizeof(host), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
  return storage.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

}  // namespace

Result<std::unique_ptr<HeartbeatReceiver>> HeartbeatReceiver::Open(const std::string& address,
                                                                   const HeartbeatKeys* keys) {
  EVERSTEP_ASSIGN_OR_RETURN(addrinfo* const found, Resolve(address));
  const int socket = ::socket(found->ai_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool bound = socket >= 0 && ::bind(socket, found->ai_addr, found->ai_addrlen) == 0;
  const int error = errno;
  ::freeaddrinfo(found);
  if (!bound) {
    if (socket >= 0) ::close(socket);
    return FailedPrecondition(fmt::format("heartbeat address {} cannot be bound: {}; choose another with "
                                          "--heartbeat-listen", address, strerror(error)));
  }
  ::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &kReceiveBufferBytes, sizeof(kReceiveBufferBytes));
  const int stop_event = ::eventfd(0, EFD_CLOEXEC);
  EVERSTEP_CHECK(stop_event >= 0);
  return std::unique_ptr<HeartbeatReceiver>(
      new HeartbeatReceiver(socket, stop_event, BoundAddress(socket), keys));
}

HeartbeatReceiver::HeartbeatReceiver(int socket, int stop_event, std::string address, const HeartbeatKeys* keys)
    : socket_(socket), stop_event_(stop_event), address_(std::move(address)), keys_(keys) {}

HeartbeatReceiver::~HeartbeatReceiver() {
  Stop();
  ::close(socket_);
  ::close(stop_event_);
}

void HeartbeatReceiver::Start(std::function<void()> arrived) {
  arrived_ = std::move(arrived);
  thread_ = std::thread([this] { Run(); });
}

void HeartbeatReceiver::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  EVERSTEP_CHECK(::write(stop_event_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
}

void HeartbeatReceiver::Run() {
  std::array<pollfd, 2> polled{{{socket_, POLLIN, 0}, {stop_event_, POLLIN, 0}}};
  while (true) {
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;  // a signal
    if (polled[1].revents != 0) return;
    bool some = false;
    {
      std::lock_guard lock(mutex_);
      some = ReadAll();
    }
    if (!some) continue;
    arrived_();
    if (::poll(&polled[1], 1, kGatherMilliseconds) > 0) return;
  }
}

std::vector<Heartbeat> HeartbeatReceiver::Take(bool drain) {
  std::map<ServerId, Heartbeat> taken;
  {
    std::lock_guard lock(mutex_);
    if (drain) ReadAll();
    taken.swap(newest_);
  }
  std::vector<Heartbeat> out;
  out.reserve(taken.size());
  for (auto& [server, heartbeat] : taken) out.push_back(std::move(heartbeat));
  return out;
}

bool HeartbeatReceiver::ReadAll() {
  // One byte more than allowed, so that a longer datagram shows as malformed instead of being cut.
  static thread_local std::array<std::array<char, kHeartbeatBytesMax + 1>, kBatch> buffers;
  std::array<iovec, kBatch> vectors;
  std::array<mmsghdr, kBatch> messages{};
  for (int i = 0; i < kBatch; ++i) {
    vectors[i] = {buffers[i].data(), buffers[i].size()};
    messages[i].msg_hdr.msg_iov = &vectors[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  bool some = false;
  // Bounded, so that a flood cannot keep the loop, which may be the caller, from its timers.
  for (int round = 0; round < 1024; ++round) {
    const int count = ::recvmmsg(socket_, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
    if (count <= 0) break;
    for (int i = 0; i < count; ++i) Accept({buffers[i].data(), messages[i].msg_len});
    some = some || !newest_.empty();
    if (count < kBatch) break;
  }
  return some;
}

void HeartbeatReceiver::Accept(std::string_view bytes) {
  std::shared_ptr<const HeartbeatKeys::Entry> entry;
  auto decoded = DecodeHeartbeat(bytes, [&](uint64_t id) -> const HeartbeatKey* {
    entry = keys_->Find(id);
    return entry == nullptr ? nullptr : &entry->key;
  });
  if (!decoded.ok()) {
    switch (decoded.status().code()) {
      case StatusCode::kNotFound: ++counters_.unknown_key; break;
      case StatusCode::kPermissionDenied: ++counters_.forged; break;
      default: ++counters_.malformed; break;
    }
    return;
  }
  Heartbeat& heartbeat = decoded->heartbeat;
  if (heartbeat.server != entry->server) {
    ++counters_.forged;
    return;
  }
  ++counters_.received;
  const auto [at, fresh] = newest_.try_emplace(heartbeat.server);
  if (!fresh) {
    ++counters_.coalesced;
    // Datagrams overtake each other; only what is newer counts.
    const auto order = [](const Heartbeat& h) { return std::pair(h.incarnation, h.sequence); };
    if (order(heartbeat) <= order(at->second)) return;
  }
  at->second = std::move(heartbeat);
}

}  // namespace everstep
