#include "controller/core/planner/replan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "controller/core/planner/exact.h"

namespace everstep::planner {
namespace {

constexpr double kNearLeaf = 0.03;           // a spare of the same leaf may be this much slower
constexpr size_t kExactSwapWork = 300'000;   // visits of slots up to which spares are compared by the whole model
constexpr size_t kSmallSlots = 64;           // up to here a re-shape is searched freely
constexpr double kIndifferent = 0.01;        // losses nearer than this share of the horizon's samples count as equal
constexpr double kMatchLoss = 1.01;          // a re-shape may be this much slower when it keeps more state in place

class Replanner {
 public:
  Replanner(const CostModel& model, const ReplanInput& input) : model_(model), input_(input), old_(input.running.layout) {}

  Result<Replan> Run() {
    EVERSTEP_RETURN_IF_ERROR(Check());
    Locate();
    result_.throughput_before = static_cast<double>(model_.job().global_batch) / input_.running.step_seconds;
    result_.groups_lost = lost_;
    if (lost_ == 0) {
      Keep();
      Reshare();
    } else {
      Swap();
      Shrink(false);
      Shrink(true);
    }
    Reshape();
    if (lost_ > 0) Wait();
    return Choose();
  }

 private:
  Status Check() const {
    const Running& r = input_.running;
    const auto roles = static_cast<size_t>(old_.data_parallel) * static_cast<size_t>(old_.pipeline_stages);
    const bool sizes = old_.data_parallel > 0 && old_.pipeline_stages > 0 && old_.tensor_parallel > 0 &&
                       old_.slots.size() == roles && old_.shares.size() == static_cast<size_t>(old_.data_parallel) &&
                       old_.bounds.size() == static_cast<size_t>(old_.pipeline_stages + 1) && old_.bounds.front() == 0 &&
                       old_.bounds.back() == model_.layer_count() &&
                       std::is_sorted(old_.bounds.begin(), old_.bounds.end());
    if (!sizes) return InvalidArgument("the running plan does not belong to this job");
    for (const Slot& slot : old_.slots) {
      if (slot.server < 0 || slot.server >= static_cast<int32_t>(r.servers.size())) {
        return InvalidArgument("the running plan names a server that it does not list");
      }
    }
    if (!(r.step_seconds > 0) || !std::isfinite(r.step_seconds)) return InvalidArgument("running: the step time is not positive");
    for (const double t : {input_.detect_seconds, input_.connect_seconds, input_.start_cold_seconds, input_.start_warm_seconds,
                           input_.horizon_seconds, input_.wait_seconds, input_.gain_min}) {
      if (!(t >= 0) || !std::isfinite(t)) return InvalidArgument("re-plan: a time is not a positive number");
    }
    if (!(input_.store_bandwidth > 0)) return InvalidArgument("re-plan: the store's bandwidth is not positive");
    return OkStatus();
  }

  // Old slots by the numbers of the new snapshot; what is gone gets server -1.
  void Locate() {
    std::map<ServerId, int32_t> index;
    for (size_t i = 0; i < model_.servers().size(); ++i) {
      if (model_.servers()[i].usable) index[model_.cluster().servers[i].id] = static_cast<int32_t>(i);
    }
    index_ = index;
    std::vector<int32_t> now(input_.running.servers.size(), -1);
    for (size_t i = 0; i < now.size(); ++i) {
      const auto at = index.find(input_.running.servers[i]);
      if (at != index.end()) now[i] = at->second;
    }
    for (size_t i = 0; i < old_.slots.size(); ++i) {
      Slot& slot = old_.slots[i];
      slot.server = now[static_cast<size_t>(slot.server)];
      const auto stage = static_cast<int32_t>(i % static_cast<size_t>(old_.pipeline_stages));
      if (slot.server >= 0 && slot.device + old_.tensor_parallel <= model_.servers()[static_cast<size_t>(slot.server)].devices) {
        held_[{slot.server, slot.device}] = stage;
        holders_[stage].push_back(slot);
        for (int32_t k = 0; k < old_.tensor_parallel; ++k) taken_.emplace(slot.server, slot.device + k);
      } else {
        slot.server = -1;
        ++lost_;
      }
    }
    for (const ServerId& id : input_.warm) warm_.insert(id);
  }

  // ---- what an option costs

  struct Load {
    double in = 0, out = 0;
  };

  // Bytes, sources and times of making `layout` true. False: some state has no source.
  bool Move(ReplanOption* option) const {
    const Layout& layout = option->layout;
    const Job& job = model_.job();
    std::map<int32_t, Load> loads;
    double store_bytes = 0;
    int64_t replay = 0;
    bool cold = false, warm = false;
    const double optimizer = job.optimizer_bytes / (job.shard_optimizer ? layout.data_parallel : 1);
    const double per_parameter = job.weight_bytes + optimizer;
    // Where the optimizer is cut over replicas, a loss takes a piece that no other replica has.
    const bool live_sources = !job.shard_optimizer || lost_ == 0;
    for (size_t i = 0; i < layout.slots.size(); ++i) {
      const Slot& slot = layout.slots[i];
      const auto stage = static_cast<size_t>(i % static_cast<size_t>(layout.pipeline_stages));
      const int32_t begin = layout.bounds[stage], end = layout.bounds[stage + 1];
      int32_t held_begin = 0, held_end = 0;
      const auto held = held_.find({slot.server, slot.device});
      if (held != held_.end() && layout.tensor_parallel == old_.tensor_parallel) {
        held_begin = old_.bounds[static_cast<size_t>(held->second)];
        held_end = old_.bounds[static_cast<size_t>(held->second + 1)];
      }
      if (held == held_.end()) {
        const bool is_warm = warm_.contains(model_.cluster().servers[static_cast<size_t>(slot.server)].id);
        (is_warm ? warm : cold) = true;
      }
      double bytes = 0;
      for (size_t s = 0; s + 1 < old_.bounds.size(); ++s) {
        // The part of this role's layers that old stage s held, less what is here already.
        int32_t from = std::max(begin, old_.bounds[s]), to = std::min(end, old_.bounds[s + 1]);
        if (from >= to) continue;
        if (held_begin <= from && to <= held_end) continue;
        const double part = model_.StateBytes(from, to) / model_.StateBytesPerParameter() * per_parameter;
        if (!Fetch(static_cast<int32_t>(s), from, to, part, live_sources, slot.server, &loads, &store_bytes, &replay)) {
          option->reason = fmt::format("no copy of layers {} to {} is left", from, to - 1);
          return false;
        }
        bytes += part;
      }
      option->bytes_moved += bytes;
      ++(bytes > 0 ? option->groups_moved : option->groups_kept);
    }
    for (const auto& [server, load] : loads) {
      const auto& c = model_.servers()[static_cast<size_t>(server)];
      const double bandwidth = c.network > 0 ? c.network : c.link_bandwidth;
      option->transfer_seconds = std::max(option->transfer_seconds, std::max(load.in, load.out) / bandwidth);
    }
    option->transfer_seconds = std::max(option->transfer_seconds, store_bytes / input_.store_bandwidth);
    const bool changes = option->groups_moved > 0 || cold || warm || layout.slots != old_.slots;
    if (!changes && lost_ == 0) return true;  // shares change at a step boundary
    option->recovery_seconds = (lost_ > 0 ? input_.detect_seconds : 0) + input_.connect_seconds + option->transfer_seconds +
                               (cold ? input_.start_cold_seconds : warm ? input_.start_warm_seconds : 0) +
                               static_cast<double>(replay) * input_.running.step_seconds;
    return true;
  }

  // Charges the cheapest source: a live replica with the least to send, else a copy that is least behind.
  bool Fetch(int32_t stage, int32_t from, int32_t to, double bytes, bool live, int32_t target,
             std::map<int32_t, Load>* loads, double* store_bytes, int64_t* replay) const {
    const auto distance = [&](int32_t server) {
      const auto &a = model_.servers()[static_cast<size_t>(server)], &b = model_.servers()[static_cast<size_t>(target)];
      return server == target ? 0 : a.rack == b.rack ? 1 : a.leaf == b.leaf ? 2 : 3;
    };
    const auto holders = holders_.find(stage);
    if (live && holders != holders_.end()) {
      using Key = std::tuple<double, int, int32_t>;
      Key best(kInfinite, 0, 0);
      for (const Slot& slot : holders->second) {
        const auto at = loads->find(slot.server);
        const double busy = slot.server == target ? -1 : at == loads->end() ? 0 : at->second.out;
        best = std::min(best, Key(busy, distance(slot.server), slot.server));
        if (busy <= 0 && distance(slot.server) <= 1) break;  // nothing nearer is idle
      }
      const int32_t source = std::get<2>(best);
      if (source != target) {
        (*loads)[source].out += bytes;
        (*loads)[target].in += bytes;
      }
      return true;
    }
    const StateCopy* best = nullptr;
    for (const StateCopy& copy : input_.copies) {
      if (copy.layer_begin > from || copy.layer_end < to) continue;
      if (!copy.server.empty() && !index_.contains(copy.server)) continue;
      const auto rank = [](const StateCopy& c) { return std::make_tuple(c.steps_behind, c.server.empty(), c.server); };
      if (best == nullptr || rank(copy) < rank(*best)) best = &copy;
    }
    if (best == nullptr) return false;
    *replay = std::max(*replay, best->steps_behind);
    if (best->server.empty()) {
      *store_bytes += bytes;
    } else if (const int32_t source = index_.at(best->server); source != target) {
      (*loads)[source].out += bytes;
      (*loads)[target].in += bytes;
    }
    return true;
  }

  void Finish(ReplanOption option) {
    if (!option.layout.slots.empty()) {
      option.evaluation = model_.Evaluate(option.layout, true);
      const Evaluation& e = option.evaluation;
      if (e.verdict == Verdict::kOverMemory) {
        const StageCost& stage = e.stages[static_cast<size_t>(e.stage)];
        option.reason = fmt::format("stage {} needs {} on each device, and server {} has {}", e.stage,
                                    BytesText(stage.memory_needed),
                                    model_.cluster().servers[static_cast<size_t>(stage.memory_server)].id.value,
                                    BytesText(stage.memory_limit));
      } else if (e.verdict == Verdict::kUnconnected) {
        option.reason = fmt::format("the servers of stage {} are not connected", e.stage);
      } else if (e.verdict == Verdict::kTooFewMicroBatches) {
        option.reason = "there are fewer micro-batches than replicas";
      } else if (e.servers_used < model_.job().servers_min) {
        option.reason = fmt::format("{} servers are left in it; the job needs {}", e.servers_used, model_.job().servers_min);
      } else if (model_.job().data_parallel > 0 && option.layout.data_parallel != model_.job().data_parallel) {
        option.reason = fmt::format("data_parallel is fixed at {}", model_.job().data_parallel);
      } else if (Move(&option)) {
        option.possible = true;
        option.layout.shares = e.shares;
        option.throughput = static_cast<double>(model_.job().global_batch) / e.step_seconds;
        option.loss_samples = option.recovery_seconds * result_.throughput_before +
                              input_.horizon_seconds * (result_.throughput_before - option.throughput);
        option.reason = fmt::format("{}, {} a step, back in {}, {} moved", 
                                    ShapeText(option.layout.data_parallel, option.layout.pipeline_stages,
                                              option.layout.tensor_parallel),
                                    SecondsText(e.step_seconds), SecondsText(option.recovery_seconds),
                                    BytesText(option.bytes_moved));
      }
    }
    result_.options.push_back(std::move(option));
  }

  // ---- the options

  void Keep() {
    ReplanOption option;
    option.kind = OptionKind::kKeep;
    option.layout = old_;
    Finish(std::move(option));
  }

  void Reshare() {
    ReplanOption option;
    option.kind = OptionKind::kReshare;
    option.layout = old_;
    option.layout.shares.clear();
    Finish(std::move(option));
  }

  std::vector<Slot> FreeSlots() const {
    std::vector<Slot> free;
    for (size_t i = 0; i < model_.servers().size(); ++i) {
      const auto& c = model_.servers()[i];
      if (!c.usable) continue;
      const auto server = static_cast<int32_t>(i);
      for (int32_t k = 0; k + old_.tensor_parallel <= c.devices; k += old_.tensor_parallel) {
        bool empty = true;
        for (int32_t d = k; d < k + old_.tensor_parallel; ++d) empty = empty && !taken_.contains({server, d});
        if (empty) free.push_back({server, k});
      }
    }
    return free;
  }

  // A place of the running plan whose devices were lost, as its neighbours in the replica show it.
  struct Gap {
    int32_t leaf = -1, rack = -1;
    double pace = 0;                     // of the fastest neighbour
    double needed = 0;                   // memory
  };
  Gap GapAt(size_t role) const {
    Gap gap;
    const auto stage = role % static_cast<size_t>(old_.pipeline_stages);
    for (size_t i = role - stage; i < role - stage + static_cast<size_t>(old_.pipeline_stages); ++i) {
      if (old_.slots[i].server < 0) continue;
      const auto& near = model_.servers()[static_cast<size_t>(old_.slots[i].server)];
      gap.leaf = near.leaf;
      gap.rack = near.rack;
      gap.pace = std::max(gap.pace, near.rate);
    }
    gap.needed = model_.MemoryNeeded(old_, static_cast<int32_t>(stage), old_.bounds[stage], old_.bounds[stage + 1],
                                     *std::max_element(old_.shares.begin(), old_.shares.end()));
    return gap;
  }

  // How well a free slot stands in, by itself; less is better: it fits, it is not slower (the same leaf may be a little
  // slower), it is warm, it is near, it is no faster than needed.
  auto StandIn(const Slot& slot, const Gap& gap) const {
    const auto& c = model_.servers()[static_cast<size_t>(slot.server)];
    const bool far = c.leaf != gap.leaf;
    double slow = gap.pace > 0 ? std::max(0.0, 1 - c.rate / gap.pace) : 0;
    if (!far && slow <= kNearLeaf) slow = 0;
    const bool is_cold = !warm_.contains(model_.cluster().servers[static_cast<size_t>(slot.server)].id);
    return std::make_tuple(c.memory < gap.needed, slow, is_cold, far, c.rack != gap.rack, c.rate, slot.server, slot.device);
  }

  void Swap() {
    ReplanOption option;
    option.kind = OptionKind::kSwap;
    ReplanOption cut;
    cut.kind = OptionKind::kSwapAndCut;
    std::vector<Slot> free = FreeSlots();
    if (static_cast<int32_t>(free.size()) < lost_) {
      option.reason = fmt::format("{} groups of {} devices are free, {} were lost", free.size(), old_.tensor_parallel, lost_);
      cut.reason = option.reason;
      result_.options.push_back(std::move(option));
      result_.options.push_back(std::move(cut));
      return;
    }
    Layout layout = old_;
    layout.shares.clear();
    for (size_t role = 0; role < layout.slots.size(); ++role) {
      if (layout.slots[role].server >= 0) continue;
      const Gap gap = GapAt(role);
      size_t best = 0;
      auto best_key = StandIn(free[0], gap);
      for (size_t i = 1; i < free.size(); ++i) {
        const auto key = StandIn(free[i], gap);
        if (key >= best_key) continue;
        best = i;
        best_key = key;
      }
      layout.slots[role] = free[best];
      free.erase(free.begin() + static_cast<std::ptrdiff_t>(best));
    }
    if (layout.slots.size() * layout.slots.size() * static_cast<size_t>(lost_) <= kExactSwapWork) {
      TryOtherSpares(&layout, free);
    }
    option.layout = layout;
    Finish(std::move(option));
    cut.layout = layout;
    CutLayers(model_, &cut.layout);
    if (cut.layout.bounds.empty()) {
      cut.layout.slots.clear();
      cut.reason = "no cut of the layers fits the memory of all its devices";
    } else if (cut.layout.bounds == old_.bounds) {
      cut.layout.slots.clear();
      cut.reason = "the stage boundaries are the best already";
    }
    Finish(std::move(cut));
  }

  // A few devices: every other free slot in every replaced place, and replaced places exchanged, by the whole model.
  void TryOtherSpares(Layout* layout, std::vector<Slot> free) const {
    const auto score = [&](const Layout& l) {
      const Evaluation e = model_.Evaluate(l, true);
      return e.verdict == Verdict::kFits ? Score(model_, e) : kInfinite;
    };
    double best = score(*layout);
    for (size_t role = 0; role < layout->slots.size(); ++role) {
      if (old_.slots[role].server >= 0) continue;
      for (Slot& other : free) {
        Layout trial = *layout;
        std::swap(trial.slots[role], other);
        // A spare that is near is worth a little speed, so another must be clearly better.
        const double value = score(trial);
        if (value < best * (1 - kNearLeaf)) {
          best = value;
          *layout = trial;
        } else {
          std::swap(trial.slots[role], other);
        }
      }
      for (size_t k = role + 1; k < layout->slots.size(); ++k) {
        if (old_.slots[k].server >= 0) continue;
        Layout trial = *layout;
        std::swap(trial.slots[role], trial.slots[k]);
        const double value = score(trial);
        if (value < best * (1 - 1e-9)) {
          best = value;
          *layout = trial;
        }
      }
    }
  }

  // Whole pipelines from survivors and, where those do not reach, free slots. Without moving, a survivor stays at its stage;
  // with moving, what is left over loads another stage's layers.
  void Shrink(bool moving) {
    ReplanOption option;
    option.kind = moving ? OptionKind::kShrinkAndMove : OptionKind::kShrink;
    const auto stages = static_cast<size_t>(old_.pipeline_stages);
    std::vector<std::vector<Slot>> rows;
    std::vector<std::vector<Slot>> loose(stages);  // live slots of broken replicas, by stage
    for (int32_t r = 0; r < old_.data_parallel; ++r) {
      std::vector<Slot> row;
      for (int32_t s = 0; s < old_.pipeline_stages; ++s) row.push_back(old_.slots[old_.At(r, s)]);
      if (std::all_of(row.begin(), row.end(), [](const Slot& slot) { return slot.server >= 0; })) {
        rows.push_back(std::move(row));
        continue;
      }
      for (size_t s = 0; s < stages; ++s) {
        if (row[s].server >= 0) loose[s].push_back(row[s]);
      }
    }
    const size_t intact = rows.size();
    std::vector<Slot> extra;
    if (moving) {
      extra = FreeSlots();
      size_t total = extra.size();
      for (const auto& column : loose) total += column.size();
      const auto wanted = static_cast<size_t>(old_.data_parallel) - intact;
      const size_t count = std::min(total / stages, wanted);
      // Free slots first; then the survivors that are too many at their own stage.
      for (auto& column : loose) {
        while (column.size() > count) {
          extra.push_back(column.back());
          column.pop_back();
        }
      }
      // The group with the least memory that fits takes a hole; a pipeline for which nothing fits is not made.
      std::vector<double> needed;
      const int64_t most = *std::max_element(old_.shares.begin(), old_.shares.end());
      for (size_t s = 0; s < stages; ++s) {
        needed.push_back(model_.MemoryNeeded(old_, static_cast<int32_t>(s), old_.bounds[s], old_.bounds[s + 1], most));
      }
      const auto memory = [&](const Slot& slot) { return model_.servers()[static_cast<size_t>(slot.server)].memory; };
      std::stable_sort(extra.begin(), extra.end(), [&](const Slot& x, const Slot& y) { return memory(x) < memory(y); });
      for (size_t k = 0; k < count; ++k) {
        std::vector<Slot> row, left = extra;
        for (size_t s = 0; s < stages; ++s) {
          if (k < loose[s].size()) {
            row.push_back(loose[s][k]);
            continue;
          }
          const auto at = std::find_if(left.begin(), left.end(), [&](const Slot& slot) { return memory(slot) >= needed[s]; });
          if (at == left.end()) break;
          row.push_back(*at);
          left.erase(at);
        }
        if (row.size() < stages) continue;
        extra = std::move(left);
        rows.push_back(std::move(row));
      }
    } else {
      size_t count = loose[0].size();
      for (const auto& column : loose) count = std::min(count, column.size());
      for (size_t k = 0; k < count; ++k) {
        std::vector<Slot> row;
        for (const auto& column : loose) row.push_back(column[k]);
        rows.push_back(std::move(row));
      }
    }
    if (rows.empty()) {
      option.reason = "no whole pipeline is left";
    } else if (moving && rows.size() == rows_without_moving_) {
      option.reason = "moving survivors to other stages makes no further pipeline";
    } else {
      option.layout = old_;
      option.layout.data_parallel = static_cast<int32_t>(rows.size());
      option.layout.shares.clear();
      option.layout.slots.clear();
      for (const auto& row : rows) option.layout.slots.insert(option.layout.slots.end(), row.begin(), row.end());
    }
    if (!moving) rows_without_moving_ = rows.size();
    Finish(std::move(option));
  }

  void Reshape() {
    ReplanOption option;
    option.kind = OptionKind::kReshape;
    SearchLimits limits;
    if (old_.slots.size() > kSmallSlots) {  // near the running shape
      limits.tensor_parallel = old_.tensor_parallel;
      limits.micro_batch = old_.micro_batch;
      limits.pipeline_stages_min = std::max(1, old_.pipeline_stages * 3 / 4);
      limits.pipeline_stages_max = old_.pipeline_stages * 4 / 3 + 1;
    }
    limits.work_budget = input_.work_budget;
    auto plan = MakePlan(model_, limits);
    if (!plan.ok()) {
      option.reason = plan.status().message();
      result_.options.push_back(std::move(option));
      return;
    }
    option.layout = plan->layout;
    Layout matched = plan->layout;
    MatchToHeld(&matched);
    const Evaluation e = model_.Evaluate(matched, true);
    if (e.verdict == Verdict::kFits && Score(model_, e) <= Score(model_, plan->evaluation) * kMatchLoss) option.layout = matched;
    Finish(std::move(option));
  }

  // Exchanges slots of equal servers between roles, so that as many as can be keep the layers that they hold: pairs of
  // (new stage, old stage) that share most bytes first, and a slot's old replica where its stage stays.
  void MatchToHeld(Layout* layout) const {
    if (layout->tensor_parallel != old_.tensor_parallel) return;
    const auto stages = static_cast<size_t>(layout->pipeline_stages);
    struct Pair {
      double shared;
      size_t stage;
      int32_t held;
    };
    std::vector<Pair> pairs;
    for (size_t s = 0; s < stages; ++s) {
      for (int32_t h = 0; h < old_.pipeline_stages; ++h) {
        const int32_t from = std::max(layout->bounds[s], old_.bounds[static_cast<size_t>(h)]);
        const int32_t to = std::min(layout->bounds[s + 1], old_.bounds[static_cast<size_t>(h + 1)]);
        if (from < to) pairs.push_back({model_.StateBytes(from, to), s, h});
      }
    }
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      return std::make_tuple(-a.shared, a.stage, a.held) < std::make_tuple(-b.shared, b.stage, b.held);
    });
    // Slots that are used, by the class of their server and the stage that they hold (-1: none); roles by class and stage.
    std::map<std::pair<int32_t, int32_t>, std::vector<Slot>> slots;
    std::map<std::pair<int32_t, size_t>, std::vector<size_t>> roles;
    for (size_t i = 0; i < layout->slots.size(); ++i) {
      const Slot& slot = layout->slots[i];
      const int32_t kind = model_.servers()[static_cast<size_t>(slot.server)].kind;
      const auto held = held_.find({slot.server, slot.device});
      slots[{kind, held == held_.end() ? -1 : held->second}].push_back(slot);
      roles[{kind, i % stages}].push_back(i);
    }
    for (auto& [key, list] : slots) std::reverse(list.begin(), list.end());  // taken from the back, in order
    for (auto& [key, list] : roles) std::reverse(list.begin(), list.end());
    for (const Pair& pair : pairs) {
      for (auto& [key, list] : roles) {
        if (key.second != pair.stage) continue;
        const auto at = slots.find({key.first, pair.held});
        if (at == slots.end()) continue;
        while (!list.empty() && !at->second.empty()) {
          layout->slots[list.back()] = at->second.back();
          list.pop_back();
          at->second.pop_back();
        }
      }
    }
    for (auto& [key, list] : roles) {  // the rest, in any order of stages held
      for (auto& [from, free] : slots) {
        if (from.first != key.first) continue;
        while (!list.empty() && !free.empty()) {
          layout->slots[list.back()] = free.back();
          list.pop_back();
          free.pop_back();
        }
      }
    }
  }

  // The plan before, once what was lost is back: nothing is computed meanwhile.
  void Wait() {
    ReplanOption option;
    option.kind = OptionKind::kWait;
    if (input_.wait_seconds <= 0) {
      option.reason = "nobody expects the lost servers back";
    } else {
      option.possible = true;
      option.throughput = result_.throughput_before;
      option.recovery_seconds = input_.detect_seconds + input_.wait_seconds + input_.start_cold_seconds + input_.connect_seconds;
      option.loss_samples = option.recovery_seconds * result_.throughput_before;
      option.reason = fmt::format("the plan before, in {}", SecondsText(option.recovery_seconds));
    }
    result_.options.push_back(std::move(option));
  }

  // ---- the choice

  Result<Replan> Choose() {
    size_t best = result_.options.size();
    for (size_t i = 0; i < result_.options.size(); ++i) {
      const ReplanOption& o = result_.options[i];
      if (!o.possible) continue;
      if (best == result_.options.size() || o.loss_samples < result_.options[best].loss_samples * (1 - 1e-12) - 1e-9) best = i;
    }
    if (best == result_.options.size()) {
      std::string why;
      for (const ReplanOption& o : result_.options) why += fmt::format("{}{}: {}", why.empty() ? "" : "; ", OptionName(o.kind), o.reason);
      return ResourceExhausted("nothing is possible: " + why);
    }
    // Of options that the model cannot tell apart, the one that moves least.
    const double near = kIndifferent * input_.horizon_seconds * result_.throughput_before;
    const double least = result_.options[best].loss_samples;
    for (size_t i = 0; i < result_.options.size(); ++i) {
      const ReplanOption& o = result_.options[i];
      if (o.possible && o.loss_samples <= least + near && o.bytes_moved < result_.options[best].bytes_moved) best = i;
    }
    std::string restraint;
    if (lost_ == 0 && best > 0 && result_.options[0].possible) {
      const ReplanOption &keep = result_.options[0], &other = result_.options[best];
      const double gain = other.throughput / keep.throughput - 1;
      if (input_.running.steps_since_change < input_.dwell_steps) {
        restraint = fmt::format("; {} would gain {:.1f} %, but the last change was {} steps ago and {} must pass",
                                OptionName(other.kind), gain * 100, input_.running.steps_since_change, input_.dwell_steps);
        best = 0;
      } else if (gain < input_.gain_min) {
        restraint = fmt::format("; {} would gain {:.1f} %, less than the {:.1f} % that a change must bring",
                                OptionName(other.kind), gain * 100, input_.gain_min * 100);
        best = 0;
      }
    }
    result_.chosen = best;
    const ReplanOption& chosen = result_.options[best];
    const ReplanOption* rival = nullptr;
    for (size_t i = 0; i < result_.options.size(); ++i) {
      const ReplanOption& o = result_.options[i];
      if (i != best && o.possible && (rival == nullptr || o.loss_samples < rival->loss_samples)) rival = &o;
    }
    result_.message = fmt::format("{}: {}; it loses {:.0f} samples over {}", OptionName(chosen.kind), chosen.reason,
                                  chosen.loss_samples, SecondsText(input_.horizon_seconds));
    if (rival != nullptr) result_.message += fmt::format(", {} {:.0f}", OptionName(rival->kind), rival->loss_samples);
    result_.message += restraint;
    return std::move(result_);
  }

  const CostModel& model_;
  const ReplanInput& input_;
  Layout old_;                                             // servers by the new numbers, -1: lost
  std::map<ServerId, int32_t> index_;
  std::map<std::pair<int32_t, int32_t>, int32_t> held_;    // (server, first device) -> old stage
  std::map<int32_t, std::vector<Slot>> holders_;           // old stage -> live slots
  std::set<std::pair<int32_t, int32_t>> taken_;            // devices of live ranks
  std::set<ServerId> warm_;
  int32_t lost_ = 0;
  size_t rows_without_moving_ = 0;
  Replan result_;
};

}  // namespace

const char* OptionName(OptionKind kind) {
  switch (kind) {
    case OptionKind::kKeep: return "keep";
    case OptionKind::kReshare: return "re-share";
    case OptionKind::kSwap: return "swap";
    case OptionKind::kSwapAndCut: return "swap and move boundaries";
    case OptionKind::kShrink: return "shrink";
    case OptionKind::kShrinkAndMove: return "shrink and move ranks";
    case OptionKind::kReshape: return "re-shape";
    case OptionKind::kWait: return "wait";
  }
  return "unknown";
}

Result<Replan> MakeReplan(const CostModel& model, const ReplanInput& input) { return Replanner(model, input).Run(); }

}  // namespace everstep::planner
