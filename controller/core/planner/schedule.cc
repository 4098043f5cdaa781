#include "controller/core/planner/schedule.h"

#include <algorithm>
#include <set>
#include <tuple>

#include <fmt/format.h>

namespace everstep::planner {

double OneFOneB(const std::vector<StageTimes>& stages, int64_t micro_batches) {
  const auto count = static_cast<int64_t>(stages.size());
  if (count == 0 || micro_batches <= 0) return 0;
  // Stage s runs warm(s) forwards, then backward and forward in turn. Sweeping over "diagonals" needs every value once:
  // F(m, s) needs F(m, s-1) and the operation before it on s; B(m, s) needs B(m, s+1). Operations are visited in rounds,
  // each stage as far as its inputs allow.
  const auto at = [&](int64_t s, int64_t m) { return static_cast<size_t>(s * micro_batches + m); };
  std::vector<double> forward_end(static_cast<size_t>(count * micro_batches), -1);
  std::vector<double> backward_end(forward_end.size(), -1);
  std::vector<int64_t> next_forward(stages.size(), 0), next_backward(stages.size(), 0);
  std::vector<double> free_at(stages.size(), 0);
  const auto advance = [&](int64_t s) {
    const auto i = static_cast<size_t>(s);
    const int64_t warm = std::min(count - s, micro_batches);
    bool moved = false;
    while (next_backward[i] < micro_batches) {
      const bool forward_turn =
          next_forward[i] < micro_batches && next_forward[i] - next_backward[i] < warm;
      if (forward_turn) {
        const int64_t m = next_forward[i];
        double ready = 0;
        if (s > 0) {
          const double input = forward_end[at(s - 1, m)];
          if (input < 0) break;
          ready = input + stages[i - 1].transfer;
        }
        free_at[i] = std::max(free_at[i], ready) + stages[i].forward;
        forward_end[at(s, m)] = free_at[i];
        ++next_forward[i];
      } else {
        const int64_t m = next_backward[i];
        double ready = forward_end[at(s, m)];
        if (s + 1 < count) {
          const double input = backward_end[at(s + 1, m)];
          if (input < 0) break;
          ready = input + stages[i].transfer;
        }
        free_at[i] = std::max(free_at[i], ready) + stages[i].backward;
        backward_end[at(s, m)] = free_at[i];
        ++next_backward[i];
      }
      moved = true;
    }
    return moved;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t s = 0; s < count; ++s) moved |= advance(s);
    for (int64_t s = count - 1; s >= 0; --s) moved |= advance(s);
  }
  double end = 0;
  for (const double f : free_at) end = std::max(end, f);
  return end;
}

ClosedForm OneFOneBClosedForm(const std::vector<StageTimes>& stages) {
  ClosedForm form;
  for (size_t s = 0; s < stages.size(); ++s) {
    const double own = stages[s].forward + stages[s].backward;
    form.fill += own + (s + 1 < stages.size() ? 2 * stages[s].transfer : 0);
    // A micro-batch admitted at stage s waits for one that travels to stage t and back: t - s + 1 of them share the loop.
    double loop = 0;
    for (size_t t = s; t < stages.size(); ++t) {
      loop += stages[t].forward + stages[t].backward;
      form.period = std::max(form.period, loop / static_cast<double>(t - s + 1));
      loop += 2 * stages[t].transfer;
    }
  }
  return form;
}

double TemplateCost(const std::vector<double>& stage_times, int64_t micro_batches) {
  const auto count = static_cast<int64_t>(stage_times.size());
  size_t slowest = 0;
  double sum = 0;
  for (size_t i = 0; i < stage_times.size(); ++i) {
    sum += stage_times[i];
    if (stage_times[i] >= stage_times[slowest]) slowest = i;
  }
  if (stage_times.empty()) return 0;
  double tail = 0;
  for (size_t i = slowest; i < stage_times.size(); ++i) tail += stage_times[i];
  return sum + static_cast<double>(micro_batches - count + static_cast<int64_t>(slowest) - 1) * stage_times[slowest] + tail;
}

namespace {

enum Kind : int { kInput = 0, kForward = 1, kWeight = 2 };  // in the order in which a worker prefers them

class Simulation {
 public:
  explicit Simulation(const ScheduleSpec& spec) : spec_(spec), kinds_(spec.split_backward ? 3 : 2) {}

  Result<ScheduleResult> Run() {
    EVERSTEP_RETURN_IF_ERROR(Assign());
    const int32_t all = spec_.pipelines * spec_.micro_batches * kinds_;
    left_.assign(static_cast<size_t>(spec_.steps), std::vector<int32_t>(static_cast<size_t>(spec_.stages), all));
    current_.assign(static_cast<size_t>(spec_.stages), 0);
    ends_.assign(Index(spec_.steps, 0, 0, 0, 0), -1);
    started_.assign(ends_.size(), false);
    workers_.assign(static_cast<size_t>(spec_.stages * spec_.pipelines), {});
    int64_t now = 0;
    while (static_cast<int32_t>(result_.step_ends.size()) < spec_.steps) {
      Finish(now);
      OpenSteps(now);
      for (int32_t s = 0; s < spec_.stages; ++s) {
        for (int32_t d = 0; d < spec_.pipelines; ++d) Start(s, d, now);
      }
      if (static_cast<int32_t>(result_.step_ends.size()) == spec_.steps) break;
      if (wake_.empty()) return Internal("the schedule stands still");
      now = *wake_.begin();
      wake_.erase(wake_.begin());
    }
    const auto& ends = result_.step_ends;
    result_.period = static_cast<double>(ends.back() - ends[1]) / static_cast<double>(spec_.steps - 2);
    return std::move(result_);
  }

 private:
  struct Work {
    int32_t pipeline, micro_batch;
    bool own;
  };
  struct Worker {
    int64_t busy_until = -1;
    bool busy = false;
    Kind kind = kForward;
    int32_t step = 0;
    int32_t in_flight = 0;
  };

  size_t Index(int32_t step, int kind, int32_t s, int32_t d, int32_t m) const {
    return static_cast<size_t>((((static_cast<int64_t>(step) * 3 + kind) * spec_.stages + s) * spec_.pipelines + d) *
                                   spec_.micro_batches + m);
  }
  size_t WorkerIndex(int32_t s, int32_t d) const { return static_cast<size_t>(s * spec_.pipelines + d); }

  // Each orphan goes to the live peer that has the fewest, the next pipeline first.
  Status Assign() {
    const std::set<std::pair<int32_t, int32_t>> failed(spec_.failed.begin(), spec_.failed.end());
    work_.assign(static_cast<size_t>(spec_.stages * spec_.pipelines), {});
    for (int32_t s = 0; s < spec_.stages; ++s) {
      std::vector<int32_t> orphans(static_cast<size_t>(spec_.pipelines), 0);
      for (int32_t m = 0; m < spec_.micro_batches; ++m) {
        for (int32_t d = 0; d < spec_.pipelines; ++d) {
          if (!failed.contains({s, d})) {
            work_[WorkerIndex(s, d)].push_back({d, m, true});
            continue;
          }
          int32_t best = -1;
          for (int32_t k = 1; k < spec_.pipelines; ++k) {
            const int32_t peer = (d + k) % spec_.pipelines;
            if (failed.contains({s, peer})) continue;
            if (best < 0 || orphans[static_cast<size_t>(peer)] < orphans[static_cast<size_t>(best)]) best = peer;
          }
          if (best < 0) return FailedPrecondition(fmt::format("stage {} has no live worker", s));
          ++orphans[static_cast<size_t>(best)];
          work_[WorkerIndex(s, best)].push_back({d, m, false});
        }
      }
    }
    return OkStatus();
  }

  void Finish(int64_t now) {
    for (int32_t s = 0; s < spec_.stages; ++s) {
      for (int32_t d = 0; d < spec_.pipelines; ++d) {
        Worker& worker = workers_[WorkerIndex(s, d)];
        if (!worker.busy || worker.busy_until > now) continue;
        worker.busy = false;
        --left_[static_cast<size_t>(worker.step)][static_cast<size_t>(s)];
        if (worker.kind == kInput) --worker.in_flight;
      }
    }
  }

  void OpenSteps(int64_t now) {
    const auto done = [&](int32_t step, size_t s) { return left_[static_cast<size_t>(step)][s] == 0; };
    if (spec_.staggered) {
      for (size_t s = 0; s < current_.size(); ++s) {
        if (current_[s] < spec_.steps && done(current_[s], s)) ++current_[s];
      }
    } else if (current_[0] < spec_.steps) {
      bool all = true;
      for (size_t s = 0; s < current_.size(); ++s) all = all && done(current_[0], s);
      if (all) {
        for (int32_t& step : current_) ++step;
      }
    }
    for (auto step = static_cast<int32_t>(result_.step_ends.size()); step < spec_.steps; ++step) {
      for (size_t s = 0; s < current_.size(); ++s) {
        if (!done(step, s)) return;
      }
      result_.step_ends.push_back(now);
    }
  }

  // Has this operation ended, and has its result arrived by now? Remembers when it will.
  bool Ready(size_t index, int64_t transfer, int64_t now) {
    const int64_t end = ends_[index];
    if (end < 0) return false;
    if (end + transfer > now) {
      if (end <= now) wake_.insert(end + transfer);
      return false;
    }
    return true;
  }

  bool InputsReady(Kind kind, int32_t step, int32_t s, const Work& w, int64_t now) {
    switch (kind) {
      case kForward:
        return s == 0 || Ready(Index(step, kForward, s - 1, w.pipeline, w.micro_batch), spec_.transfer, now);
      case kInput:
        return Ready(Index(step, kForward, s, w.pipeline, w.micro_batch), 0, now) &&
               (s + 1 == spec_.stages ||
                Ready(Index(step, kInput, s + 1, w.pipeline, w.micro_batch), spec_.transfer, now));
      case kWeight: return Ready(Index(step, kInput, s, w.pipeline, w.micro_batch), 0, now);
    }
    return false;
  }

  void Start(int32_t s, int32_t d, int64_t now) {
    Worker& worker = workers_[WorkerIndex(s, d)];
    const int32_t step = current_[static_cast<size_t>(s)];
    if (worker.busy || step >= spec_.steps) return;
    using Key = std::tuple<int, int32_t, bool, int32_t>;
    const Work* best = nullptr;
    Key best_key;
    for (const Work& w : work_[WorkerIndex(s, d)]) {
      for (const Kind kind : {kInput, kForward, kWeight}) {
        if (kind == kWeight && !spec_.split_backward) continue;
        if (started_[Index(step, kind, s, w.pipeline, w.micro_batch)]) continue;
        if (kind == kForward && worker.in_flight >= (spec_.stages - s) * spec_.in_flight_factor) continue;
        if (!InputsReady(kind, step, s, w, now)) continue;
        const Key key(kind, w.micro_batch, !w.own, w.pipeline);
        if (best == nullptr || key < best_key) {
          best = &w;
          best_key = key;
        }
      }
    }
    if (best == nullptr) return;
    const auto kind = static_cast<Kind>(std::get<0>(best_key));
    const int64_t duration = kind == kForward  ? spec_.forward
                             : kind == kWeight ? spec_.backward_weight
                                               : spec_.backward_input + (spec_.split_backward ? 0 : spec_.backward_weight);
    const size_t index = Index(step, kind, s, best->pipeline, best->micro_batch);
    started_[index] = true;
    ends_[index] = now + duration;
    worker.busy = true;
    worker.busy_until = now + duration;
    worker.kind = kind;
    worker.step = step;
    if (kind == kForward) result_.in_flight_max = std::max(result_.in_flight_max, ++worker.in_flight);
    wake_.insert(now + duration);
  }

  const ScheduleSpec& spec_;
  const int32_t kinds_;
  std::vector<std::vector<Work>> work_;
  std::vector<Worker> workers_;
  std::vector<std::vector<int32_t>> left_;   // by step and stage
  std::vector<int32_t> current_;             // the step that each stage works on
  std::vector<int64_t> ends_;
  std::vector<bool> started_;
  std::set<int64_t> wake_;
  ScheduleResult result_;
};

}  // namespace

Result<ScheduleResult> SimulateSchedule(const ScheduleSpec& spec) {
  const bool sizes = spec.stages >= 1 && spec.stages <= 256 && spec.pipelines >= 1 && spec.pipelines <= 1024 &&
                     spec.micro_batches >= 1 && spec.micro_batches <= 4096 && spec.steps >= 3 && spec.steps <= 64 &&
                     spec.in_flight_factor >= 1;
  if (!sizes) return InvalidArgument("sizes of the schedule are out of bounds");
  if (spec.forward < 1 || spec.backward_input < 1 || spec.backward_weight < 1 || spec.transfer < 0) {
    return InvalidArgument("times of the schedule are not positive");
  }
  return Simulation(spec).Run();
}

}  // namespace everstep::planner
