// The HTTP operations port: /metrics, /livez, /readyz (?verbose), and a page for people at /. One thread; answers that
// need the cluster's view wait for the loop without blocking it. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "controller/io/loop/controller_loop.h"
#include "controller/io/ops/metrics.h"
#include "proto/base/status.h"

namespace everstep {

inline constexpr size_t kOpsConnectionsMax = 128;
inline constexpr Duration kOpsTimeout = Seconds(10);      // of one request, reading and writing
inline constexpr Duration kOpsViewTimeout = Seconds(2);   // how long an answer waits for the loop
inline constexpr Duration kLoopStallMax = Seconds(5);     // a loop that hasn't turned for this long is not alive

class OpsServer {
 public:
  // Binds and answers; until Serve, /readyz says 503. kFailedPrecondition: it can't be bound; one line that names the
  // address and the remedy.
  static Result<std::unique_ptr<OpsServer>> Open(const std::string& address, Metrics* metrics);
  ~OpsServer();

  // `before_scrape` brings counters that are kept elsewhere into the metrics.
  void Serve(ControllerLoop* loop, std::function<void()> before_scrape);
  void Stop();
  const std::string& address() const;  // as bound

 private:
  class Impl;
  explicit OpsServer(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace everstep
