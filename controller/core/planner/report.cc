#include "controller/core/planner/report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>

namespace everstep::planner {
namespace {

constexpr int32_t kRowsMax = 24;       // replicas drawn one by one; more of them are counted
constexpr int32_t kColumnsMax = 12;    // stages drawn side by side

// Text columns of a UTF-8 string without combining characters.
size_t Width(const std::string& text) {
  size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return width;
}
std::string Pad(std::string text, size_t width) {
  const size_t have = Width(text);
  if (have < width) text.append(width - have, ' ');
  return text;
}

std::string Bar(double part, int32_t width) {
  const auto full = static_cast<int32_t>(std::lround(std::clamp(part, 0.0, 1.0) * width));
  std::string bar;
  for (int32_t i = 0; i < width; ++i) bar += i < full ? "█" : "░";
  return bar;
}

std::string SlotName(const CostModel& model, const Slot& slot, int32_t tp) {
  const PlanServer& server = model.cluster().servers[static_cast<size_t>(slot.server)];
  if (server.devices == 1) return server.id.value;
  return tp == 1 ? fmt::format("{}[{}]", server.id.value, slot.device)
                 : fmt::format("{}[{}-{}]", server.id.value, slot.device, slot.device + tp - 1);
}

const std::string& DeviceName(const CostModel& model, const Slot& slot) {
  return model.cluster().servers[static_cast<size_t>(slot.server)].device;
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string Escaped(const std::string& text) {  // for SVG
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

template <typename Items, typename Each>
std::string Join(const Items& items, const Each& each) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + each(item);
  return out;
}

std::string Layers(const Layout& layout, int32_t stage) {
  return fmt::format("{}-{}", layout.bounds[static_cast<size_t>(stage)], layout.bounds[static_cast<size_t>(stage + 1)] - 1);
}

// Two replicas look the same when their stages stand on the same devices' models with the same share.
std::string Look(const CostModel& model, const Layout& layout, int32_t replica) {
  std::string look = fmt::format("{}", layout.shares[static_cast<size_t>(replica)]);
  for (int32_t s = 0; s < layout.pipeline_stages; ++s) look += "," + DeviceName(model, layout.slots[layout.At(replica, s)]);
  return look;
}

std::string Picture(const CostModel& model, const Plan& plan) {
  const Layout& l = plan.layout;
  const int32_t columns = std::min(l.pipeline_stages, kColumnsMax);
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> head = {""};
  for (int32_t s = 0; s < columns; ++s) head.push_back(fmt::format("stage {}: layers {}", s, Layers(l, s)));
  if (columns < l.pipeline_stages) head.push_back(fmt::format("… {} more stages", l.pipeline_stages - columns));
  head.push_back("micro-batches");
  rows.push_back(head);
  const int64_t most = *std::max_element(l.shares.begin(), l.shares.end());
  int32_t drawn = 0;
  for (int32_t r = 0; r < l.data_parallel;) {
    const std::string look = Look(model, l, r);
    int32_t alike = 1;
    while (r + alike < l.data_parallel && Look(model, l, r + alike) == look) ++alike;
    const int32_t shown = l.data_parallel <= kRowsMax ? alike : 1;
    if (drawn >= kRowsMax) {
      rows.push_back({fmt::format("… {} more replicas", l.data_parallel - r)});
      break;
    }
    for (int32_t k = 0; k < shown; ++k, ++drawn) {
      std::vector<std::string> row = {fmt::format("replica {}", r + k)};
      for (int32_t s = 0; s < columns; ++s) {
        const Slot& slot = l.slots[l.At(r + k, s)];
        row.push_back(SlotName(model, slot, l.tensor_parallel) + " " + DeviceName(model, slot));
      }
      if (columns < l.pipeline_stages) row.push_back("…");
      const int64_t share = l.shares[static_cast<size_t>(r + k)];
      row.push_back(fmt::format("{} {}", Bar(static_cast<double>(share) / static_cast<double>(most), 16), share));
      rows.push_back(row);
    }
    if (alike > shown) rows.push_back({fmt::format("  … {} more alike", alike - shown)});
    r += alike;
  }
  std::vector<std::string> memory = {"memory"};
  for (int32_t s = 0; s < columns; ++s) {
    const StageCost& c = plan.evaluation.stages[static_cast<size_t>(s)];
    memory.push_back(fmt::format("{} {} of {}", Bar(c.memory_needed / c.memory_limit, 8), BytesText(c.memory_needed),
                                 BytesText(c.memory_limit)));
  }
  rows.push_back(memory);
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    if (row.size() == 1 && &row != &rows[0]) continue;
    for (size_t i = 0; i < row.size(); ++i) {
      if (widths.size() <= i) widths.push_back(0);
      widths[i] = std::max(widths[i], Width(row[i]));
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += i + 1 < row.size() ? Pad(row[i], widths[i]) + "  " : row[i];
    text += line + "\n";
  }
  return text;
}

std::vector<std::pair<const char*, double>> Parts(const TimeParts& p) {
  return {{"compute", p.compute}, {"tensor parallel", p.tensor}, {"stage transfers", p.transfer},
          {"pipeline fill", p.bubble}, {"gradients", p.reduce}, {"optimizer", p.update}};
}

double SamplesPerSecond(const CostModel& model, const Evaluation& e) {
  return static_cast<double>(model.job().global_batch) / e.step_seconds;
}

}  // namespace

Plan AsPlan(const ReplanOption& option) {
  Plan plan;
  plan.layout = option.layout;
  plan.evaluation = option.evaluation;
  return plan;
}

std::string PlanText(const CostModel& model, const Plan& plan) {
  const Layout& l = plan.layout;
  const Evaluation& e = plan.evaluation;
  std::string text = fmt::format("{} on {} servers, micro-batches of {}: {} a step, {:.4g} samples/s\n\n",
                                 ShapeText(l.data_parallel, l.pipeline_stages, l.tensor_parallel), e.servers_used, l.micro_batch,
                                 SecondsText(e.step_seconds), SamplesPerSecond(model, e));
  text += Picture(model, plan) + "\n";
  for (const auto& [name, seconds] : Parts(e.parts)) {
    text += fmt::format("{:<16} {} {:>10}  {:4.1f} %\n", name, Bar(seconds / e.step_seconds, 24), SecondsText(seconds),
                        100 * seconds / e.step_seconds);
  }
  double transfers = 0, reduces = 0;
  for (const StageCost& s : e.stages) {
    transfers += s.transfer_bytes;
    reduces += s.reduce_bytes * l.data_parallel * l.tensor_parallel;
  }
  text += fmt::format("\nin one step: {} between stages, {} of gradients, {:.4g} J, price {:.4g}\n", BytesText(transfers),
                      BytesText(reduces), e.joules, e.price);
  if (e.domains_min < 2 && model.domain_count() > 1) text += "note: all replicas of a stage are in one failure domain\n";
  if (!plan.alternatives.empty()) text += "\nnot chosen:\n";
  for (const Alternative& a : plan.alternatives) {
    text += fmt::format("  {}: {}{}\n", ShapeText(a.data_parallel, a.pipeline_stages, a.tensor_parallel),
                        a.fits ? "" : "does not fit: ", a.reason);
  }
  if (!plan.complete) text += "the search ended at its budget; a better plan may exist\n";
  return text;
}

std::string PlanJson(const CostModel& model, const Plan& plan) {
  const Layout& l = plan.layout;
  const Evaluation& e = plan.evaluation;
  std::string out = "{\n";
  out += fmt::format("  \"dataParallel\": {}, \"tensorParallel\": {}, \"pipelineStages\": {}, \"microBatch\": {},\n",
                     l.data_parallel, l.tensor_parallel, l.pipeline_stages, l.micro_batch);
  out += fmt::format("  \"stepSeconds\": {}, \"samplesPerSecond\": {}, \"joulesPerStep\": {}, \"pricePerStep\": {},\n",
                     e.step_seconds, SamplesPerSecond(model, e), e.joules, e.price);
  out += fmt::format("  \"serversUsed\": {}, \"failureDomainsMin\": {}, \"complete\": {},\n", e.servers_used, e.domains_min,
                     plan.complete);
  out += fmt::format("  \"parts\": {{\"compute\": {}, \"tensor\": {}, \"transfer\": {}, \"bubble\": {}, \"reduce\": {}, "
                     "\"update\": {}}},\n", e.parts.compute, e.parts.tensor, e.parts.transfer, e.parts.bubble, e.parts.reduce,
                     e.parts.update);
  out += fmt::format("  \"shares\": [{}],\n", Join(l.shares, [](int64_t n) { return std::to_string(n); }));
  out += "  \"stages\": [\n";
  for (int32_t s = 0; s < l.pipeline_stages; ++s) {
    const StageCost& c = e.stages[static_cast<size_t>(s)];
    out += fmt::format("    {{\"layerBegin\": {}, \"layerEnd\": {}, \"memoryNeeded\": {:.0f}, \"memoryLimit\": {:.0f}, "
                       "\"reduceSeconds\": {}, \"reduceExposed\": {}, \"reduceBytes\": {:.0f}, \"transferBytes\": {:.0f}, "
                       "\"failureDomains\": {}, \"bucketEnds\": [{}], \"ring\": [{}]}}{}\n",
                       l.bounds[static_cast<size_t>(s)], l.bounds[static_cast<size_t>(s + 1)], c.memory_needed, c.memory_limit,
                       c.reduce_seconds, c.reduce_exposed, c.reduce_bytes, c.transfer_bytes, c.domains,
                       Join(c.bucket_ends, [](int32_t n) { return std::to_string(n); }),
                       Join(c.ring, [](int32_t n) { return std::to_string(n); }), s + 1 < l.pipeline_stages ? "," : "");
  }
  out += "  ],\n  \"groups\": [\n";
  for (int32_t r = 0; r < l.data_parallel; ++r) {
    for (int32_t s = 0; s < l.pipeline_stages; ++s) {
      const Slot& slot = l.slots[l.At(r, s)];
      const bool last = r + 1 == l.data_parallel && s + 1 == l.pipeline_stages;
      out += fmt::format("    {{\"replica\": {}, \"stage\": {}, \"server\": {}, \"device\": {}, \"firstRank\": {}}}{}\n", r, s,
                         Quoted(model.cluster().servers[static_cast<size_t>(slot.server)].id.value), slot.device,
                         (r * l.pipeline_stages + s) * l.tensor_parallel, last ? "" : ",");
    }
  }
  out += "  ],\n  \"alternatives\": [\n";
  for (size_t i = 0; i < plan.alternatives.size(); ++i) {
    const Alternative& a = plan.alternatives[i];
    out += fmt::format("    {{\"dataParallel\": {}, \"tensorParallel\": {}, \"pipelineStages\": {}, \"microBatch\": {}, "
                       "\"fits\": {}, \"stepSeconds\": {}, \"reason\": {}}}{}\n", a.data_parallel, a.tensor_parallel,
                       a.pipeline_stages, a.micro_batch, a.fits, a.step_seconds, Quoted(a.reason),
                       i + 1 < plan.alternatives.size() ? "," : "");
  }
  return out + "  ]\n}\n";
}

std::string PlanSvg(const CostModel& model, const Plan& plan) {
  const Layout& l = plan.layout;
  const Evaluation& e = plan.evaluation;
  const int32_t rows = std::min(l.data_parallel, kRowsMax * 2);
  const int32_t left = 90, top = 64, row_height = 30, share_width = 160;
  const double stages_width = std::max(640, 70 * std::min(l.pipeline_stages, 20));
  const double layer_width = stages_width / model.layer_count();
  const double width = left + stages_width + share_width + 90;
  const double height = top + rows * row_height + 74;
  // A colour for each device model, in the order of names.
  static const char* const kColours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948"};
  std::map<std::string, const char*> colours;
  for (const Slot& slot : l.slots) colours.emplace(DeviceName(model, slot), "");
  size_t next = 0;
  for (auto& [name, colour] : colours) colour = kColours[next++ % std::size(kColours)];
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n", width, height);
  const auto text = [&](double x, double y, const std::string& what, const char* more = "") {
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, Escaped(what));
  };
  text(10, 20, fmt::format("{}: {} a step, {:.4g} samples/s", ShapeText(l.data_parallel, l.pipeline_stages, l.tensor_parallel),
                           SecondsText(e.step_seconds), SamplesPerSecond(model, e)), "font-size=\"14\"");
  double x = left;
  for (const auto& [name, colour] : colours) {
    out += fmt::format("<rect x=\"{:.1f}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{}\"/>\n", x, colour);
    text(x + 14, 37, name);
    x += 30 + 8.0 * static_cast<double>(name.size());
  }
  const int64_t most = *std::max_element(l.shares.begin(), l.shares.end());
  for (int32_t s = 0; s < l.pipeline_stages; ++s) {
    const double from = left + layer_width * l.bounds[static_cast<size_t>(s)];
    const double wide = layer_width * (l.bounds[static_cast<size_t>(s + 1)] - l.bounds[static_cast<size_t>(s)]);
    if (wide > 40) text(from + 2, top - 6, "layers " + Layers(l, s), "fill=\"#555\"");
    for (int32_t r = 0; r < rows; ++r) {
      const Slot& slot = l.slots[l.At(r, s)];
      const double y = top + r * row_height;
      const std::string name = SlotName(model, slot, l.tensor_parallel);
      out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\" stroke=\"white\">"
                         "<title>replica {} stage {}: {} ({}), layers {}</title></rect>\n", from, y, std::max(1.0, wide - 1),
                         row_height - 4, colours.at(DeviceName(model, slot)), r, s, Escaped(name),
                         Escaped(DeviceName(model, slot)), Layers(l, s));
      if (wide > 6.5 * static_cast<double>(name.size())) text(from + 4, y + 17, name, "fill=\"white\"");
    }
    const StageCost& c = e.stages[static_cast<size_t>(s)];
    const double y = top + rows * row_height + 8;
    const double part = std::clamp(c.memory_needed / c.memory_limit, 0.0, 1.0);
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"10\" fill=\"#ddd\"/>"
                       "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"10\" fill=\"#555\"/>\n", from, y,
                       std::max(1.0, wide - 1), from, y, std::max(1.0, (wide - 1) * part));
    if (wide > 90) text(from + 2, y + 24, BytesText(c.memory_needed) + " of " + BytesText(c.memory_limit), "fill=\"#555\"");
  }
  for (int32_t r = 0; r < rows; ++r) {
    const double y = top + r * row_height;
    text(10, y + 17, fmt::format("replica {}", r));
    const int64_t share = l.shares[static_cast<size_t>(r)];
    const double wide = share_width * static_cast<double>(share) / static_cast<double>(most);
    const double from = left + stages_width + 12;
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"#bbb\"/>\n", from, y + 4, wide,
                       row_height - 12);
    text(from + wide + 4, y + 17, std::to_string(share));
  }
  text(10, top + rows * row_height + 17, "memory");
  text(left + stages_width + 12, top - 6, "micro-batches", "fill=\"#555\"");
  if (rows < l.data_parallel) {
    text(10, height - 12, fmt::format("{} more replicas are not drawn", l.data_parallel - rows), "fill=\"#555\"");
  }
  return out + "</svg>\n";
}

std::string ReplanText(const CostModel& model, const Replan& replan) {
  std::string text = fmt::format("{} groups lost; {}\n\n", replan.groups_lost, replan.message);
  text += fmt::format("  {:<26}{:>12}{:>12}{:>12}{:>14}\n", "option", "samples/s", "back in", "moved", "loss");
  for (size_t i = 0; i < replan.options.size(); ++i) {
    const ReplanOption& o = replan.options[i];
    if (!o.possible) {
      text += fmt::format("  {:<26}{}\n", OptionName(o.kind), o.reason);
      continue;
    }
    text += fmt::format("{} {:<26}{:>12.4g}{:>12}{:>12}{:>14.0f}\n", i == replan.chosen ? ">" : " ", OptionName(o.kind),
                        o.throughput, SecondsText(o.recovery_seconds), BytesText(o.bytes_moved), o.loss_samples);
  }
  if (!replan.choice().layout.slots.empty()) text += "\n" + PlanText(model, AsPlan(replan.choice()));
  return text;
}

std::string ReplanJson(const CostModel& model, const Replan& replan) {
  std::string out = fmt::format("{{\n\"groupsLost\": {}, \"throughputBefore\": {}, \"message\": {},\n\"options\": [\n",
                                replan.groups_lost, replan.throughput_before, Quoted(replan.message));
  for (size_t i = 0; i < replan.options.size(); ++i) {
    const ReplanOption& o = replan.options[i];
    out += fmt::format("  {{\"option\": {}, \"chosen\": {}, \"possible\": {}, \"reason\": {}, \"throughput\": {}, "
                       "\"recoverySeconds\": {}, \"transferSeconds\": {}, \"bytesMoved\": {:.0f}, \"groupsMoved\": {}, "
                       "\"groupsKept\": {}, \"lossSamples\": {}}}{}\n", Quoted(OptionName(o.kind)), i == replan.chosen,
                       o.possible, Quoted(o.reason), o.throughput, o.recovery_seconds, o.transfer_seconds, o.bytes_moved,
                       o.groups_moved, o.groups_kept, o.loss_samples, i + 1 < replan.options.size() ? "," : "");
  }
  out += "]";
  if (!replan.choice().layout.slots.empty()) out += ",\n\"plan\": " + PlanJson(model, AsPlan(replan.choice()));
  return out + "}\n";
}

}  // namespace everstep::planner
