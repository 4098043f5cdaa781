// The controller's metrics (docs/metrics.md). Counters and histograms live here; gauges are made from the view at each
// scrape, so that a job's labels go when it ends. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/core/effect.h"
#include "controller/core/view/view.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep {

class Metrics {
 public:
  Metrics(const std::string& version, const std::string& revision);
  ~Metrics();

  void Measure(const Measured& measured);
  void StepTook(Duration duration);
  void AppendTook(Duration duration);
  void QueueLengthIs(size_t length);
  void RpcHandled(const char* method, StatusCode code);
  // Datagrams that were thrown away, by kind: "unknown_key", "forged", "malformed". Counted as stale messages.
  void DatagramsDropped(const char* kind, uint64_t total);

  // Prometheus text format 0.0.4. `view` may be null: then the gauges of the cluster are left out.
  std::string Text(const ClusterView* view) const;

  // One line per metric, for docs/metrics.md: name, type, labels, help.
  struct Description { std::string name; std::string type; std::string labels; std::string help; };
  static std::vector<Description> Describe();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep
