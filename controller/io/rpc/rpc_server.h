// The gRPC door of the controller: agents' sessions, the admin service, health. Calls become events of the loop; the
// loop's effects come back through Send, Close and Reply, which never block. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "controller/core/effect.h"
#include "controller/io/heartbeat/heartbeat_keys.h"
#include "controller/io/loop/controller_loop.h"
#include "controller/io/loop/watch.h"
#include "everstep/v1/admin.pb.h"
#include "proto/base/status.h"

namespace everstep {

struct RpcOptions {
  std::string address;                  // host:port; port 0: any
  bool allow_insecure = false;          // addresses other than loopback without TLS
  size_t sessions_max = 20000;
  size_t calls_max = 1000;              // operator calls that wait for an answer
  size_t commands_queued_max = 10000;   // per session; a session that can't keep up is ended
  int message_bytes_max = 64 << 20;
};

class RpcServer {
 public:
  struct Parts {
    ControllerLoop* loop = nullptr;
    HeartbeatKeys* keys = nullptr;
    WatchHub* watches = nullptr;
    std::function<void(v1::GetConfigResponse*)> describe_config;
    std::function<void(v1::GetControllerInfoResponse*)> describe_controller;
    std::function<void(const char* method, StatusCode code)> handled;  // may be null
  };

  // Binds and serves. kFailedPrecondition: the address can't be bound, or may not be served without TLS; one line that
  // names it and the remedy.
  static Result<std::unique_ptr<RpcServer>> Open(const RpcOptions& options);
  virtual ~RpcServer() = default;

  // Before this, calls are answered UNAVAILABLE and health says NOT_SERVING. Once.
  virtual void Serve(Parts parts) = 0;
  // Ends all calls and waits for them. Health says NOT_SERVING from the start of it. Idempotent.
  virtual void Stop() = 0;

  virtual void Send(const SendCommand& effect) = 0;
  virtual void Close(const CloseSession& effect) = 0;
  virtual void Reply(const ReplyToOperator& effect) = 0;

  virtual const std::string& address() const = 0;  // as bound
  virtual int agents_connected() const = 0;
};

}  // namespace everstep
