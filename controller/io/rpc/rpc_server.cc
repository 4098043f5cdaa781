#include "controller/io/rpc/rpc_server.h"

#include <fmt/format.h>
#include <grpc/support/log.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "controller/io/rpc/admin_service.h"
#include "controller/io/rpc/agent_sessions.h"

namespace everstep {
namespace {

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host.rfind("127.", 0) == 0 || host == "::1" || host == "[::1]";
}

// The one place that knows how connections are protected.
Result<std::shared_ptr<grpc::ServerCredentials>> Credentials(const RpcOptions& options) {
  const std::string host = options.address.substr(0, options.address.rfind(':'));
  if (!options.allow_insecure && !IsLoopback(host)) {
    return FailedPrecondition(fmt::format("listen address {} is not loopback, and connections are not encrypted; "
                                          "listen on 127.0.0.1 or set allow_insecure", options.address));
  }
  return grpc::InsecureServerCredentials();
}

class RpcServerImpl : public RpcServer {
 public:
  explicit RpcServerImpl(const RpcOptions& options) : agents_(options), admin_(options) {}
  ~RpcServerImpl() override { Stop(); }

  Status Build(const RpcOptions& options) {
    EVERSTEP_ASSIGN_OR_RETURN(const auto credentials, Credentials(options));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(options.address, credentials, &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a port in use must be an error
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
    builder.SetMaxReceiveMessageSize(options.message_bytes_max);
    builder.SetMaxSendMessageSize(options.message_bytes_max);
    builder.RegisterService(&agents_);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      server_.reset();
      return FailedPrecondition(fmt::format("listen address {} cannot be bound: it is in use or not of this machine; "
                                            "choose another with --listen", options.address));
    }
    server_->GetHealthCheckService()->SetServingStatus(false);
    address_ = fmt::format("{}:{}", options.address.substr(0, options.address.rfind(':')), port);
    return OkStatus();
  }

  void Serve(Parts parts) override {
    parts_ = std::move(parts);
    agents_.Serve(&parts_);
    admin_.Serve(&parts_);
    server_->GetHealthCheckService()->SetServingStatus(true);
  }

  void Stop() override {
    if (server_ == nullptr || stopped_.exchange(true)) return;
    server_->GetHealthCheckService()->SetServingStatus(false);
    agents_.CancelAll();
    admin_.CancelAll();
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
    admin_.StopTasks();
  }

  void Send(const SendCommand& effect) override { agents_.Send(effect); }
  void Close(const CloseSession& effect) override { agents_.Close(effect); }
  void Reply(const ReplyToOperator& effect) override { admin_.Reply(effect); }
  const std::string& address() const override { return address_; }
  int agents_connected() const override { return agents_.count(); }

 private:
  Parts parts_;
  AgentSessions agents_;
  AdminServiceImpl admin_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::atomic<bool> stopped_{false};
};

}  // namespace

Result<std::unique_ptr<RpcServer>> RpcServer::Open(const RpcOptions& options) {
  // gRPC writes lines of its own for what we report as a status.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) {
    gpr_set_log_function([](gpr_log_func_args*) {});
  }
  auto server = std::make_unique<RpcServerImpl>(options);
  EVERSTEP_RETURN_IF_ERROR(server->Build(options));
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace everstep
