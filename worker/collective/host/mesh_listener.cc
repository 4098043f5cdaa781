#include "worker/collective/host/mesh_listener.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <list>
#include <thread>
#include <utility>

#include "worker/collective/host/first_message.h"
#include "worker/collective/host/socket_util.h"

namespace everstep::collective {

MeshEndpoint::MeshEndpoint(JobUid uid, Generation generation_, GroupId group_,
                           const MeshToken& token, int32_t rank_, int32_t size_)
    : job_uid(std::move(uid)),
      generation(generation_),
      group(group_),
      rank(rank_),
      size(size_),
      token_(token),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

bool MeshEndpoint::TokenMatches(const MeshToken& token) const {
  // Volatile: the loop must touch all bytes whatever they are.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < token.size(); ++i) {
    difference = static_cast<uint8_t>(difference | static_cast<uint8_t>(token[i] ^ token_[i]));
  }
  return difference == 0;
}

namespace {
// Whether the connector gave up on this connection (and makes another). Data may be here already,
// because the peer may be faster; and a peer that is done with the mesh and left in good order has
// sent an urgent byte before its close.
bool IsClosedByPeer(int fd) {
  char byte;
  if (::recv(fd, &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT) == 1) return false;
  const ssize_t got = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
}  // namespace

void MeshEndpoint::Offer(int32_t from, Descriptor connection) {
  if (IsClosedByPeer(connection.get())) return;
  const AnswerBytes answer = EncodeAnswer(generation, group, rank);
  std::lock_guard lock(mutex_);
  // 32 bytes always fit into an empty send buffer; if the peer has gone, this is the place to
  // forget it.
  const ssize_t sent =
      ::send(connection.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent != static_cast<ssize_t>(answer.size())) return;
  offered_[from] = std::move(connection);
  const uint64_t one = 1;
  if (::write(event_.get(), &one, sizeof(one)) < 0) return;  // full counter: readable already
}

Descriptor MeshEndpoint::Take(int32_t from) {
  std::lock_guard lock(mutex_);
  const auto found = offered_.find(from);
  if (found == offered_.end()) return Descriptor();
  Descriptor connection = std::move(found->second);
  offered_.erase(found);
  if (IsClosedByPeer(connection.get())) return Descriptor();
  return connection;
}

void MeshEndpoint::ClearEvent() {
  uint64_t value = 0;
  if (::read(event_.get(), &value, sizeof(value)) < 0) return;  // nothing was there
}

namespace {
namespace asio = boost::asio;
using Tcp = asio::ip::tcp;
using ErrorCode = boost::system::error_code;
}  // namespace

class MeshListener::Acceptor {
 public:
  explicit Acceptor(const Options& options)
      : options_(options), acceptor_(io_), sweep_timer_(io_) {}

  ~Acceptor() {
    asio::post(io_, [this] {
      ErrorCode ignored;
      stopping_ = true;
      StopClosingInForkedChildren(acceptor_.native_handle());
      acceptor_.close(ignored);
      sweep_timer_.cancel(ignored);
      for (auto& waiting : waiting_) CloseWaiting(*waiting);
    });
    if (thread_.joinable()) {
      thread_.join();
    } else {
      ErrorCode ignored;
      if (acceptor_.is_open()) StopClosingInForkedChildren(acceptor_.native_handle());
      acceptor_.close(ignored);
    }
  }

  Result<std::string> Start() {
    EVERSTEP_ASSIGN_OR_RETURN(SocketAddress address,
                              ParseInterface(options_.interface, options_.port));
    v6_ = address.storage.ss_family == AF_INET6;
    const int fd =
        ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return Unavailable(fmt::format("cannot make a socket: errno {}", errno));
    const int one = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) != 0 ||
        ::listen(fd, 1024) != 0) {
      const int error = errno;
      ::close(fd);
      return Unavailable(
          fmt::format("cannot listen on {}: errno {}", FormatAddress(address), error));
    }
    address.bytes = sizeof(address.storage);
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes);
    ErrorCode error;
    acceptor_.assign(v6_ ? Tcp::v6() : Tcp::v4(), fd, error);
    if (error) {
      ::close(fd);
      return Unavailable("cannot watch the listening socket: " + error.message());
    }
    CloseInForkedChildren(fd);
    Accept();
    thread_ = std::thread([this] { io_.run(); });
    std::string text = FormatAddress(address);
    if (!options_.advertised_host.empty())
      text = options_.advertised_host + text.substr(text.rfind(':'));
    return text;
  }

  Status Register(std::shared_ptr<MeshEndpoint> endpoint) {
    std::lock_guard lock(mutex_);
    Generation& newest = newest_[endpoint->job_uid];
    if (endpoint->generation < newest) {
      return Aborted(fmt::format("generation {} is stale, {} is known", endpoint->generation.value,
                                 newest.value));
    }
    newest = endpoint->generation;
    const Key key{endpoint->job_uid, endpoint->generation, endpoint->group};
    if (!endpoints_.emplace(key, std::move(endpoint)).second) {
      return AlreadyExists(fmt::format("group {} of generation {} is connected already",
                                       key.group.value, key.generation.value));
    }
    std::vector<Parked> parked = std::exchange(parked_, {});
    for (Parked& one : parked) Place(one.hello, std::move(one.connection), one.since);
    return OkStatus();
  }

  void Unregister(const MeshEndpoint& endpoint) {
    std::lock_guard lock(mutex_);
    const auto found = endpoints_.find(Key{endpoint.job_uid, endpoint.generation, endpoint.group});
    if (found != endpoints_.end() && found->second.get() == &endpoint) endpoints_.erase(found);
  }

  MeshListenerCounters counters() const {
    std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  struct Key {
    JobUid job_uid;
    Generation generation;
    GroupId group;
    auto operator<=>(const Key&) const = default;
  };
  struct Parked {
    MeshHello hello;
    Descriptor connection;
    Duration since;
  };
  struct Waiting {
    explicit Waiting(asio::io_context& io) : socket(io) {}
    Tcp::socket socket;
    HelloBytes bytes{};
    size_t received = 0;
    Duration since{};
  };
  using WaitingList = std::list<std::shared_ptr<Waiting>>;

  // Asio waits, accept4 accepts: Asio's own accept would leave a moment without close-on-exec.
  void Accept() {
    acceptor_.async_wait(Tcp::acceptor::wait_read, [this](const ErrorCode& error) {
      if (stopping_ || error) return;
      while (true) {
        Descriptor connection(
            ::accept4(acceptor_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!connection.valid()) {
          if (errno == EINTR || errno == ECONNABORTED) continue;
          if (errno != EAGAIN && errno != EWOULDBLOCK) {
            accept_stalled_ =
                true;  // out of descriptors: try again at the next sweep instead of spinning
            ArmSweep();
            return;
          }
          break;
        }
        if (waiting_.size() >= options_.waiting_max) {
          Count(&MeshListenerCounters::refused_limit);
        } else {
          StartReading(std::move(connection));
        }
      }
      Accept();
    });
  }

  void StartReading(Descriptor connection) {
    auto one = std::make_shared<Waiting>(io_);
    ErrorCode error;
    one->socket.assign(v6_ ? Tcp::v6() : Tcp::v4(), connection.get(), error);
    if (error) return;
    one->socket.non_blocking(true, error);
    connection.Release();
    one->since = MonotonicNow();
    waiting_.push_back(std::move(one));
    ArmSweep();
    Read(std::prev(waiting_.end()));
  }

  void Read(WaitingList::iterator at) {
    std::shared_ptr<Waiting> one = *at;  // keeps the buffer alive until the handler ran
    one->socket.async_read_some(
        asio::buffer(one->bytes.data() + one->received, one->bytes.size() - one->received),
        [this, one, at](const ErrorCode& error, size_t got) {
          if (stopping_) return;
          one->received += got;
          const size_t known = std::min(one->received, kHelloMagic.size());
          const bool garbage = std::memcmp(one->bytes.data(), kHelloMagic.data(), known) != 0;
          if (error || garbage) {
            Count(&MeshListenerCounters::refused_garbage);
            CloseWaiting(*one);
            waiting_.erase(at);
          } else if (one->received < one->bytes.size()) {
            Read(at);
          } else {
            Complete(*one);
            waiting_.erase(at);
          }
        });
  }

  void Complete(Waiting& one) {
    ErrorCode error;
    const int fd = one.socket.release(error);
    if (error) {
      CloseWaiting(one);
      return;
    }
    Descriptor connection(fd);
    const std::optional<MeshHello> hello = DecodeHello(one.bytes);
    if (!hello.has_value()) {
      Count(&MeshListenerCounters::refused_garbage);
      return;
    }
    std::lock_guard lock(mutex_);
    Place(*hello, std::move(connection), MonotonicNow());
  }

  // REQUIRES: mutex_ is held
  void Place(const MeshHello& hello, Descriptor connection, Duration since) {
    const auto found = endpoints_.find(Key{hello.job_uid, hello.generation, hello.group});
    if (found != endpoints_.end()) {
      MeshEndpoint& endpoint = *found->second;
      // The higher rank connects to the lower one, so nobody below this rank has business here.
      const bool right_ranks =
          hello.to == endpoint.rank && hello.from > endpoint.rank && hello.from < endpoint.size;
      if (!endpoint.TokenMatches(hello.token) || !right_ranks) {
        ++counters_.refused_foreign;
        return;
      }
      ++counters_.accepted;
      endpoint.Offer(hello.from, std::move(connection));
      return;
    }
    const auto newest = newest_.find(hello.job_uid);
    if (newest == newest_.end() && !newest_.empty()) {
      ++counters_.refused_foreign;
    } else if (newest != newest_.end() && hello.generation < newest->second) {
      ++counters_.refused_stale;
    } else if (parked_.size() >= options_.parked_max) {
      ++counters_.refused_limit;
    } else {
      ++counters_.parked;
      parked_.push_back({hello, std::move(connection), since});
    }
  }

  // Ends connections that wait too long, ten times a second while there are any.
  void ArmSweep() {
    if (sweep_armed_) return;
    sweep_armed_ = true;
    sweep_timer_.expires_after(std::chrono::milliseconds(100));
    sweep_timer_.async_wait([this](const ErrorCode& error) {
      if (error || stopping_) return;
      sweep_armed_ = false;
      const Duration now = MonotonicNow();
      for (auto& one : waiting_) {
        if (now - one->since > options_.first_message_timeout)
          CloseWaiting(*one);  // its read ends with an error
      }
      bool parked = false;
      {
        std::lock_guard lock(mutex_);
        std::erase_if(parked_,
                      [&](const Parked& one) { return now - one.since > options_.parked_timeout; });
        parked = !parked_.empty();
      }
      if (std::exchange(accept_stalled_, false)) Accept();
      if (parked || !waiting_.empty()) ArmSweep();
    });
  }

  static void CloseWaiting(Waiting& one) {
    if (!one.socket.is_open()) return;
    ErrorCode ignored;
    StopClosingInForkedChildren(one.socket.native_handle());
    one.socket.close(ignored);
  }

  void Count(uint64_t MeshListenerCounters::*counter) {
    std::lock_guard lock(mutex_);
    ++(counters_.*counter);
  }

  const Options options_;
  asio::io_context io_{1};
  Tcp::acceptor acceptor_;
  asio::steady_timer sweep_timer_;
  WaitingList waiting_;          // listener thread only
  bool accept_stalled_ = false;  // listener thread only
  bool sweep_armed_ = false;     // listener thread only
  bool v6_ = false;              // set before the thread starts
  bool stopping_ = false;        // listener thread only
  std::thread thread_;

  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<MeshEndpoint>> endpoints_;  // guarded by mutex_
  std::map<JobUid, Generation> newest_;  // guarded by mutex_; one entry per job of this process
  std::vector<Parked> parked_;           // guarded by mutex_
  MeshListenerCounters counters_;        // guarded by mutex_
};

Result<std::shared_ptr<MeshListener>> MeshListener::Create(const Options& options) {
  std::shared_ptr<MeshListener> listener(new MeshListener());
  listener->acceptor_ = std::make_unique<Acceptor>(options);
  EVERSTEP_ASSIGN_OR_RETURN(listener->address_, listener->acceptor_->Start());
  return listener;
}

MeshListener::~MeshListener() = default;
MeshListenerCounters MeshListener::counters() const { return acceptor_->counters(); }
Status MeshListener::Register(std::shared_ptr<MeshEndpoint> endpoint) {
  return acceptor_->Register(std::move(endpoint));
}
void MeshListener::Unregister(const MeshEndpoint& endpoint) { acceptor_->Unregister(endpoint); }

}  // namespace everstep::collective
