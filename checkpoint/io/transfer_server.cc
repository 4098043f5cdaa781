#include "checkpoint/io/transfer_server.h"

#include "checkpoint/io/tcp.h"  // first of all that includes Asio

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

#include <fmt/format.h>

namespace everstep::checkpoint {
namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

class TransferServer::Impl {
 public:
  Impl(const Options& options, TransferSource& source)
      : options_(options), source_(source), io_(std::make_unique<asio::io_context>()), acceptor_(*io_),
        pause_(*io_) {}
  // Pending handlers own the sessions, and sessions refer to this object: they go first.
  ~Impl() {
    Stop();
    error_code ignored;
    acceptor_->close(ignored);
    acceptor_.reset();
    pause_.reset();
    io_.reset();
  }

  Status Listen();
  void Run();
  void Stop();

  const Options options_;
  TransferSource& source_;
  std::unique_ptr<asio::io_context> io_;
  std::optional<tcp::acceptor> acceptor_;       // used on io_'s threads only, one handler at a time
  std::optional<asio::steady_timer> pause_;     // while the process has no descriptors left
  std::vector<std::thread> threads_;
  uint16_t port_ = 0;
  std::atomic<size_t> sessions_{0};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<uint64_t> refused_{0};

 private:
  void AwaitConnection();
};

namespace {

// One connection: request, answer, bytes. All handlers run on its strand; it lives as long as one is pending.
template <typename Owner>
class Session : public std::enable_shared_from_this<Session<Owner>> {
 public:
  Session(Owner* owner, tcp::socket socket)
      : owner_(owner), strand_(asio::make_strand(*owner_->io_)), socket_(std::move(socket)), timer_(*owner_->io_) {}
  ~Session() { owner_->sessions_.fetch_sub(1); }

  void Begin() {
    asio::dispatch(strand_, [self = this->shared_from_this()] {
      self->SetDeadline(self->owner_->options_.request_timeout);
      asio::async_read(self->socket_, asio::buffer(self->frame_), self->OnStrand([self](error_code error, size_t) {
        if (error) return self->Refuse();
        const Result<size_t> bytes = DecodeRequestFrame({self->frame_.data(), self->frame_.size()});
        if (!bytes.ok()) return self->Refuse();
        self->body_.resize(*bytes);
        self->ReadBody();
      }));
    });
  }

 private:
  template <typename Handler>
  auto OnStrand(Handler handler) {
    return asio::bind_executor(strand_, std::move(handler));
  }

  void SetDeadline(Duration timeout) {
    timer_.expires_after(timeout);
    timer_.async_wait(OnStrand([self = this->shared_from_this()](error_code error) {
      if (!error) self->Close();
    }));
  }

  void Refuse() {
    owner_->refused_.fetch_add(1);
    Close();
  }

  // Not a clean end of stream: the reader must see that bytes are missing, at once.
  void Close() {
    error_code ignored;
    socket_.set_option(asio::socket_base::linger(true, 0), ignored);
    socket_.close(ignored);
    timer_.cancel();
  }

  void ReadBody() {
    asio::async_read(socket_, asio::buffer(body_), OnStrand([self = this->shared_from_this()](error_code error, size_t) {
      if (error) return self->Refuse();
      const Result<TransferRequest> request = DecodeRequestBody(self->body_);
      if (!request.ok()) {
        self->owner_->refused_.fetch_add(1);
        self->opened_.response.status = request.status();
        return self->Answer();
      }
      self->timer_.cancel();  // a stored copy is read from disk first: the reader's own deadline bounds that
      self->owner_->source_.OpenTransfer(*request, [self](OpenedTransfer opened) {
        asio::post(self->strand_, [self, opened = std::move(opened)]() mutable {
          self->opened_ = std::move(opened);
          if (!self->opened_.response.status.ok()) self->owner_->refused_.fetch_add(1);
          self->Answer();
        });
      });
    }));
  }

  void Answer() {
    body_ = EncodeTransferResponse(opened_.response);
    SetDeadline(owner_->options_.stall_timeout);
    asio::async_write(socket_, asio::buffer(body_), OnStrand([self = this->shared_from_this()](error_code error, size_t) {
      if (error) return self->Close();
      self->SendPart(0);
    }));
  }

  void SendPart(size_t at) {
    const bool whole = opened_.pin == nullptr || at == opened_.pin->bytes().size();
    if (opened_.pin != nullptr && !opened_.pin->Check().ok()) return Close();
    if (whole) {
      error_code ignored;
      socket_.shutdown(tcp::socket::shutdown_send, ignored);
      timer_.cancel();
      opened_.pin.reset();
      socket_.close(ignored);
      return;
    }
    const auto part = opened_.pin->bytes().subspan(at);
    const size_t bytes = std::min(part.size(), owner_->options_.part_bytes);
    SetDeadline(owner_->options_.stall_timeout);
    asio::async_write(socket_, asio::buffer(part.data(), bytes),
                      OnStrand([self = this->shared_from_this(), at](error_code error, size_t sent) {
      if (error) return self->Close();
      self->owner_->bytes_sent_.fetch_add(sent);
      self->SendPart(at + sent);
    }));
  }

  Owner* const owner_;  // outlives the io_context that owns us
  asio::strand<asio::io_context::executor_type> strand_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  std::array<char, kTransferFrameBytes> frame_{};
  std::string body_;
  OpenedTransfer opened_;
};

}  // namespace

Status TransferServer::Impl::Listen() {
  EVERSTEP_ASSIGN_OR_RETURN(const tcp::endpoint endpoint, ResolveEndpoint(options_.address));
  EVERSTEP_ASSIGN_OR_RETURN(const int fd, OpenTcpSocket(endpoint.protocol()));
  error_code error;
  acceptor_->assign(endpoint.protocol(), fd, error);
  if (error) {
    close(fd);
    return Unavailable(fmt::format("listen on {}: {}", options_.address, error.message()));
  }
  acceptor_->set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor_->bind(endpoint, error);
  if (!error) acceptor_->listen(128, error);
  if (error == asio::error::address_in_use) {
    return FailedPrecondition(fmt::format("transfer address {} is in use; choose another port", options_.address));
  }
  if (error) return Unavailable(fmt::format("transfer address {}: {}", options_.address, error.message()));
  port_ = acceptor_->local_endpoint(error).port();
  return OkStatus();
}

void TransferServer::Impl::Run() {
  AwaitConnection();
  for (size_t i = 0; i < std::max<size_t>(options_.threads, 1); ++i) {
    threads_.emplace_back([this] { io_->run(); });
  }
}

void TransferServer::Impl::Stop() {
  io_->stop();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void TransferServer::Impl::AwaitConnection() {
  acceptor_->async_wait(tcp::acceptor::wait_read, [this](error_code error) {
    if (error) return;
    // accept4 by hand: Asio's accept leaves the descriptor open to a child that is forked meanwhile.
    const int fd = accept4(acceptor_->native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      if (sessions_.fetch_add(1) >= options_.sessions_max) {
        sessions_.fetch_sub(1);
        refused_.fetch_add(1);
        close(fd);
      } else {
        TuneTcpSocket(fd, options_.stall_timeout);
        error_code ignored;
        tcp::socket socket(*io_);
        socket.assign(acceptor_->local_endpoint(ignored).protocol(), fd, error);
        if (error) {
          sessions_.fetch_sub(1);
          close(fd);
        } else {
          std::make_shared<Session<Impl>>(this, std::move(socket))->Begin();
        }
      }
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The connection stays in the backlog; asking again at once would spin.
      pause_->expires_after(std::chrono::milliseconds(100));
      pause_->async_wait([this](error_code stopped) {
        if (!stopped) AwaitConnection();
      });
      return;
    }
    AwaitConnection();
  });
}

Result<std::unique_ptr<TransferServer>> TransferServer::Start(const Options& options, TransferSource& source) {
  auto impl = std::make_unique<Impl>(options, source);
  EVERSTEP_RETURN_IF_ERROR(impl->Listen());
  impl->Run();
  return std::unique_ptr<TransferServer>(new TransferServer(std::move(impl)));
}

TransferServer::TransferServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TransferServer::~TransferServer() = default;
void TransferServer::Stop() { impl_->Stop(); }

uint16_t TransferServer::port() const { return impl_->port_; }
uint64_t TransferServer::bytes_sent() const { return impl_->bytes_sent_.load(); }
uint64_t TransferServer::requests_refused() const { return impl_->refused_.load(); }

}  // namespace everstep::checkpoint
