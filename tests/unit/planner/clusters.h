// Clusters and jobs for the planner's tests: small builders, and random ones that are functions of their number.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "controller/core/planner/plan.h"
#include "proto/base/prng.h"

namespace everstep::planner {

inline PlanServer MakeServer(const std::string& name, const std::string& device, int devices, double network = 100e9) {
  PlanServer s;
  s.id = ServerId(name);
  s.device = device;
  s.devices = devices;
  s.network_bandwidth = network;
  return s;
}

inline Cluster Alike(int count, const std::string& device, int devices, double network = 100e9) {
  Cluster cluster;
  for (int i = 0; i < count; ++i) {
    PlanServer s = MakeServer("s" + std::to_string(i), device, devices, network);
    s.rack = "r" + std::to_string(i / 4);
    s.leaf = "l" + std::to_string(i / 16);
    s.failure_domain = s.rack;
    cluster.servers.push_back(s);
  }
  return cluster;
}

inline Job NamedJob(const std::string& model, int64_t global_batch) {
  Job job;
  job.name = model;
  job.transformer = *BuiltInTables().FindModel(model);
  job.sequence_length = 2048;
  job.global_batch = global_batch;
  job.recompute = Recompute::kFull;
  return job;
}

// Layers of one work each unit, in milliseconds.
inline Job ProfileJob(const std::vector<double>& milliseconds, int64_t global_batch, double output_bytes = 1e5) {
  Job job;
  job.name = "profile";
  for (const double ms : milliseconds) job.profile.push_back({ms / 3e3, ms * 2 / 3e3, 1e6, output_bytes, 1e6});
  job.global_batch = global_batch;
  job.micro_batch_max = 1;
  job.reserve_bytes = 0;
  return job;
}

// A hundred kinds of clusters: sizes, models, speeds, memory, racks, links, bad luck.
inline Cluster RandomCluster(Prng& prng) {
  static const char* const kDevices[] = {"A100-80", "A100-40", "V100-32", "H100", "L40S", "T4", "B200"};
  Cluster cluster;
  const auto count = prng.Between(1, 10);
  const auto kinds = prng.Between(1, 3);
  for (int64_t i = 0; i < count; ++i) {
    PlanServer s = MakeServer("n" + std::to_string(i), kDevices[prng.Between(0, 6) % (kinds * 2)], 1 << prng.Between(0, 3),
                              static_cast<double>(prng.Between(1, 50)) * 1e9);
    if (prng.Chance(1, 3)) s.speed = static_cast<double>(prng.Between(30, 120)) / 100;
    if (prng.Chance(1, 6)) s.memory_bytes = static_cast<double>(prng.Between(4, 60)) * (1 << 30);
    s.rack = "r" + std::to_string(prng.Between(0, 3));
    s.leaf = "l" + std::to_string(prng.Between(0, 1));
    if (prng.Chance(1, 2)) s.failure_domain = s.rack;
    cluster.servers.push_back(s);
  }
  if (prng.Chance(1, 2)) cluster.spine.bandwidth = static_cast<double>(prng.Between(1, 20)) * 1e9;
  if (count > 2 && prng.Chance(1, 3)) {
    cluster.links.push_back({cluster.servers[0].id, cluster.servers[1].id,
                             prng.Chance(1, 4) ? 0 : static_cast<double>(prng.Between(1, 9)) * 1e8});
  }
  return cluster;
}

inline Job RandomJob(Prng& prng, const Cluster& cluster) {
  static const char* const kModels[] = {"bert-large", "gpt2-xl", "gpt3-2.7b", "gpt3-13b", "llama2-7b", "llama3-70b"};
  Job job;
  if (prng.Chance(1, 3)) {
    std::vector<double> layers;
    for (int64_t i = prng.Between(1, 20); i > 0; --i) layers.push_back(static_cast<double>(prng.Between(1, 50)));
    job = ProfileJob(layers, prng.Between(1, 64));
    if (prng.Chance(1, 3)) job.reference_device = "A100-40";
    for (LayerProfile& l : job.profile) l.parameters = static_cast<double>(prng.Between(1, 400)) * 1e6;
  } else {
    job = NamedJob(kModels[prng.Between(0, 5)], prng.Between(1, 64));
    job.sequence_length = 512 << prng.Between(0, 3);
    job.recompute = static_cast<Recompute>(prng.Between(0, 2));
    job.sequence_parallel = prng.Chance(1, 3);
  }
  job.micro_batch_max = static_cast<int32_t>(prng.Between(1, 4));
  job.precision = static_cast<Precision>(prng.Between(0, 2));
  job.shard_optimizer = prng.Chance(1, 3);
  job.objective = static_cast<Objective>(prng.Between(0, 2));
  job.spread = static_cast<Spread>(prng.Between(0, 2));
  if (prng.Chance(1, 6)) job.interleave = 2;
  if (prng.Chance(1, 5)) job.tensor_parallel = 1 << prng.Between(0, 3);
  if (prng.Chance(1, 5)) job.pipeline_stages = static_cast<int32_t>(prng.Between(1, 6));
  if (prng.Chance(1, 6)) job.data_parallel = static_cast<int32_t>(prng.Between(1, 4));
  if (prng.Chance(1, 5)) job.servers_min = static_cast<int32_t>(prng.Between(1, 4));
  if (prng.Chance(1, 5)) job.servers_max = static_cast<int32_t>(prng.Between(job.servers_min, 6));
  if (prng.Chance(1, 6)) job.pinned = {cluster.servers[prng.UpTo(cluster.servers.size() - 1)].id};
  if (prng.Chance(1, 6)) {
    const ServerId id = cluster.servers[prng.UpTo(cluster.servers.size() - 1)].id;
    if (job.pinned.empty() || job.pinned[0] != id) job.forbidden = {id};
  }
  return job;
}

}  // namespace everstep::planner
