// What the planner reads: the cluster, the job, the limits. Immutable plain data; whoever calls the planner (controller
// core, command line, benches) fills it in. Bytes, seconds, FLOP and watts, no other units. Thread-compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/ids.h"

namespace everstep::planner {

enum class Precision { kBf16, kFp16, kFp32 };
enum class Recompute { kNone, kSelective, kFull };
enum class Objective { kThroughput, kCost, kEnergy };
enum class Spread { kPreferred, kRequired, kOff };  // replicas of one stage over failure domains

// A row of the device table.
struct DeviceModel {
  std::string name;
  double memory_bytes = 0;
  double half_flops = 0;         // dense, 16 bit
  double float_flops = 0;        // 32 bit
  bool bf16 = true;
  double memory_bandwidth = 0;
  double link_bandwidth = 0;     // one direction, between two devices of one server
  double watts_max = 0;
  double watts_idle = 0;
  double efficiency = 1;         // share of the dense rate that a wide layer reaches
  std::string source;
};

// A row of the model table.
struct TransformerModel {
  std::string name;
  int32_t layers = 0;
  int32_t hidden = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t ffn = 0;
  int32_t vocabulary = 0;        // 0: the blocks alone, without embedding and head
  bool gated = false;
  bool tied = true;
  int32_t positions = 0;
  std::string source;
};

struct PlanServer {
  ServerId id;
  std::string device;            // name in the device table
  int32_t devices = 1;
  double speed = 1;              // measured, relative to the device table
  double memory_bytes = 0;       // of one device; 0: the table's
  double link_bandwidth = 0;     // inside the server; 0: the table's
  double link_latency = 3e-6;
  double network_bandwidth = 0;  // one direction, all cards of the server together
  std::string rack, leaf, failure_domain;
  double watts_max = 0;          // of one device; 0: the table's
  double price_per_hour = 0;     // of the server; 0: one unit for each device
};

// Between two servers: the nearest tier that holds both. bandwidth 0: only the network cards limit.
struct LinkTier {
  double bandwidth = 0;
  double latency = 10e-6;
};
struct LinkOverride {
  ServerId a, b;
  double bandwidth = 0;          // 0: these two do not reach each other
  double latency = 10e-6;
};

struct Cluster {
  std::vector<PlanServer> servers;
  LinkTier rack, leaf, spine;
  std::vector<LinkOverride> links;
};

// One layer of a measured profile, per sample. Times on a device of speed 1 (of `reference_device`, when given).
struct LayerProfile {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double parameters = 0;
  double output_bytes = 0;       // handed to the next layer
  double kept_bytes = 0;         // kept from forward to backward
};

struct Job {
  std::string name;
  // Exactly one of these two.
  TransformerModel transformer;  // layers > 0
  std::vector<LayerProfile> profile;
  std::string reference_device;  // of the profile

  int32_t sequence_length = 2048;
  int64_t global_batch = 0;      // samples in one step; never changed by a plan
  int32_t micro_batch_min = 1;
  int32_t micro_batch_max = 8;
  Precision precision = Precision::kBf16;
  Recompute recompute = Recompute::kNone;
  bool sequence_parallel = false;
  bool shard_optimizer = false;  // over the replicas of a stage
  double weight_bytes = 2;       // per parameter
  double gradient_bytes = 4;
  double optimizer_bytes = 12;
  int32_t interleave = 1;        // model chunks on each device
  double reserve_bytes = 1.0 * (1 << 30);  // for contexts, buffers of communicators, fragments

  int32_t servers_min = 1;
  int32_t servers_max = 0;       // 0: any number
  int32_t tensor_parallel = 0;   // 0: free
  int32_t pipeline_stages = 0;   // 0: free
  int32_t data_parallel = 0;     // 0: free
  std::vector<ServerId> pinned;     // must take part
  std::vector<ServerId> forbidden;  // must not
  Objective objective = Objective::kThroughput;
  Spread spread = Spread::kPreferred;
};

// Bounds on sizes; validation refuses what is beyond them.
inline constexpr int32_t kServersMax = 16384;
inline constexpr int32_t kDevicesPerServerMax = 64;
inline constexpr int32_t kLayersMax = 1024;
inline constexpr int32_t kStagesMax = 256;
inline constexpr int64_t kGlobalBatchMax = int64_t{1} << 24;

}  // namespace everstep::planner
