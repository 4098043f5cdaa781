// The cost model: what a layout of a job on a cluster would cost in time, memory, traffic, energy and money. The one
// source of truth of every decision of the planner. A pure function of its inputs; immutable once made, thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "controller/core/planner/calibration.h"
#include "controller/core/planner/model.h"
#include "controller/core/planner/schedule.h"
#include "controller/core/planner/tables.h"
#include "proto/base/status.h"

namespace everstep::planner {

// A layer's costs per sample. Work in FLOP (transformers) or in seconds on a device of speed 1 (profiles).
struct LayerCost {
  std::string name;
  double forward = 0, backward = 0;      // backward with what is computed again
  double parameters = 0;
  double output_bytes = 0;
  double kept_bytes = 0;                 // from forward to backward, on each device of a tensor-parallel group
  double kept_split_bytes = 0;           // the same, divided over the group
  double tensor_bytes = 0;               // of one all-reduce inside the group
  int32_t forward_reduces = 0, backward_reduces = 0;
};

// The layers of a job. kInvalidArgument: see Validate.
std::vector<LayerCost> MakeLayers(const Job& job);
double CountParameters(const TransformerModel& model);

// `tp` neighbouring devices of one server: what one stage of one replica runs on.
struct Slot {
  int32_t server = 0;                    // index in the cluster
  int32_t device = 0;                    // the first
  bool operator==(const Slot&) const = default;
};

struct Layout {
  int32_t data_parallel = 1, tensor_parallel = 1, pipeline_stages = 1;
  int32_t micro_batch = 1;               // samples
  std::vector<int32_t> bounds;           // stage s holds layers bounds[s] to bounds[s + 1]
  std::vector<Slot> slots;               // replica * pipeline_stages + stage
  std::vector<int64_t> shares;           // micro-batches of each replica; empty: the model cuts them

  size_t At(int32_t replica, int32_t stage) const { return static_cast<size_t>(replica * pipeline_stages + stage); }
};

// Where the step's time goes, on the replica and stage that end last; the sum is the step.
struct TimeParts {
  double compute = 0;
  double tensor = 0;                     // collectives inside tensor-parallel groups
  double transfer = 0;                   // between stages, as far as the schedule does not hide it
  double bubble = 0;                     // filling and draining the pipeline
  double reduce = 0;                     // gradient all-reduce that backward does not hide
  double update = 0;                     // optimizer
};

struct StageCost {
  double memory_needed = 0, memory_limit = 0;
  int32_t memory_server = -1;            // that has the limit
  double reduce_seconds = 0, reduce_exposed = 0, update_seconds = 0;
  double reduce_bytes = 0;               // that each rank sends in one step
  double transfer_bytes = 0;             // to the next stage in one step, over all replicas
  int32_t domains = 0;                   // failure domains over which its replicas spread
  std::vector<int32_t> ring;             // replicas in the order of the ring
  std::vector<int32_t> bucket_ends;      // in the order of backward
};

enum class Verdict { kFits, kOverMemory, kUnconnected, kTooFewMicroBatches };

struct Evaluation {
  Verdict verdict = Verdict::kFits;
  int32_t stage = -1;                    // that does not fit or connect
  double step_seconds = 0;
  TimeParts parts;
  std::vector<int64_t> shares;
  std::vector<StageCost> stages;
  double joules = 0;                     // one step
  double price = 0;                      // one step
  int32_t servers_used = 0;
  int32_t domains_min = 0;               // the least of any stage
};

class CostModel {
 public:
  // A server as the model sees it. Servers of one class cost the same.
  struct ServerCost {
    double rate = 0;                     // work per second of one device
    double memory = 0;
    double link_bandwidth = 0, link_latency = 0;
    double network = 0;
    double memory_bandwidth = 0;
    double watts_max = 0, watts_idle = 0, price = 0;
    int32_t devices = 0;
    int32_t rack = 0, leaf = 0, domain = 0;
    int32_t kind = 0;                    // number of its class
    bool usable = true;                  // not forbidden, device fit for the precision
  };

  // kInvalidArgument: see Validate (validate.h), which runs first.
  static Result<CostModel> Create(const Cluster& cluster, const Job& job, const Tables& tables,
                                  const Calibration& calibration);

  const Cluster& cluster() const { return cluster_; }
  const Job& job() const { return job_; }
  const std::vector<LayerCost>& layers() const { return layers_; }
  const std::vector<ServerCost>& servers() const { return servers_; }
  int32_t layer_count() const { return static_cast<int32_t>(layers_.size()); }
  int32_t domain_count() const { return domain_count_; }
  // Tensor-parallel widths that the job's heads admit.
  bool Splits(int32_t tensor_parallel) const;

  // Bandwidth and latency between two different servers, network cards included. Bandwidth 0: they do not connect.
  LinkTier Link(int32_t a, int32_t b) const;
  bool has_link_overrides() const { return !overrides_.empty(); }

  // Time of layers [begin, end) for one micro-batch on a slot of this server, transfers left out.
  StageTimes RunTimes(int32_t server, int32_t tensor_parallel, int32_t micro_batch, int32_t begin, int32_t end) const;
  double TransferTime(int32_t from, int32_t to, int32_t tensor_parallel, int32_t micro_batch, int32_t boundary) const;
  // Bytes that a rank of this stage needs on its device, with `in_flight` micro-batches kept.
  double MemoryNeeded(const Layout& layout, int32_t stage, int32_t begin, int32_t end, int64_t micro_batches) const;
  double StateBytes(int32_t begin, int32_t end) const;       // of one replica: weights and optimizer
  double StateBytesPerParameter() const { return job_.weight_bytes + job_.optimizer_bytes; }

  // exact: replicas' times by the recurrence, not the closed form. REQUIRES: a layout with consistent sizes.
  Evaluation Evaluate(const Layout& layout, bool exact) const;

 private:
  CostModel() = default;
  void MakeServers(const Tables& tables, const Calibration& calibration);
  struct ReplicaCost;
  ReplicaCost CostOfReplica(const Layout& layout, int32_t replica) const;
  void Reduce(const Layout& layout, int32_t stage, const std::vector<int32_t>& stages_on_server, Evaluation* out) const;

  Cluster cluster_;
  Job job_;
  std::vector<LayerCost> layers_;
  std::vector<ServerCost> servers_;
  std::map<std::pair<int32_t, int32_t>, LinkTier> overrides_;
  double network_ratio_ = 1;
  int32_t domain_count_ = 0;
  double transient_bytes_ = 0;           // per sample, of one layer that is computed again
  // Prefix sums over layers.
  std::vector<double> forward_, backward_, parameters_, kept_, kept_split_, tensor_forward_, tensor_backward_;
  std::vector<int32_t> reduces_forward_, reduces_backward_;
};

}  // namespace everstep::planner
