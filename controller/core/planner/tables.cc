#include "controller/core/planner/tables.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "proto/base/check.h"

namespace everstep::planner {
namespace {

constexpr double kGiga = 1e9;
constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

// One line of the file, cut at commas; the last column (the source) may hold none.
class Row {
 public:
  Row(std::string_view line, std::string where) : where_(std::move(where)) {
    for (size_t begin = 0; begin <= line.size();) {
      const size_t end = std::min(line.find(',', begin), line.size());
      cells_.emplace_back(line.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  size_t size() const { return cells_.size(); }
  const std::string& Text(size_t column) const { return cells_[column]; }
  const Status& status() const { return status_; }

  double Number(size_t column, double least, double most) {
    double value = 0;
    const std::string& cell = cells_[column];
    const auto parsed = std::from_chars(cell.data(), cell.data() + cell.size(), value);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == cell.data() + cell.size();
    if (!whole || !std::isfinite(value) || value < least || value > most) {
      Bad(fmt::format("column {}: \"{}\" is not a number from {} to {}", column + 1, cell, least, most));
      return least;
    }
    return value;
  }
  int32_t Integer(size_t column, int32_t least, int32_t most) {
    const double value = Number(column, least, most);
    if (value != std::floor(value)) Bad(fmt::format("column {}: \"{}\" is not whole", column + 1, cells_[column]));
    return static_cast<int32_t>(value);
  }
  bool YesNo(size_t column) {
    if (cells_[column] != "yes" && cells_[column] != "no") {
      Bad(fmt::format("column {}: \"{}\" is neither yes nor no", column + 1, cells_[column]));
    }
    return cells_[column] == "yes";
  }
  void Bad(const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument(fmt::format("{}: {}", where_, what));
  }

 private:
  std::string where_;
  std::vector<std::string> cells_;
  Status status_;
};

template <typename Entry, typename Parse>
Status AddRows(std::string_view csv, const std::string& file, size_t columns, std::vector<Entry>* entries, Parse parse) {
  int line_number = 0;
  for (size_t begin = 0; begin < csv.size();) {
    const size_t end = std::min(csv.find('\n', begin), csv.size());
    std::string_view line = csv.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty() || line.front() == '#' || line.substr(0, 5) == "name,") continue;
    Row row(line, fmt::format("{}:{}", file, line_number));
    if (row.size() != columns) {
      return InvalidArgument(fmt::format("{}:{}: {} columns, expected {} (a source may hold no comma)", file,
                                         line_number, row.size(), columns));
    }
    Entry entry = parse(row);
    if (entry.name.empty()) row.Bad("the name is empty");
    if (entry.source.empty()) row.Bad("each row names its source");
    EVERSTEP_RETURN_IF_ERROR(row.status());
    auto at = std::lower_bound(entries->begin(), entries->end(), entry.name,
                               [](const Entry& e, const std::string& name) { return e.name < name; });
    if (at != entries->end() && at->name == entry.name) {
      *at = std::move(entry);
    } else {
      entries->insert(at, std::move(entry));
    }
  }
  return OkStatus();
}

template <typename Entry>
const Entry* Find(const std::vector<Entry>& entries, std::string_view name) {
  auto at = std::lower_bound(entries.begin(), entries.end(), name,
                             [](const Entry& e, std::string_view n) { return e.name < n; });
  return at != entries.end() && at->name == name ? &*at : nullptr;
}

}  // namespace

const DeviceModel* Tables::FindDevice(std::string_view name) const { return Find(devices, name); }
const TransformerModel* Tables::FindModel(std::string_view name) const { return Find(models, name); }

Status AddDeviceRows(std::string_view csv, const std::string& file, Tables* tables) {
  return AddRows(csv, file, 11, &tables->devices, [](Row& row) {
    DeviceModel d;
    d.name = row.Text(0);
    d.memory_bytes = row.Number(1, 0.001, 1e5) * kGibi;
    d.half_flops = row.Number(2, 1e-6, 1e6) * 1e12;
    d.bf16 = row.YesNo(3);
    d.float_flops = row.Number(4, 1e-6, 1e6) * 1e12;
    d.memory_bandwidth = row.Number(5, 1e-3, 1e6) * kGiga;
    d.link_bandwidth = row.Number(6, 1e-3, 1e6) * kGiga;
    d.watts_max = row.Number(7, 0, 1e5);
    d.watts_idle = row.Number(8, 0, 1e5);
    d.efficiency = row.Number(9, 1e-3, 1);
    d.source = row.Text(10);
    if (d.watts_idle > d.watts_max) row.Bad("idle_watts is above watts");
    return d;
  });
}

Status AddModelRows(std::string_view csv, const std::string& file, Tables* tables) {
  return AddRows(csv, file, 11, &tables->models, [](Row& row) {
    TransformerModel m;
    m.name = row.Text(0);
    m.layers = row.Integer(1, 1, kLayersMax);
    m.hidden = row.Integer(2, 1, 1 << 20);
    m.heads = row.Integer(3, 1, 1 << 16);
    m.kv_heads = row.Integer(4, 1, 1 << 16);
    m.ffn = row.Integer(5, 1, 1 << 24);
    m.vocabulary = row.Integer(6, 0, 1 << 24);
    m.gated = row.YesNo(7);
    m.tied = row.YesNo(8);
    m.positions = row.Integer(9, 0, 1 << 24);
    m.source = row.Text(10);
    return m;
  });
}

const Tables& BuiltInTables() {
  static const Tables tables = [] {
    Tables t;
    const Status devices = AddDeviceRows(DeviceTableText(), "devices.csv", &t);
    EVERSTEP_CHECK(devices.ok());
    const Status models = AddModelRows(ModelTableText(), "models.csv", &t);
    EVERSTEP_CHECK(models.ok());
    return t;
  }();
  return tables;
}

}  // namespace everstep::planner
