#include "controller/cli/plan_files.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <charconv>
#include <cmath>
#include <functional>
#include <map>

#include "controller/io/config/yaml_message.h"

namespace everstep::cli {
namespace {

using planner::Cluster;
using planner::Job;
using planner::LinkTier;
using planner::PlanServer;
using planner::ReplanInput;

// Walks one map of the file: each key has a setter; an unknown key is a problem with a suggestion.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  using Setter = std::function<void(const YAML::Node&)>;
  void Map(const YAML::Node& node, const std::string& what, const std::map<std::string, Setter>& setters) {
    if (!node.IsMap()) return Problem(node, fmt::format("{} must be a map", what));
    std::vector<std::string> names;
    for (const auto& [name, setter] : setters) names.push_back(name);
    for (const auto& entry : node) {
      const std::string key = entry.first.Scalar();
      const auto at = setters.find(key);
      if (at != setters.end()) {
        at->second(entry.second);
        continue;
      }
      const std::string near = NearestName(key, names);
      Problem(entry.first, fmt::format("unknown field \"{}\" of {}{}", key, what,
                                       near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near)));
    }
  }
  void Problem(const YAML::Node& node, const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument(fmt::format("{}:{}: {}", file_, node.Mark().line + 1, what));
  }
  const Status& status() const { return status_; }

  Setter Text(std::string* out) {
    return [this, out](const YAML::Node& n) {
      if (!n.IsScalar()) return Problem(n, "a text is expected");
      *out = n.Scalar();
    };
  }
  Setter Quantity(double* out, QuantityKind kind) {
    return [this, out, kind](const YAML::Node& n) {
      const auto value = n.IsScalar() ? ParseQuantity(n.Scalar(), kind) : Result<double>(InvalidArgument("a number is expected"));
      if (!value.ok()) return Problem(n, value.status().message());
      *out = *value;
    };
  }
  template <typename Integer>
  Setter Whole(Integer* out) {
    return [this, out](const YAML::Node& n) {
      Integer value = 0;
      const std::string text = n.IsScalar() ? n.Scalar() : "";
      const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
      if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || text.empty()) {
        return Problem(n, fmt::format("\"{}\" is not a whole number that fits", text));
      }
      *out = value;
    };
  }
  Setter Flag(bool* out) {
    return [this, out](const YAML::Node& n) {
      const std::string text = n.IsScalar() ? n.Scalar() : "";
      if (text != "true" && text != "false") return Problem(n, fmt::format("\"{}\" is neither true nor false", text));
      *out = text == "true";
    };
  }
  template <typename Enum>
  Setter Choice(Enum* out, std::vector<std::pair<std::string, Enum>> choices) {
    return [this, out, choices](const YAML::Node& n) {
      std::string names;
      for (const auto& [name, value] : choices) {
        if (n.IsScalar() && n.Scalar() == name) {
          *out = value;
          return;
        }
        names += (names.empty() ? "" : ", ") + name;
      }
      Problem(n, fmt::format("\"{}\" is not one of {}", n.IsScalar() ? n.Scalar() : "", names));
    };
  }
  Setter Names(std::vector<ServerId>* out) {
    return [this, out](const YAML::Node& n) {
      if (!n.IsSequence()) return Problem(n, "a list of names is expected");
      for (const auto& name : n) out->push_back(ServerId(name.Scalar()));
    };
  }

 private:
  std::string file_;
  Status status_;
};

// Loads the text; `read` fills in. The one place where the library's exceptions stop.
Status WithYaml(const std::string& text, const std::string& file, const std::function<void(const YAML::Node&, Reader&)>& read) {
  try {
    const YAML::Node root = YAML::Load(text);
    Reader reader(file);
    if (!root.IsDefined() || root.IsNull()) return InvalidArgument(file + ": the file is empty");
    read(root, reader);
    return reader.status();
  } catch (const YAML::Exception& error) {
    return InvalidArgument(fmt::format("{}:{}: {}", file, error.mark.line + 1, error.msg));
  }
}

Reader::Setter TierSetter(Reader& reader, const std::string& name, LinkTier* tier) {
  return [&reader, name, tier](const YAML::Node& n) {
    reader.Map(n, name, {{"bandwidth", reader.Quantity(&tier->bandwidth, QuantityKind::kBandwidth)},
                         {"latency", reader.Quantity(&tier->latency, QuantityKind::kSeconds)}});
  };
}

// One entry of `servers`; with `count`, that many: name, rack and leaf get a number each.
void ReadServers(const YAML::Node& node, Reader& reader, Cluster* cluster) {
  PlanServer s;
  int32_t count = 0, per_rack = 0, per_leaf = 0;
  std::string name;
  reader.Map(node, "a server",
             {{"name", reader.Text(&name)},
              {"count", reader.Whole(&count)},
              {"device", reader.Text(&s.device)},
              {"devices", reader.Whole(&s.devices)},
              {"speed", reader.Quantity(&s.speed, QuantityKind::kNumber)},
              {"memory", reader.Quantity(&s.memory_bytes, QuantityKind::kBytes)},
              {"link", reader.Quantity(&s.link_bandwidth, QuantityKind::kBandwidth)},
              {"link_latency", reader.Quantity(&s.link_latency, QuantityKind::kSeconds)},
              {"network", reader.Quantity(&s.network_bandwidth, QuantityKind::kBandwidth)},
              {"rack", reader.Text(&s.rack)},
              {"per_rack", reader.Whole(&per_rack)},
              {"leaf", reader.Text(&s.leaf)},
              {"per_leaf", reader.Whole(&per_leaf)},
              {"failure_domain", reader.Text(&s.failure_domain)},
              {"watts", reader.Quantity(&s.watts_max, QuantityKind::kNumber)},
              {"price_per_hour", reader.Quantity(&s.price_per_hour, QuantityKind::kNumber)}});
  if (name.empty()) return reader.Problem(node, "a server needs a name");
  if (count < 0 || per_rack < 0 || per_leaf < 0) return reader.Problem(node, "count, per_rack and per_leaf are not negative");
  if (count > planner::kServersMax) {
    return reader.Problem(node, fmt::format("count is {}; at most {} servers", count, planner::kServersMax));
  }
  for (int32_t i = 0; i < std::max(1, count); ++i) {
    PlanServer one = s;
    one.id = ServerId(count > 0 ? fmt::format("{}{}", name, i) : name);
    if (per_rack > 0) one.rack = fmt::format("{}{}", s.rack, i / per_rack);
    if (per_leaf > 0) one.leaf = fmt::format("{}{}", s.leaf, i / per_leaf);
    if (one.failure_domain.empty()) one.failure_domain = one.rack;
    cluster->servers.push_back(std::move(one));
  }
}

void ReadProfile(const YAML::Node& node, Reader& reader, Job* job) {
  if (!node.IsSequence()) return reader.Problem(node, "profile must be a list of layers");
  for (const auto& entry : node) {
    planner::LayerProfile layer;
    int32_t count = 1;
    reader.Map(entry, "a layer",
               {{"forward", reader.Quantity(&layer.forward_seconds, QuantityKind::kSeconds)},
                {"backward", reader.Quantity(&layer.backward_seconds, QuantityKind::kSeconds)},
                {"parameters", reader.Quantity(&layer.parameters, QuantityKind::kNumber)},
                {"output", reader.Quantity(&layer.output_bytes, QuantityKind::kBytes)},
                {"kept", reader.Quantity(&layer.kept_bytes, QuantityKind::kBytes)},
                {"count", reader.Whole(&count)}});
    if (count < 1 || count > planner::kLayersMax) return reader.Problem(entry, "count of a layer is out of bounds");
    for (int32_t i = 0; i < count; ++i) job->profile.push_back(layer);
  }
}

}  // namespace

Result<double> ParseQuantity(const std::string& text, QuantityKind kind) {
  static const std::map<QuantityKind, std::vector<std::pair<std::string, double>>> kUnits = {
      {QuantityKind::kBytes,
       {{"", 1}, {"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"KiB", 1024.0}, {"MiB", 1048576.0},
        {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}}},
      {QuantityKind::kBandwidth,
       {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}, {"TB/s", 1e12}, {"Kb/s", 1e3 / 8}, {"Mb/s", 1e6 / 8},
        {"Gb/s", 1e9 / 8}, {"Tb/s", 1e12 / 8}}},
      {QuantityKind::kSeconds, {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"m", 60}, {"h", 3600}}},
      {QuantityKind::kNumber, {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}}}};
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(parsed.ptr, text.data() + text.size());
  unit.erase(0, unit.find_first_not_of(' '));
  std::string names;
  for (const auto& [name, factor] : kUnits.at(kind)) {
    if (parsed.ec == std::errc() && unit == name && std::isfinite(value)) return value * factor;
    if (!name.empty()) names += (names.empty() ? "" : ", ") + name;
  }
  return InvalidArgument(fmt::format("\"{}\" is not a number with one of the units {}", text, names));
}

Result<Cluster> ReadCluster(const std::string& text, const std::string& file) {
  Cluster cluster;
  const Status status = WithYaml(text, file, [&](const YAML::Node& root, Reader& reader) {
    reader.Map(root, "a cluster",
               {{"servers",
                 [&](const YAML::Node& n) {
                   if (!n.IsSequence()) return reader.Problem(n, "servers must be a list");
                   for (const auto& entry : n) ReadServers(entry, reader, &cluster);
                 }},
                {"network",
                 [&](const YAML::Node& n) {
                   reader.Map(n, "network", {{"rack", TierSetter(reader, "rack", &cluster.rack)},
                                             {"leaf", TierSetter(reader, "leaf", &cluster.leaf)},
                                             {"spine", TierSetter(reader, "spine", &cluster.spine)}});
                 }},
                {"links", [&](const YAML::Node& n) {
                   if (!n.IsSequence()) return reader.Problem(n, "links must be a list");
                   for (const auto& entry : n) {
                     planner::LinkOverride link;
                     reader.Map(entry, "a link",
                                {{"a", reader.Text(&link.a.value)},
                                 {"b", reader.Text(&link.b.value)},
                                 {"bandwidth", reader.Quantity(&link.bandwidth, QuantityKind::kBandwidth)},
                                 {"latency", reader.Quantity(&link.latency, QuantityKind::kSeconds)}});
                     cluster.links.push_back(link);
                   }
                 }}});
  });
  EVERSTEP_RETURN_IF_ERROR(status);
  return cluster;
}

Status ReadJob(const std::string& text, const std::string& file, const planner::Tables& tables, Job* job, ReplanInput* replan) {
  return WithYaml(text, file, [&](const YAML::Node& root, Reader& reader) {
    planner::TransformerModel& m = job->transformer;
    using planner::Objective;
    using planner::Precision;
    using planner::Recompute;
    using planner::Spread;
    reader.Map(
        root, "a job",
        {{"name", reader.Text(&job->name)},
         {"model",
          [&](const YAML::Node& n) {
            const planner::TransformerModel* known = n.IsScalar() ? tables.FindModel(n.Scalar()) : nullptr;
            if (known == nullptr) {
              std::vector<std::string> names;
              for (const auto& model : tables.models) names.push_back(model.name);
              return reader.Problem(n, fmt::format("model \"{}\" is in no table; there are {}",
                                                   n.IsScalar() ? n.Scalar() : "", fmt::join(names, ", ")));
            }
            m = *known;
          }},
         {"transformer",
          [&](const YAML::Node& n) {
            reader.Map(n, "transformer",
                       {{"layers", reader.Whole(&m.layers)}, {"hidden", reader.Whole(&m.hidden)},
                        {"heads", reader.Whole(&m.heads)}, {"kv_heads", reader.Whole(&m.kv_heads)},
                        {"ffn", reader.Whole(&m.ffn)}, {"vocabulary", reader.Whole(&m.vocabulary)},
                        {"gated", reader.Flag(&m.gated)}, {"tied", reader.Flag(&m.tied)},
                        {"positions", reader.Whole(&m.positions)}});
            if (m.kv_heads == 0) m.kv_heads = m.heads;
          }},
         {"profile", [&](const YAML::Node& n) { ReadProfile(n, reader, job); }},
         {"reference_device", reader.Text(&job->reference_device)},
         {"sequence_length", reader.Whole(&job->sequence_length)},
         {"global_batch", reader.Whole(&job->global_batch)},
         {"micro_batch_min", reader.Whole(&job->micro_batch_min)},
         {"micro_batch_max", reader.Whole(&job->micro_batch_max)},
         {"precision", reader.Choice<Precision>(&job->precision, {{"bf16", Precision::kBf16}, {"fp16", Precision::kFp16},
                                                                  {"fp32", Precision::kFp32}})},
         {"recompute", reader.Choice<Recompute>(&job->recompute, {{"none", Recompute::kNone},
                                                                  {"selective", Recompute::kSelective},
                                                                  {"full", Recompute::kFull}})},
         {"sequence_parallel", reader.Flag(&job->sequence_parallel)},
         {"shard_optimizer", reader.Flag(&job->shard_optimizer)},
         {"weight_bytes", reader.Quantity(&job->weight_bytes, QuantityKind::kNumber)},
         {"gradient_bytes", reader.Quantity(&job->gradient_bytes, QuantityKind::kNumber)},
         {"optimizer_bytes", reader.Quantity(&job->optimizer_bytes, QuantityKind::kNumber)},
         {"interleave", reader.Whole(&job->interleave)},
         {"reserve", reader.Quantity(&job->reserve_bytes, QuantityKind::kBytes)},
         {"servers_min", reader.Whole(&job->servers_min)},
         {"servers_max", reader.Whole(&job->servers_max)},
         {"tensor_parallel", reader.Whole(&job->tensor_parallel)},
         {"pipeline_stages", reader.Whole(&job->pipeline_stages)},
         {"data_parallel", reader.Whole(&job->data_parallel)},
         {"pinned", reader.Names(&job->pinned)},
         {"forbidden", reader.Names(&job->forbidden)},
         {"objective", reader.Choice<Objective>(&job->objective, {{"throughput", Objective::kThroughput},
                                                                  {"cost", Objective::kCost}, {"energy", Objective::kEnergy}})},
         {"spread", reader.Choice<Spread>(&job->spread, {{"preferred", Spread::kPreferred}, {"required", Spread::kRequired},
                                                         {"off", Spread::kOff}})},
         {"replan", [&](const YAML::Node& n) {
            reader.Map(n, "replan",
                       {{"detect", reader.Quantity(&replan->detect_seconds, QuantityKind::kSeconds)},
                        {"connect", reader.Quantity(&replan->connect_seconds, QuantityKind::kSeconds)},
                        {"start_cold", reader.Quantity(&replan->start_cold_seconds, QuantityKind::kSeconds)},
                        {"start_warm", reader.Quantity(&replan->start_warm_seconds, QuantityKind::kSeconds)},
                        {"store", reader.Quantity(&replan->store_bandwidth, QuantityKind::kBandwidth)},
                        {"horizon", reader.Quantity(&replan->horizon_seconds, QuantityKind::kSeconds)},
                        {"wait", reader.Quantity(&replan->wait_seconds, QuantityKind::kSeconds)},
                        {"gain_min", reader.Quantity(&replan->gain_min, QuantityKind::kNumber)},
                        {"warm", reader.Names(&replan->warm)},
                        {"checkpoint_steps_behind", [&](const YAML::Node& behind) {
                           planner::StateCopy copy;
                           reader.Whole(&copy.steps_behind)(behind);
                           copy.layer_end = planner::kLayersMax + 2;
                           replan->copies.push_back(copy);
                         }}});
          }}});
  });
}

Result<PlanServer> ReadAddedServer(const std::string& text, const PlanServer& like) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(':', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  const auto bad = [&](const std::string& why) {
    return InvalidArgument(fmt::format("--add {}: {}; write NAME:DEVICE:DEVICES[:BANDWIDTH], as in s9:H100:8:400Gb/s", text, why));
  };
  if (parts.size() < 3 || parts.size() > 4) return bad("three or four parts are expected");
  PlanServer server;
  server.id = ServerId(parts[0]);
  server.device = parts[1];
  server.network_bandwidth = like.network_bandwidth;
  const auto parsed = std::from_chars(parts[2].data(), parts[2].data() + parts[2].size(), server.devices);
  if (parsed.ec != std::errc() || parsed.ptr != parts[2].data() + parts[2].size()) return bad("the number of devices is none");
  if (parts.size() == 4) {
    const auto bandwidth = ParseQuantity(parts[3], QuantityKind::kBandwidth);
    if (!bandwidth.ok()) return bad(bandwidth.status().message());
    server.network_bandwidth = *bandwidth;
  }
  return server;
}

}  // namespace everstep::cli
