#include "controller/io/ops/ops_server.h"

#include <fmt/format.h>

#include <atomic>
#include <thread>
#include <utility>  // Boost 1.74 needs it first

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "controller/io/ops/status_page.h"

namespace everstep {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;

struct Answer {
  http::status status = http::status::ok;
  const char* type = "text/plain; charset=utf-8";
  std::string body;
};

}  // namespace

class OpsServer::Impl : public std::enable_shared_from_this<OpsServer::Impl> {
 public:
  explicit Impl(Metrics* metrics) : acceptor_(io_), metrics_(metrics) {}

  Status Open(const std::string& address) {
    const size_t colon = address.rfind(':');
    boost::system::error_code error;
    tcp::resolver resolver(io_);
    std::string host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    const auto found = resolver.resolve(host, address.substr(colon + 1), tcp::resolver::passive, error);
    if (!error && !found.empty()) {
      const tcp::endpoint endpoint = found.begin()->endpoint();
      acceptor_.open(endpoint.protocol(), error);
      if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
      if (!error) acceptor_.bind(endpoint, error);
      if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    }
    if (error) {
      return FailedPrecondition(fmt::format("ops address {} cannot be bound: {}; choose another with --ops-listen",
                                            address, error.message()));
    }
    address_ = fmt::format("{}:{}", address.substr(0, colon), acceptor_.local_endpoint().port());
    return OkStatus();
  }

  void Start() {
    Accept();
    thread_ = std::thread([this] { io_.run(); });
  }

  void Serve(ControllerLoop* loop, std::function<void()> before_scrape) {
    asio::post(io_, [this, loop, before = std::move(before_scrape)] {
      loop_ = loop;
      before_scrape_ = before;
    });
  }

  void Stop() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  const std::string& address() const { return address_; }

 private:
  // One connection; lives in its handlers, all on the ops thread.
  class Connection : public std::enable_shared_from_this<Connection> {
   public:
    Connection(tcp::socket socket, Impl* owner) : stream_(std::move(socket)), timer_(owner->io_), owner_(owner) {
      ++owner_->connections_;
    }
    ~Connection() { --owner_->connections_; }

    void Read() {
      parser_.emplace();
      parser_->header_limit(8 * 1024);
      parser_->body_limit(1024);
      stream_.expires_after(kOpsTimeout);
      http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](beast::error_code error, size_t) {
        if (!error) self->Handle();
      });
    }

    void Respond(Answer answer) {
      if (answered_) return;
      answered_ = true;
      timer_.cancel();
      const auto& request = parser_->get();
      response_ = {};
      response_.result(answer.status);
      response_.version(request.version());
      response_.keep_alive(request.keep_alive());
      response_.set(http::field::content_type, answer.type);
      response_.set(http::field::cache_control, "no-store");
      response_.set("X-Content-Type-Options", "nosniff");
      if (answer.status == http::status::method_not_allowed) response_.set(http::field::allow, "GET, HEAD");
      response_.content_length(answer.body.size());
      if (request.method() != http::verb::head) response_.body() = std::move(answer.body);
      stream_.expires_after(kOpsTimeout);
      serializer_.emplace(response_);
      if (request.method() == http::verb::head) {
        http::async_write_header(stream_, *serializer_, [self = shared_from_this()](beast::error_code error, size_t) {
          self->Written(error);
        });
      } else {
        http::async_write(stream_, *serializer_, [self = shared_from_this()](beast::error_code error, size_t) {
          self->Written(error);
        });
      }
    }

    // `owner` is captured first, so that it outlives the connection. Calls `make` with a view, or with null when the loop doesn't answer in time.
    void WithView(std::function<Answer(const ClusterView*)> make) {
      answered_ = false;
      auto self = shared_from_this();
      auto owner = owner_->shared_from_this();
      timer_.expires_after(kOpsViewTimeout);
      timer_.async_wait([self, make](beast::error_code error) {
        if (!error) self->Respond(make(nullptr));
      });
      const bool accepted =
          owner_->loop_ != nullptr && owner_->loop_->RequestView([owner, self, make](ControllerLoop::View view) {
            asio::post(owner->io_, [self, make, view = std::move(view)] { self->Respond(make(view.get())); });
          });
      if (!accepted) Respond(make(nullptr));
    }

   private:
    void Handle() {
      answered_ = false;
      const auto& request = parser_->get();
      if (request.method() != http::verb::get && request.method() != http::verb::head) {
        return Respond({http::status::method_not_allowed, "text/plain; charset=utf-8", "only GET and HEAD\n"});
      }
      const std::string target(request.target());
      owner_->Route(target, this);
    }

    void Written(beast::error_code error) {
      if (error || !response_.keep_alive()) {
        beast::error_code ignored;
        stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
        return;
      }
      Read();
    }

    beast::tcp_stream stream_;
    asio::steady_timer timer_;
    Impl* const owner_;
    beast::flat_buffer buffer_;
    std::optional<http::request_parser<http::string_body>> parser_;
    http::response<http::string_body> response_;
    std::optional<http::response_serializer<http::string_body>> serializer_;
    bool answered_ = false;
  };

  void Accept() {
    acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
      // Beyond the limit a connection is closed at once: the port is for a few scrapers and people.
      if (!error && connections_ < kOpsConnectionsMax) {
        std::make_shared<Connection>(std::move(socket), this)->Read();
      }
      if (error != asio::error::operation_aborted) Accept();
    });
  }

  void Route(const std::string& target, Connection* connection) {
    const std::string path = target.substr(0, target.find('?'));
    const bool verbose = target.find("?verbose") != std::string::npos;
    if (path == "/livez") return connection->Respond(Health(false, verbose));
    if (path == "/readyz") return connection->Respond(Health(true, verbose));
    if (path == "/metrics") {
      if (before_scrape_) before_scrape_();
      return connection->WithView([this](const ClusterView* view) {
        return Answer{http::status::ok, "text/plain; version=0.0.4; charset=utf-8", metrics_->Text(view)};
      });
    }
    if (path == "/") {
      return connection->WithView([](const ClusterView* view) {
        if (view == nullptr) {
          return Answer{http::status::service_unavailable, "text/plain; charset=utf-8", "the controller is not ready\n"};
        }
        return Answer{http::status::ok, "text/html; charset=utf-8", StatusPage(*view, SystemNow().wall)};
      });
    }
    connection->Respond({http::status::not_found, "text/plain; charset=utf-8",
                         "see /metrics, /livez, /readyz and /\n"});
  }

  Answer Health(bool ready, bool verbose) {
    const bool replayed = loop_ != nullptr;
    const bool accepting = replayed && loop_->ready();
    const bool turning = !replayed || SystemNow().instant - loop_->last_turn() < kLoopStallMax ||
                         (!accepting && loop_->last_turn() == Instant{});
    const bool good = turning && (!ready || accepting);
    std::string body = good ? "ok\n" : "not ok\n";
    if (verbose) {
      const auto line = [](const char* name, bool ok) { return fmt::format("[{}] {}\n", ok ? '+' : '-', name); };
      body = line("loop turned recently", turning);
      if (ready) body += line("ledger replayed", replayed) + line("loop accepts events", accepting);
    }
    return {good ? http::status::ok : http::status::service_unavailable, "text/plain; charset=utf-8", std::move(body)};
  }

  asio::io_context io_;
  tcp::acceptor acceptor_;
  Metrics* const metrics_;
  std::string address_;
  std::thread thread_;
  // Ops thread only, once it runs.
  ControllerLoop* loop_ = nullptr;
  std::function<void()> before_scrape_;
  size_t connections_ = 0;
};

OpsServer::OpsServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
OpsServer::~OpsServer() { Stop(); }

Result<std::unique_ptr<OpsServer>> OpsServer::Open(const std::string& address, Metrics* metrics) {
  auto impl = std::make_shared<Impl>(metrics);
  EVERSTEP_RETURN_IF_ERROR(impl->Open(address));
  impl->Start();
  return std::unique_ptr<OpsServer>(new OpsServer(std::move(impl)));
}

void OpsServer::Serve(ControllerLoop* loop, std::function<void()> before_scrape) {
  impl_->Serve(loop, std::move(before_scrape));
}
void OpsServer::Stop() { impl_->Stop(); }
const std::string& OpsServer::address() const { return impl_->address(); }

}  // namespace everstep
