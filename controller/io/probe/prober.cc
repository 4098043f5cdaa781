#include "controller/io/probe/prober.h"

#include <atomic>
#include <thread>
#include <utility>  // Boost 1.74 needs it first

#include <boost/asio/connect.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace everstep {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

// One probe; lives in its handlers.
class OneProbe : public std::enable_shared_from_this<OneProbe> {
 public:
  OneProbe(asio::io_context& io, std::function<void(ProbeOutcome)> done)
      : resolver_(io), socket_(io), timer_(io), done_(std::move(done)) {}

  void Start(const std::string& host, const std::string& port, Duration timeout) {
    auto self = shared_from_this();
    timer_.expires_after(timeout);
    timer_.async_wait([self](boost::system::error_code error) {
      if (!error) self->Finish(ProbeOutcome::kTimedOut);
    });
    boost::system::error_code numeric_error;
    const asio::ip::address numeric = asio::ip::make_address(host, numeric_error);
    if (!numeric_error) {
      Connect(tcp::endpoint(numeric, static_cast<uint16_t>(std::stoi(port))));
      return;
    }
    resolver_.async_resolve(host, port, [self](boost::system::error_code error, tcp::resolver::results_type found) {
      if (error || found.empty()) {
        self->Finish(ProbeOutcome::kTimedOut);
      } else {
        self->Connect(found.begin()->endpoint());
      }
    });
  }

 private:
  void Connect(const tcp::endpoint& endpoint) {
    auto self = shared_from_this();
    socket_.async_connect(endpoint, [self](boost::system::error_code error) {
      if (!error) {
        self->Finish(ProbeOutcome::kConnected);
      } else if (error == asio::error::connection_refused) {
        self->Finish(ProbeOutcome::kRefused);
      } else {
        self->Finish(ProbeOutcome::kTimedOut);
      }
    });
  }

  void Finish(ProbeOutcome outcome) {
    if (!done_) return;
    auto done = std::exchange(done_, nullptr);
    boost::system::error_code ignored;
    socket_.close(ignored);
    resolver_.cancel();
    timer_.cancel();
    done(outcome);
  }

  tcp::resolver resolver_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  std::function<void(ProbeOutcome)> done_;
};

}  // namespace

class Prober::Impl {
 public:
  Impl() : work_(asio::make_work_guard(io_)), thread_([this] { io_.run(); }) {}
  ~Impl() { Stop(); }

  void Stop() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  void Probe(const std::string& address, Duration timeout, std::function<void(ProbeOutcome)> done) {
    const size_t colon = address.rfind(':');
    const bool possible = colon != std::string::npos && colon + 1 < address.size() && address.size() - colon <= 6 &&
                          address.find_first_not_of("0123456789", colon + 1) == std::string::npos;
    asio::post(io_, [this, possible, address, colon, timeout, done = std::move(done)]() mutable {
      if (!possible || running_ >= kProbesMax) {
        done(ProbeOutcome::kTimedOut);
        return;
      }
      ++running_;
      auto probe = std::make_shared<OneProbe>(io_, [this, done = std::move(done)](ProbeOutcome outcome) {
        --running_;
        done(outcome);
      });
      std::string host = address.substr(0, colon);
      if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
      probe->Start(host, address.substr(colon + 1), timeout);
    });
  }

 private:
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  size_t running_ = 0;  // prober's thread only
  std::thread thread_;
};

Prober::Prober() : impl_(std::make_unique<Impl>()) {}
Prober::~Prober() = default;

void Prober::Probe(const std::string& address, Duration timeout, std::function<void(ProbeOutcome)> done) {
  impl_->Probe(address, timeout, std::move(done));
}

void Prober::Stop() { impl_->Stop(); }

}  // namespace everstep
