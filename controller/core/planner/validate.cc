#include "controller/core/planner/validate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>

namespace everstep::planner {
namespace {

Status InRange(double value, double least, double most, const std::string& what) {
  if (std::isfinite(value) && value >= least && value <= most) return OkStatus();
  return InvalidArgument(fmt::format("{} is {}; it must be from {} to {}", what, value, least, most));
}

constexpr double kBandwidthMax = 1e14;
constexpr double kBytesMax = 1e16;

Status CheckServer(const PlanServer& s, const Tables& tables, size_t servers) {
  if (s.id.empty()) return InvalidArgument("a server has no name");
  const std::string name = fmt::format("server {}", s.id.value);
  if (tables.FindDevice(s.device) == nullptr) {
    return InvalidArgument(fmt::format("{}: device \"{}\" is in no table", name, s.device));
  }
  EVERSTEP_RETURN_IF_ERROR(InRange(s.devices, 1, kDevicesPerServerMax, name + ": devices"));
  EVERSTEP_RETURN_IF_ERROR(InRange(s.speed, 1e-4, 1e4, name + ": speed"));
  EVERSTEP_RETURN_IF_ERROR(InRange(s.memory_bytes, 0, kBytesMax, name + ": memory"));
  EVERSTEP_RETURN_IF_ERROR(InRange(s.link_bandwidth, 0, kBandwidthMax, name + ": link bandwidth"));
  EVERSTEP_RETURN_IF_ERROR(InRange(s.link_latency, 0, 1, name + ": link latency"));
  EVERSTEP_RETURN_IF_ERROR(
      InRange(s.network_bandwidth, servers > 1 ? 1 : 0, kBandwidthMax, name + ": network bandwidth (bytes/s)"));
  EVERSTEP_RETURN_IF_ERROR(InRange(s.watts_max, 0, 1e5, name + ": watts"));
  return InRange(s.price_per_hour, 0, 1e9, name + ": price");
}

// All servers that may be used must reach each other: a plan may put neighbours of a ring anywhere.
Status CheckConnected(const Cluster& cluster, const std::set<ServerId>& forbidden) {
  for (const auto& [name, tier] : {std::pair("rack", &cluster.rack), {"leaf", &cluster.leaf}, {"spine", &cluster.spine}}) {
    EVERSTEP_RETURN_IF_ERROR(InRange(tier->bandwidth, 0, kBandwidthMax, fmt::format("network {}: bandwidth", name)));
    EVERSTEP_RETURN_IF_ERROR(InRange(tier->latency, 0, 1, fmt::format("network {}: latency", name)));
  }
  std::map<ServerId, std::set<ServerId>> cut;
  std::set<ServerId> known;
  for (const PlanServer& s : cluster.servers) known.insert(s.id);
  for (const LinkOverride& link : cluster.links) {
    if (!known.contains(link.a) || !known.contains(link.b) || link.a == link.b) {
      return InvalidArgument(fmt::format("link {} - {}: both ends must be different servers of the cluster", link.a.value,
                                         link.b.value));
    }
    const std::string name = fmt::format("link {} - {}", link.a.value, link.b.value);
    EVERSTEP_RETURN_IF_ERROR(InRange(link.bandwidth, 0, kBandwidthMax, name + ": bandwidth"));
    EVERSTEP_RETURN_IF_ERROR(InRange(link.latency, 0, 1, name + ": latency"));
    if (link.bandwidth == 0) {
      cut[link.a].insert(link.b);
      cut[link.b].insert(link.a);
    }
  }
  if (cut.empty()) return OkStatus();
  std::set<ServerId> unseen;
  for (const ServerId& id : known) {
    if (!forbidden.contains(id)) unseen.insert(id);
  }
  if (unseen.empty()) return OkStatus();
  std::vector<ServerId> todo = {*unseen.begin()};
  const ServerId first = todo[0];
  unseen.erase(unseen.begin());
  while (!todo.empty()) {
    const ServerId at = todo.back();
    todo.pop_back();
    for (auto it = unseen.begin(); it != unseen.end();) {
      if (cut.contains(at) && cut.at(at).contains(*it)) {
        ++it;
        continue;
      }
      todo.push_back(*it);
      it = unseen.erase(it);
    }
  }
  if (unseen.empty()) return OkStatus();
  return InvalidArgument(fmt::format("server {} cannot be reached from {}: the network falls into parts; forbid one of them",
                                     unseen.begin()->value, first.value));
}

Status CheckWork(const Job& job, const Tables& tables) {
  if ((job.transformer.layers > 0) == !job.profile.empty()) {
    return InvalidArgument("job: give either a transformer or a profile of layers");
  }
  if (job.transformer.layers > 0) {
    const TransformerModel& m = job.transformer;
    EVERSTEP_RETURN_IF_ERROR(InRange(m.layers, 1, kLayersMax, "job: layers"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.hidden, 1, 1 << 20, "job: hidden"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.heads, 1, 1 << 16, "job: heads"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.kv_heads, 1, m.heads, "job: kv_heads"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.ffn, 1, 1 << 24, "job: ffn"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.vocabulary, 0, 1 << 24, "job: vocabulary"));
    EVERSTEP_RETURN_IF_ERROR(InRange(m.positions, 0, 1 << 24, "job: positions"));
    EVERSTEP_RETURN_IF_ERROR(InRange(job.sequence_length, 1, 1 << 24, "job: sequence_length"));
    return OkStatus();
  }
  EVERSTEP_RETURN_IF_ERROR(InRange(static_cast<double>(job.profile.size()), 1, kLayersMax, "job: number of layers"));
  double total = 0;
  for (size_t i = 0; i < job.profile.size(); ++i) {
    const LayerProfile& l = job.profile[i];
    const std::string name = fmt::format("job: layer {}", i);
    EVERSTEP_RETURN_IF_ERROR(InRange(l.forward_seconds, 0, 1e6, name + ": forward_seconds"));
    EVERSTEP_RETURN_IF_ERROR(InRange(l.backward_seconds, 0, 1e6, name + ": backward_seconds"));
    EVERSTEP_RETURN_IF_ERROR(InRange(l.parameters, 0, 1e14, name + ": parameters"));
    EVERSTEP_RETURN_IF_ERROR(InRange(l.output_bytes, 0, kBytesMax, name + ": output_bytes"));
    EVERSTEP_RETURN_IF_ERROR(InRange(l.kept_bytes, 0, kBytesMax, name + ": kept_bytes"));
    total += l.forward_seconds + l.backward_seconds;
  }
  if (total <= 0) return InvalidArgument("job: no layer takes any time");
  if (!job.reference_device.empty() && tables.FindDevice(job.reference_device) == nullptr) {
    return InvalidArgument(fmt::format("job: reference device \"{}\" is in no table", job.reference_device));
  }
  return OkStatus();
}

Status CheckJob(const Job& job, const std::set<ServerId>& known, const Tables& tables) {
  EVERSTEP_RETURN_IF_ERROR(CheckWork(job, tables));
  EVERSTEP_RETURN_IF_ERROR(InRange(static_cast<double>(job.global_batch), 1, kGlobalBatchMax, "job: global_batch"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.micro_batch_min, 1, 1 << 16, "job: micro_batch_min"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.micro_batch_max, job.micro_batch_min, 1 << 16, "job: micro_batch_max"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.weight_bytes, 0.1, 64, "job: weight_bytes"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.gradient_bytes, 0.1, 64, "job: gradient_bytes"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.optimizer_bytes, 0, 256, "job: optimizer_bytes"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.interleave, 1, 64, "job: interleave"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.reserve_bytes, 0, kBytesMax, "job: reserve_bytes"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.servers_min, 1, kServersMax, "job: servers_min"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.servers_max, 0, kServersMax, "job: servers_max"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.tensor_parallel, 0, kDevicesPerServerMax, "job: tensor_parallel"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.pipeline_stages, 0, kStagesMax, "job: pipeline_stages"));
  EVERSTEP_RETURN_IF_ERROR(InRange(job.data_parallel, 0, 1 << 20, "job: data_parallel"));
  if (job.servers_max > 0 && job.servers_max < job.servers_min) {
    return InvalidArgument(fmt::format("job: servers_max {} is below servers_min {}", job.servers_max, job.servers_min));
  }
  if (job.micro_batch_min > job.global_batch) {
    return InvalidArgument(fmt::format("job: micro_batch_min {} is above global_batch {}", job.micro_batch_min,
                                       job.global_batch));
  }
  const std::set<ServerId> forbidden(job.forbidden.begin(), job.forbidden.end());
  for (const auto& [list, what] : {std::pair(&job.pinned, "pinned"), {&job.forbidden, "forbidden"}}) {
    for (const ServerId& id : *list) {
      if (!known.contains(id)) return InvalidArgument(fmt::format("job: {} server {} is not in the cluster", what, id.value));
    }
  }
  for (const ServerId& id : job.pinned) {
    if (forbidden.contains(id)) return InvalidArgument(fmt::format("job: server {} is pinned and forbidden", id.value));
  }
  return OkStatus();
}

}  // namespace

Status Validate(const Cluster& cluster, const Job& job, const Tables& tables) {
  if (cluster.servers.empty()) return InvalidArgument("the cluster has no server");
  if (cluster.servers.size() > static_cast<size_t>(kServersMax)) {
    return InvalidArgument(fmt::format("{} servers; at most {} are planned for", cluster.servers.size(), kServersMax));
  }
  std::set<ServerId> known;
  for (const PlanServer& s : cluster.servers) {
    EVERSTEP_RETURN_IF_ERROR(CheckServer(s, tables, cluster.servers.size()));
    if (!known.insert(s.id).second) return InvalidArgument(fmt::format("server {} is there twice", s.id.value));
  }
  EVERSTEP_RETURN_IF_ERROR(CheckJob(job, known, tables));
  return CheckConnected(cluster, std::set<ServerId>(job.forbidden.begin(), job.forbidden.end()));
}

}  // namespace everstep::planner
