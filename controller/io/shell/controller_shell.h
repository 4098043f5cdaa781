// The whole controller but for its command line: opens the data directory and the ledger, replays it, binds the sockets,
// starts the threads and wires loop, RPC, heartbeats, probes and the operations port together. Used by main and by tests
// that run a controller inside their process. Start and Stop on one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "everstep/v1/config.pb.h"
#include "proto/base/status.h"

namespace everstep {

struct ShellOptions {
  v1::ControllerConfig config;  // with its defaults, validated
  std::string version;
  std::string revision;
  // The ledger failed. Default: one loud line, and the process ends with code 1; jobs go on without a controller.
  std::function<void(const Status&)> on_ledger_failure;
};

class ControllerShell {
 public:
  // kFailedPrecondition: an address or the data directory can't be used; one line with the remedy · kDataLoss: the ledger
  // is damaged. Nothing is left running.
  static Result<std::unique_ptr<ControllerShell>> Start(ShellOptions options);
  virtual ~ControllerShell() = default;

  // Lets what was promised leave, ends calls and threads, closes the ledger. Idempotent.
  virtual void Stop() = 0;

  virtual const std::string& address() const = 0;            // of gRPC, as bound
  virtual const std::string& ops_address() const = 0;
  virtual const std::string& heartbeat_address() const = 0;  // told to agents
};

}  // namespace everstep
