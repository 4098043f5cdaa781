#include "controller/core/planner/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "controller/core/planner/exact.h"
#include "proto/base/prng.h"

namespace everstep::planner {
namespace {

constexpr double kSpreadPenalty = 1.02;
constexpr size_t kSmallSlots = 16;      // up to here every width and every prefix of the devices is tried
constexpr size_t kRefineSlots = 32;     // up to here exchanges of devices are tried
constexpr size_t kTinySlots = 8;        // up to here from more starts
constexpr size_t kStartsTiny = 8, kStartsSmall = 3;
constexpr int32_t kRefineRounds = 24;
constexpr double kWorthRefining = 1.05, kWorthRefiningSmall = 2;
constexpr double kExactChainWork = 3e6; // cells of the exact placement of one pipeline
constexpr size_t kAlternatives = 3;
constexpr size_t kMicroBatchesMax = 6;
constexpr size_t kCutsMax = 8;
constexpr int32_t kTemplatesOrdersMax = 64;  // servers up to which a bandwidth graph is cut for an order

// Speeds are compared on a grid of five percent, so that noise does not tear neighbours apart.
int64_t SpeedGrid(double rate) { return std::llround(std::log(rate) / std::log(1.05)); }

struct Combo {
  int32_t tp = 1, micro_batch = 1, pp = 1, dp = 1;
  size_t slots = 0;               // the first so many of the ordered slots
  double bound = 0;               // the score is at least this
  double bound_seconds = 0;
};

struct Tried {
  Combo combo;
  Layout layout;
  Evaluation evaluation;
  double score = kInfinite;
  bool found = false;
};

auto Tie(const Combo& c) { return std::make_tuple(c.tp, c.pp, c.micro_batch, c.slots, c.dp); }

class Search {
 public:
  Search(const CostModel& model, const SearchLimits& limits) : model_(model), limits_(limits) {}

  Result<Plan> Run() {
    EVERSTEP_RETURN_IF_ERROR(ChooseServers());
    EVERSTEP_RETURN_IF_ERROR(ListCombos());
    std::map<std::tuple<int32_t, int32_t, int32_t>, Tried> shapes;
    const Tried* best = nullptr;
    for (const Combo& combo : combos_) {
      if (best != nullptr && best->found && combo.bound >= best->score && Enough(shapes)) break;
      if (work_ > limits_.work_budget) {
        plan_.complete = false;
        break;
      }
      best_score_ = best != nullptr && best->found ? best->score : kInfinite;
      Tried tried = Try(combo);
      Tried& known = shapes[{combo.dp, combo.tp, combo.pp}];
      const bool first = known.combo.slots == 0;
      if (first || Better(tried, known)) known = std::move(tried);
      if (known.found && (best == nullptr || Better(known, *best))) best = &known;
    }
    if (best == nullptr || !best->found) return Refuse(shapes);
    Tried winner = *best;
    // The closed form ranked the layouts of big clusters; the winner is stated by the recurrence.
    winner.evaluation = model_.Evaluate(winner.layout, true);
    if (winner.evaluation.verdict != Verdict::kFits) return Internal("the winner does not fit when looked at again");
    plan_.layout = winner.layout;
    plan_.layout.shares = winner.evaluation.shares;
    plan_.evaluation = winner.evaluation;
    AddAlternatives(shapes, winner);
    return std::move(plan_);
  }

 private:
  static bool Better(const Tried& a, const Tried& b) {
    if (a.found != b.found) return a.found;
    if (!a.found) return std::make_pair(a.combo.bound, Tie(a.combo)) < std::make_pair(b.combo.bound, Tie(b.combo));
    return std::make_tuple(a.score, a.evaluation.servers_used, Tie(a.combo)) <
           std::make_tuple(b.score, b.evaluation.servers_used, Tie(b.combo));
  }
  template <typename Shapes>
  static bool Enough(const Shapes& shapes) {
    return shapes.size() > kAlternatives;
  }

  Status ChooseServers() {
    const Job& job = model_.job();
    const std::set<ServerId> pinned(job.pinned.begin(), job.pinned.end());
    for (size_t i = 0; i < model_.servers().size(); ++i) {
      const auto& c = model_.servers()[i];
      const ServerId& id = model_.cluster().servers[i].id;
      if (c.usable) servers_.push_back(static_cast<int32_t>(i));
      if (!c.usable && pinned.contains(id)) {
        return ResourceExhausted(fmt::format("server {} is pinned, but its device {} cannot compute in bf16", id.value,
                                             model_.cluster().servers[i].device));
      }
      pinned_.push_back(pinned.contains(id));
    }
    if (servers_.empty()) {
      return ResourceExhausted("no server may be used: each is forbidden or has a device without bf16");
    }
    if (static_cast<int32_t>(servers_.size()) < job.servers_min) {
      return ResourceExhausted(fmt::format("{} servers may be used; the job needs at least {}", servers_.size(),
                                           job.servers_min));
    }
    if (job.servers_max > 0 && static_cast<int32_t>(pinned.size()) > job.servers_max) {
      return ResourceExhausted(fmt::format("{} servers are pinned; the job takes at most {}", pinned.size(), job.servers_max));
    }
    // Near neighbours come together: by the tiers of the network or, where links are given one by one, by its cuts.
    near_.assign(model_.servers().size(), 0);
    if (model_.has_link_overrides() && servers_.size() <= static_cast<size_t>(kTemplatesOrdersMax)) {
      std::vector<std::vector<double>> bandwidth(servers_.size(), std::vector<double>(servers_.size(), 0));
      for (size_t a = 0; a < servers_.size(); ++a) {
        for (size_t b = 0; b < servers_.size(); ++b) {
          if (a != b) bandwidth[a][b] = model_.Link(servers_[a], servers_[b]).bandwidth;
        }
      }
      const std::vector<int32_t> order = DeviceOrder(bandwidth);
      for (size_t i = 0; i < order.size(); ++i) {
        near_[static_cast<size_t>(servers_[static_cast<size_t>(order[i])])] = static_cast<int32_t>(i);
      }
    }
    const auto key = [&](int32_t i) {
      const auto& c = model_.servers()[static_cast<size_t>(i)];
      return std::make_tuple(!pinned_[static_cast<size_t>(i)], -SpeedGrid(c.rate), -c.memory, near_[static_cast<size_t>(i)],
                             c.leaf, c.rack, i);
    };
    std::sort(servers_.begin(), servers_.end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
    if (job.servers_max > 0 && servers_.size() > static_cast<size_t>(job.servers_max)) {
      servers_.resize(static_cast<size_t>(job.servers_max));
    }
    return OkStatus();
  }

  // Slots of a width in order, with what bounds need.
  struct Width {
    std::vector<Slot> slots;
    std::vector<size_t> cuts;
    double memory_max = 0;
  };

  const Width& OfWidth(int32_t tp) {
    auto [at, inserted] = widths_.try_emplace(tp);
    Width& width = at->second;
    if (!inserted) return width;
    int64_t grid_before = 0;
    for (const int32_t server : servers_) {
      const auto& c = model_.servers()[static_cast<size_t>(server)];
      const int64_t grid = SpeedGrid(c.rate);
      if (!width.slots.empty() && grid != grid_before && c.devices >= tp) width.cuts.push_back(width.slots.size());
      for (int32_t k = 0; k + tp <= c.devices; k += tp) {
        width.slots.push_back({server, k});
        width.memory_max = std::max(width.memory_max, c.memory);
        grid_before = grid;
      }
    }
    if (width.slots.size() <= kSmallSlots) {
      width.cuts.clear();
      for (size_t i = 1; i < width.slots.size(); ++i) width.cuts.push_back(i);
    }
    while (width.cuts.size() > kCutsMax && width.slots.size() > kSmallSlots) {  // thin out evenly
      std::vector<size_t> kept;
      for (size_t i = 0; i < width.cuts.size(); i += 2) kept.push_back(width.cuts[i]);
      width.cuts = std::move(kept);
    }
    width.cuts.push_back(width.slots.size());
    return width;
  }

  std::vector<int32_t> MicroBatches() const {
    const Job& job = model_.job();
    std::vector<int32_t> sizes;
    for (int64_t b = job.micro_batch_min; b <= std::min<int64_t>(job.micro_batch_max, job.global_batch); ++b) {
      if (job.global_batch % b != 0) continue;
      if (limits_.micro_batch > 0 && b != limits_.micro_batch) continue;
      sizes.push_back(static_cast<int32_t>(b));
    }
    while (sizes.size() > kMicroBatchesMax) {  // the ends stay
      std::vector<int32_t> kept;
      for (size_t i = 0; i < sizes.size(); ++i) {
        if (i % 2 == 0 || i + 1 == sizes.size()) kept.push_back(sizes[i]);
      }
      sizes = std::move(kept);
    }
    return sizes;
  }

  Status ListCombos() {
    const Job& job = model_.job();
    const std::vector<int32_t> micro_batches = MicroBatches();
    if (micro_batches.empty()) {
      return ResourceExhausted(fmt::format("no micro-batch of {} to {} samples divides the global batch of {}",
                                           job.micro_batch_min, job.micro_batch_max, job.global_batch));
    }
    int32_t devices_max = 0;
    for (const int32_t s : servers_) devices_max = std::max(devices_max, model_.servers()[static_cast<size_t>(s)].devices);
    bool any_width = false;
    for (int32_t tp = 1; tp <= devices_max; ++tp) {
      const int32_t fixed = limits_.tensor_parallel > 0 ? limits_.tensor_parallel : job.tensor_parallel;
      if (fixed > 0 ? tp != fixed : (tp & (tp - 1)) != 0) continue;
      if (!model_.Splits(tp)) continue;
      any_width = true;
      for (const int32_t b : micro_batches) AddCombos(tp, b);
    }
    if (!any_width) {
      return ResourceExhausted(job.tensor_parallel > devices_max
                                   ? fmt::format("tensor_parallel is {}, but no server has more than {} devices",
                                                 job.tensor_parallel, devices_max)
                                   : fmt::format("the job's layers do not divide by tensor_parallel {}", job.tensor_parallel));
    }
    if (combos_.empty()) return ResourceExhausted(WhyNoCombo());
    std::sort(combos_.begin(), combos_.end(), [](const Combo& a, const Combo& b) {
      return std::make_pair(a.bound, Tie(a)) < std::make_pair(b.bound, Tie(b));
    });
    return OkStatus();
  }

  std::string WhyNoCombo() const {
    const Job& job = model_.job();
    if (job.pipeline_stages > model_.layer_count()) {
      return fmt::format("pipeline_stages is {}, but the model has {} layers", job.pipeline_stages, model_.layer_count());
    }
    int64_t devices = 0;
    for (const int32_t s : servers_) devices += model_.servers()[static_cast<size_t>(s)].devices;
    const int64_t needed = static_cast<int64_t>(std::max(1, job.data_parallel)) * std::max(1, job.pipeline_stages) *
                           std::max(1, job.tensor_parallel);
    if (needed > devices) return fmt::format("{} devices may be used; the fixed sizes need {}", devices, needed);
    if (job.data_parallel > 0 && job.data_parallel > job.global_batch / job.micro_batch_min) {
      return fmt::format("data_parallel is {}, but the global batch has at most {} micro-batches", job.data_parallel,
                         job.global_batch / job.micro_batch_min);
    }
    return fmt::format("the fixed sizes (data_parallel {}, tensor_parallel {}, pipeline_stages {}) fit no set of the {} "
                       "servers", job.data_parallel, job.tensor_parallel, job.pipeline_stages, servers_.size());
  }

  void AddCombos(int32_t tp, int32_t b) {
    const Job& job = model_.job();
    const Width& width = OfWidth(tp);
    if (width.slots.empty()) return;
    const int64_t total = job.global_batch / b;
    // Samples per second of each slot over the whole model, the fastest first; sums of the first so many.
    std::vector<double> rates;
    std::map<int32_t, double> rate_of_kind;
    double watts_idle = kInfinite, work_joules = kInfinite, price = kInfinite;
    for (const Slot& slot : width.slots) {
      const auto& c = model_.servers()[static_cast<size_t>(slot.server)];
      auto [at, inserted] = rate_of_kind.try_emplace(c.kind, 0);
      if (inserted) {
        const StageTimes t = model_.RunTimes(slot.server, tp, b, 0, model_.layer_count());
        at->second = b / (t.forward + t.backward);
        watts_idle = std::min(watts_idle, c.watts_idle);
        const StageTimes alone = model_.RunTimes(slot.server, 1, 1, 0, model_.layer_count());
        work_joules = std::min(work_joules, (alone.forward + alone.backward) * (c.watts_max - c.watts_idle));
        price = std::min(price, c.price / c.devices);
      }
      rates.push_back(at->second);
    }
    std::sort(rates.begin(), rates.end(), std::greater<>());
    std::vector<double> sums(rates.size() + 1, 0);
    for (size_t i = 0; i < rates.size(); ++i) sums[i + 1] = sums[i] + rates[i];
    const int32_t layers = model_.layer_count();
    for (const size_t cut : width.cuts) {
      const auto pp_max = static_cast<int32_t>(std::min<size_t>({static_cast<size_t>(layers), cut,
                                                                 static_cast<size_t>(kStagesMax)}));
      for (int32_t pp = 1; pp <= pp_max; ++pp) {
        if (job.pipeline_stages > 0 && pp != job.pipeline_stages) continue;
        if (limits_.pipeline_stages_min > 0 && pp < limits_.pipeline_stages_min) continue;
        if (limits_.pipeline_stages_max > 0 && pp > limits_.pipeline_stages_max) continue;
        for (const int32_t dp : Replicas(cut, pp, total)) {
          Combo combo{tp, b, pp, dp, cut};
          const auto slots = static_cast<size_t>(dp) * static_cast<size_t>(pp);
          // A micro-batch crosses the whole model once on its replica; the others follow at the replica's rate, chunked
          // placements fill the pipeline faster.
          const double alone = b / rates[0] / (pp > 1 ? job.interleave : 1);
          const double samples = static_cast<double>(total - dp) * b;
          combo.bound_seconds = std::max(static_cast<double>(total) * b / sums[slots], alone + samples / sums[slots]);
          switch (job.objective) {
            case Objective::kThroughput: combo.bound = combo.bound_seconds; break;
            case Objective::kCost:
              combo.bound = combo.bound_seconds / 3600 * price * tp * static_cast<double>(slots);
              break;
            case Objective::kEnergy:
              // Collectives stretch a tensor-parallel run, not its energy: only the work of one device is sure.
              combo.bound = combo.bound_seconds * watts_idle * tp * static_cast<double>(slots);
              break;
          }
          combos_.push_back(combo);
        }
      }
    }
  }

  std::vector<int32_t> Replicas(size_t slots, int32_t pp, int64_t total) const {
    const Job& job = model_.job();
    const auto most = static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(slots) / pp, total));
    if (most < 1) return {};
    if (job.data_parallel > 0) {
      return job.data_parallel <= most ? std::vector<int32_t>{job.data_parallel} : std::vector<int32_t>{};
    }
    std::vector<int32_t> widths = {most};
    const auto add = [&](int32_t dp) {
      if (dp >= 1 && std::find(widths.begin(), widths.end(), dp) == widths.end()) widths.push_back(dp);
    };
    if (slots <= kSmallSlots) {
      for (int32_t dp = most; dp >= 1; --dp) add(dp);
    }
    // The fewest replicas with the same greatest share.
    const int64_t share = (total + most - 1) / most;
    add(static_cast<int32_t>((total + share - 1) / share));
    if (job.objective != Objective::kThroughput || slots <= kRefineSlots) {
      for (int32_t dp = most / 2; dp >= 1; dp /= 2) add(dp);
    }
    return widths;
  }

  // ---- one combination: several layouts, the best of them.
  Tried Try(const Combo& combo) {
    Tried tried;
    tried.combo = combo;
    if (MemoryHopeless(combo)) return tried;
    std::vector<Layout> layouts = Layouts(combo);
    const size_t count = layouts[0].slots.size();
    const bool exact = count <= kRefineSlots;
    for (Layout& layout : layouts) {
      CutLayers(model_, &layout);
      work_ += static_cast<int64_t>(count) * 8 + static_cast<int64_t>(model_.layer_count()) * model_.layer_count() * 4;
      if (!layout.bounds.empty()) Consider(layout, exact, &tried);
    }
    if (count > 1 && combo.dp == 1) ExactChain(&tried);
    if (!tried.found && count <= kSmallSlots) Repair(layouts[0], &tried);
    // Only what could still win is worth refining.
    const bool small = OfWidth(combo.tp).slots.size() <= kSmallSlots;
    const double worth = small ? kWorthRefiningSmall : kWorthRefining;
    if (!exact || count < 2 || !tried.found || tried.score >= best_score_ * worth) return tried;
    Refine(&tried);
    if (small && Uneven(OfWidth(combo.tp).slots)) RefineFromMoreStarts(layouts, &tried);
    return tried;
  }

  // An exchange of two devices can be a step down on the way to the best: other starts, the same for the same input.
  void RefineFromMoreStarts(const std::vector<Layout>& layouts, Tried* tried) {
    const std::vector<Slot>& all = OfWidth(tried->combo.tp).slots;
    const Combo& combo = tried->combo;
    Prng prng(static_cast<uint64_t>(combo.tp * 1'000'003 + combo.pp * 10'007 + combo.dp * 101 + combo.micro_batch));
    std::vector<Layout> starts = layouts;
    for (size_t k = all.size() <= kTinySlots ? kStartsTiny : kStartsSmall; k > 0; --k) {
      std::vector<Slot> slots = all;
      for (size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[prng.UpTo(i - 1)]);
      Layout layout = Shape(combo);
      layout.slots.assign(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(layouts[0].slots.size()));
      CutLayers(model_, &layout);
      starts.push_back(std::move(layout));
    }
    for (const Layout& layout : starts) {
      if (layout.bounds.empty() || work_ > limits_.work_budget) continue;
      Tried other;
      other.combo = combo;
      if (!Consider(layout, true, &other)) continue;
      Refine(&other);
      if (other.score < tried->score * (1 - 1e-12)) *tried = std::move(other);
    }
  }

  bool Consider(const Layout& layout, bool exact, Tried* tried) {
    ++plan_.layouts_tried;
    const int64_t layers = model_.layer_count();
    work_ += static_cast<int64_t>(layout.slots.size()) * 8 + layers * 16 + layers * layers / layout.pipeline_stages / 2;
    Evaluation evaluation = model_.Evaluate(layout, exact);
    if (evaluation.verdict != Verdict::kFits || !Allowed(layout, evaluation)) return false;
    const double score = Score(model_, evaluation);
    if (tried->found && score >= tried->score * (1 - 1e-12)) return false;
    tried->found = true;
    tried->layout = layout;
    tried->evaluation = std::move(evaluation);
    tried->score = score;
    return true;
  }

  bool Allowed(const Layout& layout, const Evaluation& evaluation) const {
    const Job& job = model_.job();
    if (evaluation.servers_used < job.servers_min) return false;
    if (job.spread == Spread::kRequired && evaluation.domains_min < 2) return false;
    if (job.pinned.empty()) return true;
    std::set<int32_t> used;
    for (const Slot& slot : layout.slots) used.insert(slot.server);
    for (size_t i = 0; i < pinned_.size(); ++i) {
      if (pinned_[i] && !used.contains(static_cast<int32_t>(i))) return false;
    }
    return true;
  }

  // Not even the parameters fit, however the layers are cut.
  bool MemoryHopeless(const Combo& combo) {
    const Job& job = model_.job();
    const double optimizer = job.optimizer_bytes / (job.shard_optimizer ? combo.dp : 1);
    double parameters = 0;
    for (const LayerCost& l : model_.layers()) parameters += l.parameters;
    // A tied head shares its parameters with the embedding where both are on one stage.
    if (combo.pp == 1 && job.transformer.tied && job.transformer.vocabulary > 0) parameters -= model_.layers().back().parameters;
    const double state = parameters / combo.tp * (job.weight_bytes + job.gradient_bytes + optimizer);
    return state / combo.pp + job.reserve_bytes > OfWidth(combo.tp).memory_max * (1 + 1e-9);
  }

  static Layout Shape(const Combo& combo) {
    Layout layout;
    layout.data_parallel = combo.dp;
    layout.tensor_parallel = combo.tp;
    layout.pipeline_stages = combo.pp;
    layout.micro_batch = combo.micro_batch;
    return layout;
  }

  std::vector<Layout> Layouts(const Combo& combo) {
    const Width& width = OfWidth(combo.tp);
    const auto used = static_cast<size_t>(combo.dp) * static_cast<size_t>(combo.pp);
    const std::vector<Slot> slots(width.slots.begin(), width.slots.begin() + static_cast<std::ptrdiff_t>(used));
    std::vector<Layout> layouts;
    Layout layout = Shape(combo);
    layout.slots = slots;  // pipelines of neighbours
    layouts.push_back(layout);
    if (combo.dp == 1 || combo.pp == 1) {
      if (combo.pp > 1 && Uneven(slots)) {
        std::reverse(layout.slots.begin(), layout.slots.end());
        layouts.push_back(layout);
      }
      return layouts;
    }
    // Stages of neighbours: column s takes the slots from s * dp on. Fast first, and slow first where speeds differ.
    const auto columns = [&](bool reversed) {
      for (int32_t s = 0; s < combo.pp; ++s) {
        const int32_t from = reversed ? combo.pp - 1 - s : s;
        for (int32_t r = 0; r < combo.dp; ++r) {
          layout.slots[layout.At(r, s)] = slots[static_cast<size_t>(from) * static_cast<size_t>(combo.dp) +
                                                static_cast<size_t>(r)];
        }
      }
      layouts.push_back(layout);
    };
    columns(false);
    if (Uneven(slots)) columns(true);
    // Pipelines over neighbouring servers, each server the same stage of several replicas.
    const int32_t group = SlotsPerServer(slots);
    if (group > 1 && combo.dp % group == 0) {
      const size_t block = static_cast<size_t>(group) * static_cast<size_t>(combo.pp);
      for (int32_t r = 0; r < combo.dp; ++r) {
        const size_t base = static_cast<size_t>(r / group) * block + static_cast<size_t>(r % group);
        for (int32_t s = 0; s < combo.pp; ++s) {
          layout.slots[layout.At(r, s)] = slots[base + static_cast<size_t>(s) * static_cast<size_t>(group)];
        }
      }
      layouts.push_back(layout);
    }
    return layouts;
  }

  bool Uneven(const std::vector<Slot>& slots) const {
    const auto kind = [&](const Slot& s) { return model_.servers()[static_cast<size_t>(s.server)].kind; };
    return std::any_of(slots.begin(), slots.end(), [&](const Slot& s) { return kind(s) != kind(slots[0]); });
  }

  // Slots of each server where all have the same number; 0 otherwise.
  static int32_t SlotsPerServer(const std::vector<Slot>& slots) {
    int32_t group = 0, run = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      ++run;
      if (i + 1 < slots.size() && slots[i + 1].server == slots[i].server) continue;
      if (group != 0 && run != group) return 0;
      group = run;
      run = 0;
    }
    return group;
  }

  // Small clusters: exchanges of two devices, of a device with an idle one, and moves of a boundary, while they help.
  void Refine(Tried* tried) {
    const Width& width = OfWidth(tried->combo.tp);
    const bool exchange = width.slots.size() <= kRefineSlots && (Uneven(width.slots) || model_.has_link_overrides());
    for (int32_t round = 0; round < kRefineRounds && work_ <= limits_.work_budget; ++round) {
      const double before = tried->score;
      if (exchange) Exchange(width, tried);
      MoveBoundaries(tried);
      if (tried->score >= before) break;
    }
  }

  void Exchange(const Width& width, Tried* tried) {
    std::vector<Slot> idle;
    for (const Slot& slot : width.slots) {
      if (std::find(tried->layout.slots.begin(), tried->layout.slots.end(), slot) == tried->layout.slots.end()) {
        idle.push_back(slot);
      }
    }
    const size_t count = tried->layout.slots.size();
    for (size_t i = 0; i < count; ++i) {
      for (size_t k = i + 1; k < count + idle.size(); ++k) {
        Slot& other = k < count ? tried->layout.slots[k] : idle[k - count];
        if (tried->layout.slots[i].server == other.server) continue;
        Layout layout = tried->layout;
        std::swap(layout.slots[i], k < count ? layout.slots[k] : other);
        // With the boundaries as they are, then with the best for the new devices.
        bool better = Consider(layout, true, tried);
        if (!better && count <= kSmallSlots && layout.pipeline_stages > 1) {
          Layout cut = layout;
          CutLayers(model_, &cut);
          better = !cut.bounds.empty() && cut.bounds != layout.bounds && Consider(cut, true, tried);
        }
        if (!better && k >= count) std::swap(layout.slots[i], other);  // the idle one stays idle
        if (work_ > limits_.work_budget) return;
      }
    }
  }

  void MoveBoundaries(Tried* tried) {
    for (int32_t s = 1; s < tried->layout.pipeline_stages; ++s) {
      for (const int32_t move : {-1, 1}) {
        for (;;) {
          Layout layout = tried->layout;
          int32_t& bound = layout.bounds[static_cast<size_t>(s)];
          bound += move;
          if (bound <= layout.bounds[static_cast<size_t>(s - 1)] || bound >= layout.bounds[static_cast<size_t>(s + 1)]) break;
          if (!Consider(layout, true, tried)) break;
        }
      }
    }
  }

  // One pipeline of a few devices: every ordered choice of them and every cut, by the greatest time of a stage or a
  // transfer, within memory. Dynamic programming over subsets; a stage's number is the size of the subset before it.
  void ExactChain(Tried* tried) {
    const Width& width = OfWidth(tried->combo.tp);
    const size_t count = width.slots.size(), layers = static_cast<size_t>(model_.layer_count());
    const auto stages = static_cast<size_t>(tried->combo.pp);
    if (count > kPlacementDevicesMax) return;
    const size_t masks = size_t{1} << count;
    const double cells_work = static_cast<double>(masks * count * count * layers * layers) / 2;
    if (cells_work > kExactChainWork) return;
    work_ += static_cast<int64_t>(cells_work) / 4;
    Layout layout = Shape(tried->combo);
    const int64_t total = model_.job().global_batch / layout.micro_batch;
    const auto run_at = [&](size_t begin, size_t end) { return begin * (layers + 1) + end; };
    std::vector<std::vector<double>> times(count, std::vector<double>((layers + 1) * (layers + 1), 0));
    std::vector<std::vector<double>> memory(stages, times[0]);
    for (size_t i = 0; i < layers; ++i) {
      for (size_t j = i + 1; j <= layers; ++j) {
        const auto begin = static_cast<int32_t>(i), end = static_cast<int32_t>(j);
        for (size_t d = 0; d < count; ++d) {
          const StageTimes t = model_.RunTimes(width.slots[d].server, layout.tensor_parallel, layout.micro_batch, begin, end);
          times[d][run_at(i, j)] = t.forward + t.backward;
        }
        for (size_t s = 0; s < stages; ++s) {
          memory[s][run_at(i, j)] = model_.MemoryNeeded(layout, static_cast<int32_t>(s), begin, end, total);
        }
      }
    }
    struct Cell {
      double worst = kInfinite, sum = kInfinite;
      size_t layer = 0, previous = 0;
    };
    const auto at = [&](size_t j, size_t mask, size_t last) { return (j * masks + mask) * count + last; };
    std::vector<Cell> cells((layers + 1) * masks * count);
    for (size_t mask = 1; mask < masks; ++mask) {
      const auto stage = static_cast<size_t>(std::popcount(mask)) - 1;
      if (stage >= stages) continue;
      for (size_t last = 0; last < count; ++last) {
        if ((mask >> last & 1) == 0) continue;
        const size_t rest = mask & ~(size_t{1} << last);
        const double limit = model_.servers()[static_cast<size_t>(width.slots[last].server)].memory;
        for (size_t previous = 0; previous < count; ++previous) {
          if (rest == 0 ? previous > 0 : (rest >> previous & 1) == 0) continue;
          for (size_t i = rest == 0 ? 0 : 1; i < (rest == 0 ? 1 : layers); ++i) {
            const Cell start = rest == 0 ? Cell{0, 0, 0, 0} : cells[at(i, rest, previous)];
            if (start.worst == kInfinite) continue;
            const double move = rest == 0 ? 0 : model_.TransferTime(width.slots[previous].server, width.slots[last].server,
                                                                    layout.tensor_parallel, layout.micro_batch,
                                                                    static_cast<int32_t>(i));
            for (size_t j = i + 1; j <= layers && memory[stage][run_at(i, j)] <= limit; ++j) {
              const double own = times[last][run_at(i, j)];
              const double worst = std::max({start.worst, own, move});
              const double sum = start.sum + own + 2 * move;
              Cell& cell = cells[at(j, mask, last)];
              if (worst < cell.worst || (worst == cell.worst && sum < cell.sum)) cell = {worst, sum, i, previous};
            }
          }
        }
      }
    }
    size_t best_mask = 0, best_last = 0;
    double best = kInfinite;
    for (size_t mask = 1; mask < masks; ++mask) {
      if (static_cast<size_t>(std::popcount(mask)) != stages) continue;
      for (size_t last = 0; last < count; ++last) {
        const Cell& cell = cells[at(layers, mask, last)];
        // Of the whole batch: every micro-batch but the first costs the worst.
        const double cost = cell.worst == kInfinite ? kInfinite : cell.sum + static_cast<double>(total - 1) * cell.worst;
        if (cost >= best) continue;
        best = cost;
        best_mask = mask;
        best_last = last;
      }
    }
    if (best == kInfinite) return;
    layout.bounds.assign(stages + 1, model_.layer_count());
    layout.slots.resize(stages);
    for (size_t s = stages, j = layers, mask = best_mask, last = best_last; s-- > 0;) {
      const Cell& cell = cells[at(j, mask, last)];
      layout.slots[s] = width.slots[last];
      layout.bounds[s] = static_cast<int32_t>(cell.layer);
      mask &= ~(size_t{1} << last);
      j = cell.layer;
      last = cell.previous;
    }
    Consider(layout, true, tried);
  }

  // Nothing fits as the devices stand: exchange them while the least overshoot of memory falls.
  void Repair(Layout layout, Tried* tried) {
    const std::vector<Slot>& all = OfWidth(tried->combo.tp).slots;
    if (!Uneven(all)) return;
    double ratio = Overshoot(layout).ratio();
    std::vector<Slot> idle;
    for (const Slot& slot : all) {
      if (std::find(layout.slots.begin(), layout.slots.end(), slot) == layout.slots.end()) idle.push_back(slot);
    }
    for (bool better = true; better && ratio > 1;) {
      better = false;
      for (size_t i = 0; i < layout.slots.size() && ratio > 1; ++i) {
        for (size_t k = i + 1; k < layout.slots.size() + idle.size() && ratio > 1; ++k) {
          Slot& other = k < layout.slots.size() ? layout.slots[k] : idle[k - layout.slots.size()];
          if (layout.slots[i].server == other.server) continue;
          std::swap(layout.slots[i], other);
          const double now = Overshoot(layout).ratio();
          if (now < ratio * (1 - 1e-12)) {
            ratio = now;
            better = true;
          } else {
            std::swap(layout.slots[i], other);
          }
          if (work_ > limits_.work_budget) return;
        }
      }
    }
    if (ratio > 1) return;
    CutLayers(model_, &layout);
    if (!layout.bounds.empty()) Consider(layout, true, tried);
  }

  // ---- why not
  struct Shortage {
    int32_t stage = 0;
    double needed = 0, limit = 0;
    double ratio() const { return limit > 0 ? needed / limit : kInfinite; }
  };
  Shortage LeastMemory(const Combo& combo) { return Overshoot(Layouts(combo)[0]); }
  // The stage that is worst off when the layers are cut for memory alone.
  Shortage Overshoot(const Layout& layout) {
    const int32_t stages = layout.pipeline_stages, replicas = layout.data_parallel;
    work_ += static_cast<int64_t>(model_.layer_count()) * model_.layer_count() * stages / 2;
    std::vector<double> limits(static_cast<size_t>(stages), kInfinite);
    for (int32_t r = 0; r < replicas; ++r) {
      for (int32_t s = 0; s < stages; ++s) {
        double& limit = limits[static_cast<size_t>(s)];
        limit = std::min(limit, model_.servers()[static_cast<size_t>(layout.slots[layout.At(r, s)].server)].memory);
      }
    }
    const int64_t total = model_.job().global_batch / layout.micro_batch;
    const int64_t share = (total + replicas - 1) / replicas;
    const auto need = [&](int32_t s, int32_t begin, int32_t end) { return model_.MemoryNeeded(layout, s, begin, end, share); };
    const auto bounds = CutChain(
        model_.layer_count(), stages,
        [&](int32_t s, int32_t begin, int32_t end) { return need(s, begin, end) / limits[static_cast<size_t>(s)]; },
        [](int32_t, int32_t) { return 0.0; });
    Shortage shortage;
    double worst = -1;
    for (int32_t s = 0; s < stages && !bounds.empty(); ++s) {
      const double needed = need(s, bounds[static_cast<size_t>(s)], bounds[static_cast<size_t>(s + 1)]);
      if (needed / limits[static_cast<size_t>(s)] <= worst) continue;
      worst = needed / limits[static_cast<size_t>(s)];
      shortage = {s, needed, limits[static_cast<size_t>(s)]};
    }
    return shortage;
  }

  std::string WhyNotFit(const Combo& combo) {
    const Shortage shortage = LeastMemory(combo);
    if (shortage.needed > shortage.limit) {
      return fmt::format("stage {} needs {} on each device and has {}", shortage.stage, BytesText(shortage.needed),
                         BytesText(shortage.limit));
    }
    const Job& job = model_.job();
    Layout layout = Layouts(combo)[0];
    CutLayers(model_, &layout);
    if (!layout.bounds.empty()) {
      const Evaluation e = model_.Evaluate(layout, false);
      if (e.verdict == Verdict::kUnconnected) return fmt::format("the servers of stage {} are not connected", e.stage);
      if (e.verdict == Verdict::kFits && e.servers_used < job.servers_min) {
        return fmt::format("it uses {} servers, fewer than servers_min {}", e.servers_used, job.servers_min);
      }
      if (e.verdict == Verdict::kFits && job.spread == Spread::kRequired && e.domains_min < 2) {
        return "all replicas of a stage are in one failure domain";
      }
      if (e.verdict == Verdict::kFits) return "it leaves out a pinned server";
    }
    return "no cut of the layers fits the memory of all its devices";
  }

  template <typename Shapes>
  Status Refuse(const Shapes& shapes) {
    // The shape that comes nearest: least overshoot of memory first.
    const Tried* nearest = nullptr;
    double nearest_ratio = kInfinite;
    size_t looked = 0;
    for (const auto& [shape, tried] : shapes) {
      if (++looked > 400) break;
      const double ratio = LeastMemory(tried.combo).ratio();
      if (nearest == nullptr || ratio < nearest_ratio) {
        nearest = &tried;
        nearest_ratio = ratio;
      }
    }
    if (nearest == nullptr) return ResourceExhausted("no layout was found within the search's budget");
    return ResourceExhausted(fmt::format(
        "no layout was found that runs the job on these {} servers; the nearest is {}: {}", servers_.size(),
        ShapeText(nearest->combo.dp, nearest->combo.pp, nearest->combo.tp), WhyNotFit(nearest->combo)));
  }

  std::string WhySlower(const Tried& other, const Tried& winner) const {
    const TimeParts &a = winner.evaluation.parts, &b = other.evaluation.parts;
    const std::pair<const char*, double> grown[] = {
        {"computing on its slowest stage", b.compute - a.compute},
        {"collectives inside tensor-parallel groups", b.tensor - a.tensor},
        {"transfers between stages", b.transfer - a.transfer},
        {"filling and draining the pipeline", b.bubble - a.bubble},
        {"gradient all-reduce that backward does not hide", b.reduce - a.reduce},
        {"the optimizer step", b.update - a.update}};
    const auto most = *std::max_element(std::begin(grown), std::end(grown),
                                        [](const auto& x, const auto& y) { return x.second < y.second; });
    const double x = winner.evaluation.step_seconds, y = other.evaluation.step_seconds;
    const Objective objective = model_.job().objective;
    if (objective == Objective::kCost && other.evaluation.price > winner.evaluation.price) {
      return fmt::format("costs {:.4g} a step against {:.4g}", other.evaluation.price, winner.evaluation.price);
    }
    if (objective == Objective::kEnergy && other.evaluation.joules > winner.evaluation.joules) {
      return fmt::format("takes {:.4g} J a step against {:.4g}", other.evaluation.joules, winner.evaluation.joules);
    }
    if (y > x) {
      return fmt::format("{} a step, {:.1f} % longer; most of it is {} (+{})", SecondsText(y), (y / x - 1) * 100, most.first,
                         SecondsText(std::max(0.0, most.second)));
    }
    if (other.evaluation.domains_min < 2 && winner.evaluation.domains_min >= 2) {
      return fmt::format("{} a step, but all replicas of a stage are in one failure domain", SecondsText(y));
    }
    return fmt::format("{} a step on {} servers; no better than the plan on {}", SecondsText(y), other.evaluation.servers_used,
                       winner.evaluation.servers_used);
  }

  template <typename Shapes>
  void AddAlternatives(const Shapes& shapes, const Tried& winner) {
    std::vector<const Tried*> order;
    for (const auto& [shape, tried] : shapes) {
      const bool same = tried.combo.dp == winner.combo.dp && tried.combo.tp == winner.combo.tp &&
                        tried.combo.pp == winner.combo.pp;
      if (!same) order.push_back(&tried);
    }
    const auto seconds = [](const Tried* t) { return t->found ? t->score : t->combo.bound; };
    std::sort(order.begin(), order.end(), [&](const Tried* a, const Tried* b) {
      return std::make_pair(seconds(a), Tie(a->combo)) < std::make_pair(seconds(b), Tie(b->combo));
    });
    // At most one that does not fit: it is worth knowing, more of them are not.
    bool misfit = false;
    for (const Tried* tried : order) {
      if (plan_.alternatives.size() == kAlternatives) break;
      if (!tried->found && misfit) continue;
      misfit = misfit || !tried->found;
      const Combo& c = tried->combo;
      plan_.alternatives.push_back({c.dp, c.tp, c.pp, c.micro_batch, tried->found,
                                    tried->found ? tried->evaluation.step_seconds : c.bound_seconds,
                                    tried->found ? WhySlower(*tried, winner) : WhyNotFit(c)});
    }
  }

  const CostModel& model_;
  const SearchLimits limits_;
  std::vector<int32_t> servers_;   // those that may be used, in order
  std::vector<bool> pinned_;       // by server
  std::vector<int32_t> near_;      // by server: its place in the order of the bandwidth graph
  std::map<int32_t, Width> widths_;
  std::vector<Combo> combos_;
  int64_t work_ = 0;
  double best_score_ = kInfinite;  // of all shapes so far
  Plan plan_;
};

}  // namespace

Result<Plan> MakePlan(const CostModel& model, const SearchLimits& limits) { return Search(model, limits).Run(); }

Result<Plan> MakePlan(const Cluster& cluster, const Job& job, const Tables& tables, const Calibration& calibration) {
  EVERSTEP_ASSIGN_OR_RETURN(const CostModel model, CostModel::Create(cluster, job, tables, calibration));
  return MakePlan(model);
}

void CutLayers(const CostModel& model, Layout* layout) {
  const int32_t stages = layout->pipeline_stages, replicas = layout->data_parallel;
  const int64_t total = model.job().global_batch / layout->micro_batch;
  const int64_t share = std::max<int64_t>(1, (total + replicas - 1) / replicas);
  struct Column {
    int32_t server = 0;      // whose times stand for the column
    double scale = 1;        // the column's mean rate against that server's, inverted
    double memory = kInfinite;
  };
  std::vector<Column> columns(static_cast<size_t>(stages));
  for (int32_t s = 0; s < stages; ++s) {
    Column& column = columns[static_cast<size_t>(s)];
    column.server = layout->slots[layout->At(0, s)].server;
    double rates = 0;
    for (int32_t r = 0; r < replicas; ++r) {
      const auto& c = model.servers()[static_cast<size_t>(layout->slots[layout->At(r, s)].server)];
      rates += c.rate;
      column.memory = std::min(column.memory, c.memory);
    }
    column.scale = model.servers()[static_cast<size_t>(column.server)].rate / (rates / replicas);
  }
  const auto run = [&](int32_t s, int32_t begin, int32_t end) {
    const Column& column = columns[static_cast<size_t>(s)];
    if (model.MemoryNeeded(*layout, s, begin, end, share) > column.memory) return kInfinite;
    const StageTimes t = model.RunTimes(column.server, layout->tensor_parallel, layout->micro_batch, begin, end);
    return (t.forward + t.backward) * column.scale;
  };
  // The slowest of a few replicas' links stands for the boundary.
  const int32_t stride = std::max(1, replicas / 8);
  const auto joint = [&](int32_t s, int32_t begin) {
    double slowest = 0;
    for (int32_t r = 0; r < replicas; r += stride) {
      slowest = std::max(slowest, model.TransferTime(layout->slots[layout->At(r, s - 1)].server,
                                                     layout->slots[layout->At(r, s)].server, layout->tensor_parallel,
                                                     layout->micro_batch, begin));
    }
    return slowest;
  };
  layout->bounds = CutChain(model.layer_count(), stages, run, joint);
}

double Score(const CostModel& model, const Evaluation& e) {
  const Job& job = model.job();
  const double base = job.objective == Objective::kCost     ? e.price
                      : job.objective == Objective::kEnergy ? e.joules
                                                            : e.step_seconds;
  return job.spread == Spread::kPreferred && e.domains_min < 2 && model.domain_count() > 1 ? base * kSpreadPenalty : base;
}

Status CheckPlan(const CostModel& model, const Plan& plan) {
  const Layout& l = plan.layout;
  const Job& job = model.job();
  const auto broken = [](const std::string& rule) { return Internal("plan: " + rule); };
  if (l.bounds.size() != static_cast<size_t>(l.pipeline_stages + 1) || l.bounds.front() != 0 ||
      l.bounds.back() != model.layer_count()) {
    return broken("the stages do not hold all layers");
  }
  for (size_t s = 0; s + 1 < l.bounds.size(); ++s) {
    if (l.bounds[s] >= l.bounds[s + 1]) return broken(fmt::format("stage {} holds no layer", s));
  }
  if (l.slots.size() != static_cast<size_t>(l.data_parallel) * static_cast<size_t>(l.pipeline_stages)) {
    return broken("slots do not match the shape");
  }
  std::set<std::pair<int32_t, int32_t>> devices;
  std::set<int32_t> used;
  for (const Slot& slot : l.slots) {
    const auto& c = model.servers()[static_cast<size_t>(slot.server)];
    if (!c.usable) return broken("a server is used that must not be");
    if (slot.device < 0 || slot.device + l.tensor_parallel > c.devices) return broken("a group leaves its server");
    for (int32_t k = 0; k < l.tensor_parallel; ++k) {
      if (!devices.emplace(slot.server, slot.device + k).second) return broken("a device is used twice");
    }
    used.insert(slot.server);
  }
  int64_t micro_batches = 0;
  if (l.shares.size() != static_cast<size_t>(l.data_parallel)) return broken("shares do not match the replicas");
  for (const int64_t share : l.shares) {
    if (share < 1) return broken("a replica has no share");
    micro_batches += share;
  }
  if (micro_batches * l.micro_batch != job.global_batch) return broken("the shares are not the global batch");
  if (l.micro_batch < job.micro_batch_min || l.micro_batch > job.micro_batch_max) return broken("micro-batch out of bounds");
  if (!model.Splits(l.tensor_parallel)) return broken("heads do not divide by the width");
  if (job.tensor_parallel > 0 && l.tensor_parallel != job.tensor_parallel) return broken("tensor_parallel is fixed");
  if (job.pipeline_stages > 0 && l.pipeline_stages != job.pipeline_stages) return broken("pipeline_stages is fixed");
  if (job.data_parallel > 0 && l.data_parallel != job.data_parallel) return broken("data_parallel is fixed");
  for (size_t i = 0; i < model.cluster().servers.size(); ++i) {
    const ServerId& id = model.cluster().servers[i].id;
    const bool pinned = std::find(job.pinned.begin(), job.pinned.end(), id) != job.pinned.end();
    if (pinned && !used.contains(static_cast<int32_t>(i))) return broken("a pinned server is left out");
  }
  const auto servers = static_cast<int32_t>(used.size());
  if (servers < job.servers_min || (job.servers_max > 0 && servers > job.servers_max)) return broken("number of servers");
  const int64_t most = *std::max_element(l.shares.begin(), l.shares.end());
  for (int32_t s = 0; s < l.pipeline_stages; ++s) {
    const double needed = model.MemoryNeeded(l, s, l.bounds[static_cast<size_t>(s)], l.bounds[static_cast<size_t>(s + 1)], most);
    for (int32_t r = 0; r < l.data_parallel; ++r) {
      if (needed > model.servers()[static_cast<size_t>(l.slots[l.At(r, s)].server)].memory) {
        return broken(fmt::format("stage {} exceeds the memory of its device in replica {}", s, r));
      }
    }
  }
  if (!(plan.evaluation.step_seconds > 0) || !std::isfinite(plan.evaluation.step_seconds)) return broken("no step time");
  return OkStatus();
}

std::string ShapeText(int32_t dp, int32_t pp, int32_t tp) {
  const auto plural = [](int32_t n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); };
  return plural(dp, "replica") + " x " + plural(pp, "stage") + " x " + plural(tp, "device");
}

std::string BytesText(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string SecondsText(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.1f} us", seconds * 1e6);
}

}  // namespace everstep::planner
