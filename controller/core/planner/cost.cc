#include "controller/core/planner/cost.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "controller/core/planner/exact.h"
#include "controller/core/planner/validate.h"

namespace everstep::planner {
namespace {

// Narrow layers reach less of a device's rate: efficiency * hidden / (hidden + kWidthHalf). Fitted together with the
// efficiency of A100 (docs/planner.md).
constexpr double kWidthHalf = 900;
// Of the table's bandwidth between devices, what collectives reach. Measured bandwidths are taken as they are.
constexpr double kLinkEfficiency = 0.8;
// An optimizer step reads and writes its state, the gradient and the weights about once each.
constexpr double kUpdatePasses = 2;

double ElementBytes(Precision precision) { return precision == Precision::kFp32 ? 4 : 2; }

// FLOP of the matrix products of one block's forward pass, and of attention's two products alone, for one sample.
struct BlockWork {
  double all = 0, attention = 0;
};
BlockWork ForwardWork(const TransformerModel& m, double s) {
  const double h = m.hidden;
  const double shared = static_cast<double>(m.kv_heads) / m.heads;
  const double attention = 4 * s * s * h;
  const double dense = 2 * s * h * h * (2 + 2 * shared) + 2 * s * h * m.ffn * (m.gated ? 3 : 2);
  return {dense + attention, attention};
}

double BlockParameters(const TransformerModel& m) {
  const double h = m.hidden;
  const double shared = static_cast<double>(m.kv_heads) / m.heads;
  const double matrices = h * h * (2 + 2 * shared) + h * m.ffn * (m.gated ? 3 : 2);
  return matrices + (m.gated ? 2 * h : 9 * h + m.ffn);  // norms, and biases where there are any
}

// Bytes that one block keeps of one sample. `everywhere` is what a tensor-parallel group does not divide.
struct BlockKept {
  double everywhere = 0, split = 0, scores = 0;
};
BlockKept KeptByBlock(const TransformerModel& m, double s, double element) {
  const double h = m.hidden;
  const double shared = static_cast<double>(m.kv_heads) / m.heads;
  const double scale = element / 2;
  BlockKept kept;
  kept.everywhere = scale * 10 * s * h;
  // Queries, keys, values, the attention's result, and the inner layers of the feed-forward part.
  kept.split = scale * s * (h * (2 + 4 * shared) + 2 * h + (m.gated ? 6.0 : 4.0) * m.ffn);
  kept.scores = scale * 5 * m.heads * s * s;
  return kept;
}

LayerCost Block(const Job& job, int32_t index) {
  const TransformerModel& m = job.transformer;
  const double s = job.sequence_length;
  const double element = ElementBytes(job.precision);
  const BlockWork work = ForwardWork(m, s);
  const BlockKept kept = KeptByBlock(m, s, element);
  LayerCost layer;
  layer.name = fmt::format("block {}", index);
  layer.forward = work.all;
  layer.backward = 2 * work.all;
  layer.parameters = BlockParameters(m);
  layer.output_bytes = element * s * m.hidden;
  layer.tensor_bytes = layer.output_bytes;
  layer.forward_reduces = 2;
  layer.backward_reduces = 2;
  switch (job.recompute) {
    case Recompute::kNone:
      layer.kept_bytes = kept.everywhere;
      layer.kept_split_bytes = kept.split + kept.scores;
      break;
    case Recompute::kSelective:
      layer.backward += work.attention;
      layer.kept_bytes = kept.everywhere;
      layer.kept_split_bytes = kept.split;
      break;
    case Recompute::kFull:
      layer.backward += work.all;
      layer.backward_reduces += 2;
      layer.kept_bytes = layer.output_bytes;  // its input
      break;
  }
  if (job.sequence_parallel) {
    layer.kept_split_bytes += layer.kept_bytes;
    layer.kept_bytes = 0;
  }
  return layer;
}

std::vector<double> Sums(const std::vector<LayerCost>& layers, double LayerCost::*field) {
  std::vector<double> sums(layers.size() + 1, 0);
  for (size_t i = 0; i < layers.size(); ++i) sums[i + 1] = sums[i] + layers[i].*field;
  return sums;
}

double RingTime(int32_t members, double bytes, double bandwidth, double latency) {
  if (members < 2) return 0;
  return 2.0 * (members - 1) / members * bytes / bandwidth + 2.0 * (members - 1) * latency;
}

}  // namespace

double CountParameters(const TransformerModel& m) {
  const double embedding = static_cast<double>(m.vocabulary) * m.hidden;
  return m.layers * BlockParameters(m) + embedding * (m.tied ? 1 : 2) + static_cast<double>(m.positions) * m.hidden;
}

std::vector<LayerCost> MakeLayers(const Job& job) {
  std::vector<LayerCost> layers;
  for (size_t i = 0; i < job.profile.size(); ++i) {
    const LayerProfile& p = job.profile[i];
    LayerCost layer;
    layer.name = fmt::format("layer {}", i);
    layer.forward = p.forward_seconds;
    layer.backward = p.backward_seconds;
    layer.parameters = p.parameters;
    layer.output_bytes = p.output_bytes;
    layer.kept_bytes = p.kept_bytes;
    layers.push_back(std::move(layer));
  }
  const TransformerModel& m = job.transformer;
  if (m.layers == 0) return layers;
  const double s = job.sequence_length;
  const double element = ElementBytes(job.precision);
  const double embedding = static_cast<double>(m.vocabulary) * m.hidden;
  if (m.vocabulary > 0) {
    LayerCost first;
    first.name = "embedding";
    first.parameters = embedding + static_cast<double>(m.positions) * m.hidden;
    first.output_bytes = element * s * m.hidden;
    first.kept_bytes = 4 * s;  // the tokens
    layers.push_back(first);
  }
  for (int32_t i = 0; i < m.layers; ++i) layers.push_back(Block(job, i));
  if (m.vocabulary > 0) {
    LayerCost head;
    head.name = "head";
    head.forward = 2 * s * embedding;
    head.backward = 2 * head.forward;
    head.parameters = embedding;  // a tied copy: its stage holds one unless it has the embedding already
    head.kept_bytes = element * s * m.hidden;
    head.kept_split_bytes = 4 * s * m.vocabulary;  // logits
    head.tensor_bytes = element * s * m.hidden;
    head.backward_reduces = 1;
    layers.push_back(head);
  }
  return layers;
}

Result<CostModel> CostModel::Create(const Cluster& cluster, const Job& job, const Tables& tables,
                                    const Calibration& calibration) {
  EVERSTEP_RETURN_IF_ERROR(Validate(cluster, job, tables));
  CostModel model;
  model.cluster_ = cluster;
  model.job_ = job;
  model.layers_ = MakeLayers(job);
  const auto& layers = model.layers_;
  model.forward_ = Sums(layers, &LayerCost::forward);
  model.backward_ = Sums(layers, &LayerCost::backward);
  model.parameters_ = Sums(layers, &LayerCost::parameters);
  model.kept_ = Sums(layers, &LayerCost::kept_bytes);
  model.kept_split_ = Sums(layers, &LayerCost::kept_split_bytes);
  model.tensor_forward_.assign(1, 0);
  model.tensor_backward_.assign(1, 0);
  model.reduces_forward_.assign(1, 0);
  model.reduces_backward_.assign(1, 0);
  for (const LayerCost& l : layers) {
    model.tensor_forward_.push_back(model.tensor_forward_.back() + l.forward_reduces * l.tensor_bytes);
    model.tensor_backward_.push_back(model.tensor_backward_.back() + l.backward_reduces * l.tensor_bytes);
    model.reduces_forward_.push_back(model.reduces_forward_.back() + l.forward_reduces);
    model.reduces_backward_.push_back(model.reduces_backward_.back() + l.backward_reduces);
  }
  if (job.transformer.layers > 0 && job.recompute == Recompute::kFull) {
    const BlockKept kept = KeptByBlock(job.transformer, job.sequence_length, ElementBytes(job.precision));
    model.transient_bytes_ = kept.everywhere + kept.split + kept.scores;
  }
  model.MakeServers(tables, calibration);
  return model;
}

void CostModel::MakeServers(const Tables& tables, const Calibration& calibration) {
  const bool transformer = job_.transformer.layers > 0;
  const double width = transformer ? job_.transformer.hidden / (job_.transformer.hidden + kWidthHalf) : 1;
  const auto peak = [&](const DeviceModel& d) { return job_.precision == Precision::kFp32 ? d.float_flops : d.half_flops; };
  const DeviceModel* reference = tables.FindDevice(job_.reference_device);
  network_ratio_ = calibration.Ratio("network");
  const std::set<ServerId> forbidden(job_.forbidden.begin(), job_.forbidden.end());
  std::map<std::string, int32_t> racks, leaves, domains;
  const auto number = [](std::map<std::string, int32_t>& names, const std::string& name) {
    return names.emplace(name, static_cast<int32_t>(names.size())).first->second;
  };
  using Kind = std::tuple<std::string, double, double, double, double, double, int32_t, double, double>;
  std::map<Kind, int32_t> kinds;
  for (const PlanServer& s : cluster_.servers) {
    const DeviceModel& d = *tables.FindDevice(s.device);
    ServerCost c;
    const double table_rate = transformer ? peak(d) * d.efficiency * width
                              : reference ? peak(d) * d.efficiency / (peak(*reference) * reference->efficiency)
                                          : 1;
    c.rate = table_rate * s.speed / calibration.Ratio("compute/" + s.device);
    c.memory = s.memory_bytes > 0 ? s.memory_bytes : d.memory_bytes;
    c.link_bandwidth = s.link_bandwidth > 0 ? s.link_bandwidth : d.link_bandwidth * kLinkEfficiency;
    c.link_latency = s.link_latency;
    c.network = s.network_bandwidth / network_ratio_;
    c.memory_bandwidth = d.memory_bandwidth;
    c.watts_max = s.watts_max > 0 ? s.watts_max : d.watts_max;
    c.watts_idle = std::min(d.watts_idle, c.watts_max);
    c.price = s.price_per_hour > 0 ? s.price_per_hour : s.devices;
    c.devices = s.devices;
    c.rack = number(racks, s.leaf + "/" + s.rack);
    c.leaf = number(leaves, s.leaf);
    // Where no failure domain is named, a server is one of its own.
    c.domain = number(domains, s.failure_domain.empty() ? "server " + s.id.value : "domain " + s.failure_domain);
    c.usable = !forbidden.contains(s.id) && (job_.precision != Precision::kBf16 || d.bf16);
    const Kind kind(s.device, c.rate, c.memory, c.link_bandwidth, c.link_latency, c.network, c.devices, c.watts_max, c.price);
    c.kind = kinds.emplace(kind, static_cast<int32_t>(kinds.size())).first->second;
    servers_.push_back(c);
  }
  domain_count_ = static_cast<int32_t>(domains.size());
  if (cluster_.links.empty()) return;
  std::map<ServerId, int32_t> index;
  for (size_t i = 0; i < cluster_.servers.size(); ++i) index[cluster_.servers[i].id] = static_cast<int32_t>(i);
  for (const LinkOverride& link : cluster_.links) {
    const int32_t a = index.at(link.a), b = index.at(link.b);
    overrides_[{std::min(a, b), std::max(a, b)}] = {link.bandwidth / network_ratio_, link.latency};
  }
}

bool CostModel::Splits(int32_t tp) const {
  if (tp == 1) return true;
  const TransformerModel& m = job_.transformer;
  return m.layers > 0 && m.heads % tp == 0 && (m.kv_heads % tp == 0 || tp % m.kv_heads == 0) && m.ffn % tp == 0;
}

LinkTier CostModel::Link(int32_t a, int32_t b) const {
  const ServerCost& x = servers_[static_cast<size_t>(a)];
  const ServerCost& y = servers_[static_cast<size_t>(b)];
  const double cards = std::min(x.network, y.network);
  if (!overrides_.empty()) {
    const auto at = overrides_.find({std::min(a, b), std::max(a, b)});
    if (at != overrides_.end()) return {std::min(at->second.bandwidth, cards), at->second.latency};
  }
  const LinkTier& tier = x.rack == y.rack ? cluster_.rack : x.leaf == y.leaf ? cluster_.leaf : cluster_.spine;
  return {tier.bandwidth > 0 ? std::min(tier.bandwidth / network_ratio_, cards) : cards, tier.latency};
}

StageTimes CostModel::RunTimes(int32_t server, int32_t tp, int32_t micro_batch, int32_t begin, int32_t end) const {
  const ServerCost& c = servers_[static_cast<size_t>(server)];
  const auto i = static_cast<size_t>(begin), j = static_cast<size_t>(end);
  const double samples = micro_batch;
  StageTimes times;
  times.forward = samples * (forward_[j] - forward_[i]) / (c.rate * tp);
  times.backward = samples * (backward_[j] - backward_[i]) / (c.rate * tp);
  if (tp > 1) {
    const double per_byte = 2.0 * (tp - 1) / tp / c.link_bandwidth;
    const double per_reduce = 2.0 * (tp - 1) * c.link_latency;
    times.forward += samples * (tensor_forward_[j] - tensor_forward_[i]) * per_byte +
                     (reduces_forward_[j] - reduces_forward_[i]) * per_reduce;
    times.backward += samples * (tensor_backward_[j] - tensor_backward_[i]) * per_byte +
                      (reduces_backward_[j] - reduces_backward_[i]) * per_reduce;
  }
  return times;
}

double CostModel::TransferTime(int32_t from, int32_t to, int32_t tp, int32_t micro_batch, int32_t boundary) const {
  const double bytes = micro_batch * layers_[static_cast<size_t>(boundary - 1)].output_bytes;
  const ServerCost& a = servers_[static_cast<size_t>(from)];
  if (from == to) return bytes / tp / a.link_bandwidth + a.link_latency;
  // A group sends its parts side by side, over its part of the network cards.
  const LinkTier link = Link(from, to);
  if (link.bandwidth <= 0) return kInfinite;
  const ServerCost& b = servers_[static_cast<size_t>(to)];
  const double part = std::min(1.0, static_cast<double>(tp) / std::max(a.devices, b.devices));
  return bytes / (link.bandwidth * part) + link.latency;
}

double CostModel::StateBytes(int32_t begin, int32_t end) const {
  return (parameters_[static_cast<size_t>(end)] - parameters_[static_cast<size_t>(begin)]) * StateBytesPerParameter();
}

double CostModel::MemoryNeeded(const Layout& layout, int32_t stage, int32_t begin, int32_t end,
                               int64_t micro_batches) const {
  const auto i = static_cast<size_t>(begin), j = static_cast<size_t>(end);
  const double tp = layout.tensor_parallel;
  double parameters = parameters_[j] - parameters_[i];
  const TransformerModel& m = job_.transformer;
  if (m.layers > 0 && m.vocabulary > 0 && m.tied && begin == 0 && end == layer_count()) parameters -= layers_.back().parameters;
  const double optimizer = job_.optimizer_bytes / (job_.shard_optimizer ? layout.data_parallel : 1);
  const double state = parameters / tp * (job_.weight_bytes + job_.gradient_bytes + optimizer);
  const double stages = layout.pipeline_stages;
  double in_flight = std::min(stages - stage, static_cast<double>(micro_batches));
  if (job_.interleave > 1 && layout.pipeline_stages > 1) in_flight += (stages - 1) / job_.interleave;
  const double samples = layout.micro_batch;
  double kept = samples * in_flight * (kept_[j] - kept_[i] + (kept_split_[j] - kept_split_[i]) / tp);
  kept += samples * transient_bytes_ / tp;
  double boundary = begin > 0 ? layers_[i - 1].output_bytes : 0;
  if (end < layer_count()) boundary = std::max(boundary, layers_[j - 1].output_bytes);
  return state + kept + 2 * samples * boundary / tp + job_.reserve_bytes;
}

// One replica, by the classes of its servers and the links between them.
struct CostModel::ReplicaCost {
  std::vector<StageTimes> times;
  std::vector<double> compute;   // forward and backward, collectives left out
  ClosedForm form;
  int32_t unconnected = -1;      // a stage whose transfer has no link
};

CostModel::ReplicaCost CostModel::CostOfReplica(const Layout& layout, int32_t replica) const {
  ReplicaCost cost;
  const int32_t chunks = layout.pipeline_stages > 1 ? job_.interleave : 1;
  for (int32_t s = 0; s < layout.pipeline_stages; ++s) {
    const int32_t begin = layout.bounds[static_cast<size_t>(s)], end = layout.bounds[static_cast<size_t>(s + 1)];
    const int32_t server = layout.slots[layout.At(replica, s)].server;
    StageTimes t = RunTimes(server, layout.tensor_parallel, layout.micro_batch, begin, end);
    const double rate = servers_[static_cast<size_t>(server)].rate * layout.tensor_parallel;
    cost.compute.push_back(layout.micro_batch *
                           (forward_[static_cast<size_t>(end)] - forward_[static_cast<size_t>(begin)] +
                            backward_[static_cast<size_t>(end)] - backward_[static_cast<size_t>(begin)]) / rate);
    if (s + 1 < layout.pipeline_stages) {
      const int32_t next = layout.slots[layout.At(replica, s + 1)].server;
      t.transfer = TransferTime(server, next, layout.tensor_parallel, layout.micro_batch, end) * chunks;
      if (t.transfer == kInfinite && cost.unconnected < 0) cost.unconnected = s;
    }
    cost.times.push_back(t);
  }
  cost.form = OneFOneBClosedForm(cost.times);
  if (chunks > 1) cost.form.fill = cost.form.period + (cost.form.fill - cost.form.period) / chunks;
  return cost;
}

// The all-reduce of one stage's gradients over its replicas: ring or, where servers hold several replicas, two levels.
void CostModel::Reduce(const Layout& layout, int32_t stage, const std::vector<int32_t>& stages_on_server,
                       Evaluation* out) const {
  StageCost& cost = out->stages[static_cast<size_t>(stage)];
  const int32_t replicas = layout.data_parallel;
  std::vector<int32_t> ring(static_cast<size_t>(replicas));
  for (int32_t r = 0; r < replicas; ++r) ring[static_cast<size_t>(r)] = r;
  const auto server_of = [&](int32_t r) { return layout.slots[layout.At(r, stage)].server; };
  const auto place = [&](int32_t r) {
    const ServerCost& c = servers_[static_cast<size_t>(server_of(r))];
    return std::make_tuple(c.leaf, c.rack, server_of(r), r);
  };
  const auto nearer = [&](int32_t a, int32_t b) { return place(a) < place(b); };
  if (!std::is_sorted(ring.begin(), ring.end(), nearer)) std::sort(ring.begin(), ring.end(), nearer);
  if (!overrides_.empty() && replicas > 3 && replicas <= 64) {
    std::vector<std::vector<double>> bandwidth(ring.size(), std::vector<double>(ring.size(), 0));
    for (size_t a = 0; a < ring.size(); ++a) {
      for (size_t b = 0; b < ring.size(); ++b) {
        const int32_t x = server_of(ring[a]), y = server_of(ring[b]);
        if (a != b) bandwidth[a][b] = x == y ? servers_[static_cast<size_t>(x)].link_bandwidth : Link(x, y).bandwidth;
      }
    }
    std::vector<int32_t> sorted;
    for (const int32_t i : RingOrder(bandwidth)) sorted.push_back(ring[static_cast<size_t>(i)]);
    ring = std::move(sorted);
  }
  std::vector<int32_t> domains;
  int32_t distinct = 0, run = 0, run_max = 0;
  double outer = kInfinite, outer_latency = 0, inner = kInfinite, inner_latency = 0, update = 0, memory = kInfinite;
  for (size_t i = 0; i < ring.size(); ++i) {
    const int32_t a = server_of(ring[i]), b = server_of(ring[(i + 1) % ring.size()]);
    const ServerCost& c = servers_[static_cast<size_t>(a)];
    memory = std::min(memory, c.memory_bandwidth);
    if (domains.empty() || domains.back() != c.domain) domains.push_back(c.domain);
    run_max = std::max(run_max, ++run);
    if (a == b) {
      inner = std::min(inner, c.link_bandwidth);
      inner_latency = std::max(inner_latency, c.link_latency);
      if (i + 1 == ring.size()) ++distinct;
      continue;
    }
    run = 0;
    ++distinct;
    const LinkTier link = Link(a, b);
    const int32_t rings = layout.tensor_parallel * std::max(stages_on_server[static_cast<size_t>(a)],
                                                            stages_on_server[static_cast<size_t>(b)]);
    if (link.bandwidth <= 0) {
      if (out->verdict == Verdict::kFits) {
        out->verdict = Verdict::kUnconnected;
        out->stage = stage;
      }
      return;
    }
    outer = std::min(outer, link.bandwidth / rings);
    outer_latency = std::max(outer_latency, link.latency);
  }
  std::sort(domains.begin(), domains.end());
  cost.domains = static_cast<int32_t>(std::unique(domains.begin(), domains.end()) - domains.begin());
  const int32_t begin = layout.bounds[static_cast<size_t>(stage)], end = layout.bounds[static_cast<size_t>(stage + 1)];
  const double tp = layout.tensor_parallel;
  const double parameters = (parameters_[static_cast<size_t>(end)] - parameters_[static_cast<size_t>(begin)]) / tp;
  const double optimizer = job_.optimizer_bytes / (job_.shard_optimizer ? replicas : 1);
  update = parameters * (job_.weight_bytes + job_.gradient_bytes + optimizer) * kUpdatePasses / memory;
  cost.update_seconds = update;
  cost.ring = std::move(ring);
  if (replicas < 2) return;
  // Time of an all-reduce = latency + bytes * per_byte, the better of one flat ring and of two levels.
  const double flat_bandwidth = std::min(inner, outer);
  double latency = 2.0 * (replicas - 1) * std::max(inner_latency, outer_latency);
  double per_byte = 2.0 * (replicas - 1) / replicas / flat_bandwidth;
  if (distinct > 1 && run_max > 1) {
    const double levels_latency = 2.0 * (run_max - 1) * inner_latency + 2.0 * (distinct - 1) * outer_latency;
    const double levels = RingTime(run_max, 1, inner, 0) + RingTime(distinct, 1, outer, 0);
    const double all = job_.gradient_bytes * parameters;
    if (levels_latency + all * levels < latency + all * per_byte) {
      latency = levels_latency;
      per_byte = levels;
    }
  }
  cost.reduce_bytes = 2.0 * (replicas - 1) / replicas * job_.gradient_bytes * parameters;
  // Buckets: gradients become ready in the last micro-batch's backward, on the slowest replica last.
  double slowest = kInfinite;
  int32_t slow_server = 0;
  for (int32_t r = 0; r < replicas; ++r) {
    const double rate = servers_[static_cast<size_t>(server_of(r))].rate;
    if (rate < slowest) {
      slowest = rate;
      slow_server = server_of(r);
    }
  }
  std::vector<double> bytes, ready;
  double clock = 0;
  for (int32_t l = end; l-- > begin;) {
    clock += RunTimes(slow_server, layout.tensor_parallel, layout.micro_batch, l, l + 1).backward;
    bytes.push_back(layers_[static_cast<size_t>(l)].parameters / tp * job_.gradient_bytes);
    ready.push_back(clock);
  }
  BucketPlan buckets = GradientBuckets(bytes, ready, latency, per_byte);
  cost.reduce_seconds = latency * static_cast<double>(buckets.ends.size()) + per_byte * parameters * job_.gradient_bytes;
  cost.reduce_exposed = std::max(0.0, buckets.finish - clock);
  cost.bucket_ends = std::move(buckets.ends);
}

Evaluation CostModel::Evaluate(const Layout& layout, bool exact) const {
  Evaluation out;
  const int32_t replicas = layout.data_parallel, stages = layout.pipeline_stages;
  out.stages.resize(static_cast<size_t>(stages));
  // 1. Replicas, each kind once.
  std::vector<ReplicaCost> kinds;
  std::vector<int32_t> kind_of(static_cast<size_t>(replicas), 0);
  std::map<std::vector<double>, int32_t> known;
  std::vector<double> key, key_before;
  for (int32_t r = 0; r < replicas; ++r) {
    key.clear();
    for (int32_t s = 0; s < stages; ++s) {
      const int32_t a = layout.slots[layout.At(r, s)].server;
      key.push_back(servers_[static_cast<size_t>(a)].kind);
      if (s + 1 == stages) continue;
      const int32_t b = layout.slots[layout.At(r, s + 1)].server;
      const LinkTier link = a == b ? LinkTier{-1, 0} : Link(a, b);
      key.push_back(link.bandwidth);
      key.push_back(link.latency);
    }
    if (r > 0 && key == key_before) {
      kind_of[static_cast<size_t>(r)] = kind_of[static_cast<size_t>(r - 1)];
      continue;
    }
    const auto [at, inserted] = known.emplace(key, static_cast<int32_t>(kinds.size()));
    if (inserted) kinds.push_back(CostOfReplica(layout, r));
    kind_of[static_cast<size_t>(r)] = at->second;
    key_before.swap(key);
  }
  for (const ReplicaCost& kind : kinds) {
    if (kind.unconnected >= 0) {
      out.verdict = Verdict::kUnconnected;
      out.stage = kind.unconnected;
      return out;
    }
  }
  // 2. Shares.
  const int64_t total = job_.global_batch / layout.micro_batch;
  if (total < replicas) {
    out.verdict = Verdict::kTooFewMicroBatches;
    return out;
  }
  out.shares = layout.shares;
  if (out.shares.empty()) {
    std::vector<ShareTerm> terms;
    for (int32_t r = 0; r < replicas; ++r) {
      const ClosedForm& form = kinds[static_cast<size_t>(kind_of[static_cast<size_t>(r)])].form;
      terms.push_back({std::max(0.0, form.fill - form.period), form.period, 1});
    }
    auto shares = MicroBatchShares(total, terms);
    if (!shares.ok()) {
      out.verdict = Verdict::kTooFewMicroBatches;
      return out;
    }
    out.shares = std::move(shares).value();
  }
  const int64_t share_max = *std::max_element(out.shares.begin(), out.shares.end());
  // 3. Memory.
  for (int32_t s = 0; s < stages; ++s) {
    StageCost& cost = out.stages[static_cast<size_t>(s)];
    cost.memory_needed =
        MemoryNeeded(layout, s, layout.bounds[static_cast<size_t>(s)], layout.bounds[static_cast<size_t>(s + 1)], share_max);
    cost.memory_limit = kInfinite;
    for (int32_t r = 0; r < replicas; ++r) {
      const int32_t server = layout.slots[layout.At(r, s)].server;
      if (servers_[static_cast<size_t>(server)].memory < cost.memory_limit) {
        cost.memory_limit = servers_[static_cast<size_t>(server)].memory;
        cost.memory_server = server;
      }
    }
    if (cost.memory_needed > cost.memory_limit && out.verdict == Verdict::kFits) {
      out.verdict = Verdict::kOverMemory;
      out.stage = s;
    }
    if (s + 1 < stages) {
      cost.transfer_bytes = 2.0 * static_cast<double>(total) * layout.micro_batch *
                            layers_[static_cast<size_t>(layout.bounds[static_cast<size_t>(s + 1)] - 1)].output_bytes *
                            job_.interleave;
    }
  }
  // 4. Gradients.
  std::vector<int32_t> stages_on_server(servers_.size(), 0), seen_stage(servers_.size(), -1);
  std::vector<bool> used(servers_.size(), false);
  for (int32_t s = 0; s < stages; ++s) {
    for (int32_t r = 0; r < replicas; ++r) {
      const auto server = static_cast<size_t>(layout.slots[layout.At(r, s)].server);
      used[server] = true;
      if (seen_stage[server] == s) continue;
      seen_stage[server] = s;
      ++stages_on_server[server];
    }
  }
  double price = 0;
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    ++out.servers_used;
    price += servers_[i].price;
  }
  for (int32_t s = 0; s < stages; ++s) Reduce(layout, s, stages_on_server, &out);
  if (out.verdict == Verdict::kUnconnected) return out;
  out.domains_min = out.stages[0].domains;
  for (const StageCost& cost : out.stages) out.domains_min = std::min(out.domains_min, cost.domains);
  // 5. When the last stage of all ends. Stage s is done earlier by the backward passes that follow it.
  std::map<std::pair<int32_t, int64_t>, double> pipeline;
  const bool recurrence = exact && (job_.interleave == 1 || stages == 1);
  for (int32_t r = 0; r < replicas; ++r) {
    const int32_t k = kind_of[static_cast<size_t>(r)];
    const int64_t share = out.shares[static_cast<size_t>(r)];
    const auto [at, inserted] = pipeline.emplace(std::make_pair(k, share), 0);
    if (!inserted) continue;
    const ReplicaCost& kind = kinds[static_cast<size_t>(k)];
    double time = kind.form.Total(share);
    if (recurrence) {
      // After a few rounds the schedule repeats itself with its period.
      const int64_t count = std::min<int64_t>(share, 4 * stages + 8);
      time = OneFOneB(kind.times, count) + static_cast<double>(share - count) * kind.form.period;
    }
    at->second = time;
    double earlier = 0;
    for (int32_t s = 0; s < stages; ++s) {
      const StageCost& cost = out.stages[static_cast<size_t>(s)];
      const double end = time - earlier + cost.reduce_exposed + cost.update_seconds;
      const StageTimes& t = kind.times[static_cast<size_t>(s)];
      earlier += t.backward + t.transfer;
      if (end <= out.step_seconds) continue;
      out.step_seconds = end;
      const double n = static_cast<double>(share);
      double compute = 0, busy = 0;
      for (size_t i = 0; i < kind.times.size(); ++i) {
        compute = std::max(compute, kind.compute[i]);
        busy = std::max(busy, kind.times[i].forward + kind.times[i].backward);
      }
      TimeParts& parts = out.parts;
      parts.compute = n * compute;
      parts.tensor = n * (busy - compute);
      parts.transfer = n * std::max(0.0, kind.form.period - busy);
      parts.reduce = cost.reduce_exposed;
      parts.update = cost.update_seconds;
      parts.bubble = end - parts.compute - parts.tensor - parts.transfer - parts.reduce - parts.update;
    }
  }
  // 6. Energy: idle power all the time, the rest while a device computes.
  for (int32_t r = 0; r < replicas; ++r) {
    const ReplicaCost& kind = kinds[static_cast<size_t>(kind_of[static_cast<size_t>(r)])];
    for (int32_t s = 0; s < stages; ++s) {
      const ServerCost& c = servers_[static_cast<size_t>(layout.slots[layout.At(r, s)].server)];
      const double busy = std::min(out.step_seconds, kind.compute[static_cast<size_t>(s)] *
                                                         static_cast<double>(out.shares[static_cast<size_t>(r)]));
      out.joules += layout.tensor_parallel * (c.watts_idle * out.step_seconds + (c.watts_max - c.watts_idle) * busy);
    }
  }
  out.price = price * out.step_seconds / 3600;
  return out;
}

}  // namespace everstep::planner
