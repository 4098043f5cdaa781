#include "worker/collective/host/mesh_connector.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "worker/collective/host/first_message.h"

namespace everstep::collective {
namespace {
constexpr Duration kRetryFirst = Milliseconds(1);
constexpr Duration kRetryMax = Milliseconds(20);
}  // namespace

// One outgoing link on its way.
struct MeshConnector::Attempt {
  enum class State { kWaiting, kConnecting, kSending, kAwaitingAnswer, kDone };
  int32_t peer = 0;
  State state = State::kWaiting;
  Descriptor socket;
  Duration next_try{};  // while kWaiting
  Duration pause = kRetryFirst;
  HelloBytes hello{};
  AnswerBytes answer{};
  size_t slot = 0;   // in the poll set; 0: not there
  size_t moved = 0;  // bytes of the hello sent, or of the answer received
};

Result<std::unique_ptr<MeshConnector>> MeshConnector::Create(const MeshOptions& options) {
  std::unique_ptr<MeshConnector> connector(new MeshConnector());
  for (const std::string& address : options.addresses) {
    EVERSTEP_ASSIGN_OR_RETURN(SocketAddress parsed, ParseAddress(address));
    connector->addresses_.push_back(parsed);
  }
  connector->token_ = options.token;
  connector->user_timeout_ = options.operation_timeout;
  connector->endpoint_ = std::make_shared<MeshEndpoint>(
      options.job_uid, options.generation, options.group, options.token, options.rank.value,
      static_cast<int32_t>(options.addresses.size()));
  EVERSTEP_RETURN_IF_ERROR(options.listener->Register(connector->endpoint_));
  connector->listener_ = options.listener;
  return connector;
}

MeshConnector::~MeshConnector() {
  if (listener_ != nullptr) listener_->Unregister(*endpoint_);
}

void MeshConnector::Retry(Attempt& attempt) {
  attempt.socket.Reset();
  attempt.state = Attempt::State::kWaiting;
  attempt.next_try = MonotonicNow() + attempt.pause;
  attempt.pause = std::min(attempt.pause * 2, kRetryMax);
}

void MeshConnector::Start(Attempt& attempt) {
  const SocketAddress& address = addresses_[static_cast<size_t>(attempt.peer)];
  attempt.socket = Descriptor(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!attempt.socket.valid()) return Retry(attempt);
  TuneConnection(attempt.socket.get(), user_timeout_);
  attempt.moved = 0;
  attempt.hello = EncodeHello({endpoint_->job_uid, endpoint_->generation, endpoint_->group,
                               endpoint_->rank, attempt.peer, token_});
  const int rc = ::connect(attempt.socket.get(),
                           reinterpret_cast<const sockaddr*>(&address.storage), address.bytes);
  if (rc != 0 && errno != EINPROGRESS) return Retry(attempt);
  attempt.state = rc == 0 ? Attempt::State::kSending : Attempt::State::kConnecting;
  if (rc == 0) Advance(attempt);
}

void MeshConnector::Advance(Attempt& attempt) {
  const int fd = attempt.socket.get();
  if (attempt.state == Attempt::State::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof(error);
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 || error != 0)
      return Retry(attempt);
    attempt.state = Attempt::State::kSending;
  }
  if (attempt.state == Attempt::State::kSending) {
    while (attempt.moved < kHelloBytes) {
      const ssize_t sent = ::send(fd, attempt.hello.data() + attempt.moved,
                                  kHelloBytes - attempt.moved, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (sent < 0) return Retry(attempt);
      attempt.moved += static_cast<size_t>(sent);
    }
    attempt.moved = 0;
    attempt.state = Attempt::State::kAwaitingAnswer;
  }
  while (attempt.moved < kAnswerBytes) {
    const ssize_t got =
        ::recv(fd, attempt.answer.data() + attempt.moved, kAnswerBytes - attempt.moved, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0)
      return Retry(attempt);  // refused: the peer may not have left an older generation yet
    attempt.moved += static_cast<size_t>(got);
  }
  // A wrong answer comes from a stranger on a reused port, or from ourselves (a connection to
  // itself).
  if (attempt.answer != EncodeAnswer(endpoint_->generation, endpoint_->group, attempt.peer))
    return Retry(attempt);
  attempt.state = Attempt::State::kDone;
}

Result<std::map<int32_t, Descriptor>> MeshConnector::Connect(std::span<const int32_t> peers,
                                                             Duration timeout,
                                                             std::span<const int> abort_fds) {
  const Duration deadline = MonotonicNow() + timeout;
  std::map<int32_t, Descriptor> links;
  std::vector<Attempt> attempts;
  std::vector<int32_t> awaited;
  for (const int32_t peer : peers) {
    if (peer > endpoint_->rank) {
      awaited.push_back(peer);
    } else {
      attempts.emplace_back().peer = peer;
    }
  }
  for (Attempt& attempt : attempts) Start(attempt);

  std::vector<pollfd> polled;
  while (true) {
    endpoint_->ClearEvent();
    std::erase_if(awaited, [&](int32_t peer) {
      Descriptor connection = endpoint_->Take(peer);
      if (!connection.valid()) return false;
      TuneConnection(connection.get(), user_timeout_);
      links.emplace(peer, std::move(connection));
      return true;
    });
    const Duration now = MonotonicNow();
    Duration wake = deadline;
    size_t open = awaited.size();
    polled.clear();
    for (const int fd : abort_fds) polled.push_back({fd, POLLIN, 0});
    polled.push_back({endpoint_->event_fd(), POLLIN, 0});
    for (Attempt& attempt : attempts) {
      if (attempt.state == Attempt::State::kWaiting && attempt.next_try <= now) Start(attempt);
      attempt.slot = 0;
      if (attempt.state == Attempt::State::kDone) continue;
      ++open;
      if (attempt.state == Attempt::State::kWaiting) {
        wake = std::min(wake, attempt.next_try);
        continue;
      }
      const bool answer = attempt.state == Attempt::State::kAwaitingAnswer;
      attempt.slot = polled.size();
      polled.push_back({attempt.socket.get(), static_cast<short>(answer ? POLLIN : POLLOUT), 0});
    }
    if (open == 0) break;
    if (now >= deadline) {
      for (const Attempt& attempt : attempts) {
        if (attempt.state != Attempt::State::kDone) awaited.push_back(attempt.peer);
      }
      std::sort(awaited.begin(), awaited.end());
      return DeadlineExceeded(fmt::format("generation {}: no connection with ranks {}",
                                          endpoint_->generation.value, fmt::join(awaited, ", ")));
    }
    if (::poll(polled.data(), polled.size(), PollTimeout(wake - now)) < 0 && errno != EINTR) {
      return Internal(fmt::format("poll failed: errno {}", errno));
    }
    for (size_t i = 0; i < abort_fds.size(); ++i) {
      if (polled[i].revents != 0) return Aborted("connecting was aborted");
    }
    for (Attempt& attempt : attempts) {
      if (attempt.slot != 0 && polled[attempt.slot].revents != 0) Advance(attempt);
    }
  }
  for (Attempt& attempt : attempts) links.emplace(attempt.peer, std::move(attempt.socket));
  return links;
}

}  // namespace everstep::collective
