// The planner's measures, each a table: predicted against published step times and memory, time to plan and to re-plan
// as clusters grow, pipeline templates of a known synthetic profile, uneven clusters against exhaustive search and
// against two simple rules.
//   planner_bench [published|scale|templates|uneven]...    (default: all)
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "controller/core/planner/exact.h"
#include "controller/core/planner/plan.h"
#include "controller/core/planner/replan.h"
#include "controller/core/planner/report.h"
#include "proto/base/prng.h"

namespace everstep::planner {
namespace {

// Processor time: the planner runs on one thread and waits for nothing, and the machine may be busy with something else.
struct Clock {
  using time_point = std::clock_t;
  static time_point now() { return std::clock(); }
};
double Milliseconds(Clock::time_point start) {
  return static_cast<double>(Clock::now() - start) * 1e3 / static_cast<double>(CLOCKS_PER_SEC);
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    fmt::print(stderr, "planner_bench: {}\n", result.status().message());
    std::exit(1);
  }
  return std::move(result).value();
}

PlanServer Server(const std::string& name, const std::string& device, int devices, double network) {
  PlanServer s;
  s.id = ServerId(name);
  s.device = device;
  s.devices = devices;
  s.network_bandwidth = network;
  return s;
}

// ---- published step times

struct Published {
  const char* name;
  int32_t layers, hidden, heads;
  int32_t tp, pp, devices;
  int64_t batch;
  int32_t micro_batch, interleave;
  Recompute recompute;
  double seconds;
};
// Megatron-LM on A100-80, s = 2,048, V = 51,200 and the selective-recompute rows; docs/planner.md has the sources.
const Published kPublished[] = {
    {"1.7B full", 24, 2304, 24, 1, 1, 32, 512, 4, 1, Recompute::kFull, 3.53},
    {"7.5B full", 36, 4096, 32, 4, 1, 128, 512, 4, 1, Recompute::kFull, 3.70},
    {"39.1B full", 48, 8192, 64, 8, 2, 512, 1536, 2, 1, Recompute::kFull, 14.5},
    {"145.6B full", 80, 12288, 96, 8, 8, 1536, 2304, 1, 1, Recompute::kFull, 24.8},
    {"529.6B full", 105, 20480, 128, 8, 35, 2520, 2520, 1, 1, Recompute::kFull, 54.1},
    {"22B full", 48, 6144, 64, 8, 1, 8, 4, 4, 1, Recompute::kFull, 1.42},
    {"22B selective", 48, 6144, 64, 8, 1, 8, 4, 4, 1, Recompute::kSelective, 1.10},
    {"530B full", 105, 20480, 128, 8, 35, 280, 280, 1, 3, Recompute::kFull, 49.05},
    {"530B selective", 105, 20480, 128, 8, 35, 280, 280, 1, 3, Recompute::kSelective, 37.83},
};

Job JobOf(const Published& p, int32_t vocabulary) {
  Job job;
  job.transformer = {p.name, p.layers, p.hidden, p.heads, p.heads, 4 * p.hidden, vocabulary, false, true, 0, "published"};
  job.sequence_length = 2048;
  job.global_batch = p.batch;
  job.recompute = p.recompute;
  job.sequence_parallel = p.recompute == Recompute::kSelective;
  job.interleave = p.interleave;
  job.micro_batch_max = 8;
  return job;
}

Layout LayoutOf(const Published& p, const CostModel& model) {
  Layout layout;
  layout.tensor_parallel = p.tp;
  layout.pipeline_stages = p.pp;
  layout.data_parallel = p.devices / p.tp / p.pp;
  layout.micro_batch = p.micro_batch;
  const int32_t ends = model.layer_count() - p.layers;  // embedding and head, or none
  layout.bounds = {0};
  for (int32_t s = 1; s < p.pp; ++s) layout.bounds.push_back((ends > 0 ? 1 : 0) + p.layers / p.pp * s);
  layout.bounds.push_back(model.layer_count());
  layout.slots.resize(static_cast<size_t>(layout.data_parallel) * static_cast<size_t>(p.pp));
  const int32_t per_server = 8 / p.tp;
  for (int32_t s = 0; s < p.pp; ++s) {
    for (int32_t r = 0; r < layout.data_parallel; ++r) {
      const int32_t i = s * layout.data_parallel + r;
      layout.slots[layout.At(r, s)] = {i / per_server, i % per_server * p.tp};
    }
  }
  return layout;
}

Cluster ClusterOf(const Published& p) {
  Cluster cluster;
  for (int32_t i = 0; i < std::max(1, p.devices / 8); ++i) cluster.servers.push_back(Server("s" + std::to_string(i), "A100-80", 8, 200e9));
  return cluster;
}

double PredictedSeconds(const Published& p, const Tables& tables) {
  const CostModel model = Must(CostModel::Create(ClusterOf(p), JobOf(p, 51200), tables, {}));
  return model.Evaluate(LayoutOf(p, model), true).step_seconds;
}

double MeanError(const Tables& tables) {
  double sum = 0;
  for (const Published& p : kPublished) sum += std::abs(PredictedSeconds(p, tables) / p.seconds - 1);
  return sum / static_cast<double>(std::size(kPublished));
}

void PrintPublished() {
  fmt::print("## Step time, A100-80, predicted against published\n\n");
  fmt::print("| model | tp x pp x dp | batch | published s | predicted s | error |\n| --- | --- | --- | --- | --- | --- |\n");
  for (const Published& p : kPublished) {
    const double predicted = PredictedSeconds(p, BuiltInTables());
    fmt::print("| {} | {} x {} x {} | {} | {} | {:.2f} | {:+.1f} % |\n", p.name, p.tp, p.pp, p.devices / p.tp / p.pp, p.batch,
               p.seconds, predicted, (predicted / p.seconds - 1) * 100);
  }
  fmt::print("\nmean error {:.1f} %\n", MeanError(BuiltInTables()) * 100);
  double best = 0, best_error = kInfinite;
  for (double efficiency = 0.4; efficiency < 0.9; efficiency += 0.005) {
    Tables tables = BuiltInTables();
    for (DeviceModel& d : tables.devices) d.efficiency = d.name == "A100-80" ? efficiency : d.efficiency;
    const double error = MeanError(tables);
    if (error < best_error) {
      best_error = error;
      best = efficiency;
    }
  }
  fmt::print("best single efficiency {:.3f} with mean error {:.1f} %; the table has {:.3f}\n\n", best, best_error * 100,
             BuiltInTables().FindDevice("A100-80")->efficiency);

  fmt::print("## Memory of one device, predicted against published (blocks alone, GiB)\n\n");
  fmt::print("| model | part | published | predicted | error |\n| --- | --- | --- | --- | --- |\n");
  const double gib = 1024.0 * 1024 * 1024;
  struct Row {
    const char* name;
    size_t published;
    Recompute recompute;
    double state, kept;
  };
  double worst = 0;
  for (const Row& row : {Row{"22B", 6, Recompute::kNone, 45.56, 59.25}, Row{"22B", 6, Recompute::kSelective, 45.56, 9.56},
                         Row{"530B", 8, Recompute::kNone, 31.64, 114.02}, Row{"530B", 8, Recompute::kSelective, 31.64, 23.08}}) {
    const Published& p = kPublished[row.published];
    Job job = JobOf(p, 0);
    job.recompute = row.recompute;
    job.sequence_parallel = row.recompute == Recompute::kSelective;
    job.reserve_bytes = 0;
    const CostModel model = Must(CostModel::Create(ClusterOf(p), job, BuiltInTables(), {}));
    const Layout layout = LayoutOf(p, model);
    const int64_t n = p.batch / p.micro_batch / layout.data_parallel;
    const double all = model.MemoryNeeded(layout, 0, layout.bounds[0], layout.bounds[1], n);
    Job stateless = job;
    stateless.weight_bytes = stateless.gradient_bytes = 0.1;  // the least that validation admits
    stateless.optimizer_bytes = 0;
    const CostModel light = Must(CostModel::Create(ClusterOf(p), stateless, BuiltInTables(), {}));
    const double rest = light.MemoryNeeded(layout, 0, layout.bounds[0], layout.bounds[1], n);
    const double state = (all - rest) * 18 / 17.8 / gib;
    const double kept = all / gib - state;
    const char* what = row.recompute == Recompute::kNone ? "kept, no recompute" : "kept, selective";
    for (const auto& [part, published, predicted] : {std::tuple("state", row.state, state), {what, row.kept, kept}}) {
      fmt::print("| {} | {} | {} | {:.2f} | {:+.1f} % |\n", row.name, part, published, predicted, (predicted / published - 1) * 100);
      worst = std::max(worst, std::abs(predicted / published - 1));
    }
  }
  fmt::print("\nworst error {:.1f} %\n\n", worst * 100);
}

// ---- time to plan

Cluster Big(int32_t servers) {
  static const char* const kModels[] = {"A100-80", "H100", "H200", "A100-40"};
  Cluster cluster;
  cluster.rack = {400e9, 5e-6};
  cluster.leaf = {200e9, 8e-6};
  cluster.spine = {100e9, 12e-6};
  for (int32_t i = 0; i < servers; ++i) {
    PlanServer s = Server(fmt::format("s{:04}", i), kModels[i * 4 / servers], 8, 400e9);
    s.rack = fmt::format("r{}", i / 4);
    s.leaf = fmt::format("l{}", i / 32);
    s.failure_domain = s.rack;
    cluster.servers.push_back(s);
  }
  return cluster;
}

void PrintScale() {
  fmt::print("## Processor time to plan: gpt3-175b (96 layers), servers of 8 devices, 4 device models, 3 link tiers\n\n");
  fmt::print("| servers | plan ms | layouts | chosen | step s | complete | re-plan, 1 loss ms | option | re-plan, 50 losses ms | option |\n"
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int32_t servers : {64, 128, 256, 512, 1024, 2048, 4096}) {
    Job job;
    job.transformer = *BuiltInTables().FindModel("gpt3-175b");
    job.recompute = Recompute::kFull;
    job.global_batch = std::max<int64_t>(1024, servers * 4);
    job.micro_batch_max = 4;
    const Cluster cluster = Big(servers);
    double plan_ms = kInfinite;
    Plan plan;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const auto start = Clock::now();
      plan = Must(MakePlan(cluster, job, BuiltInTables()));
      plan_ms = std::min(plan_ms, Milliseconds(start));
    }
    const CostModel model = Must(CostModel::Create(cluster, job, BuiltInTables(), {}));
    if (const Status valid = CheckPlan(model, plan); !valid.ok()) fmt::print(stderr, "{}\n", valid.message());
    ReplanInput input;
    input.running.layout = plan.layout;
    for (const PlanServer& s : cluster.servers) input.running.servers.push_back(s.id);
    input.running.step_seconds = plan.evaluation.step_seconds;
    fmt::print("| {} | {:.0f} | {} | {} | {:.3f} | {} |", servers, plan_ms, plan.layouts_tried,
               ShapeText(plan.layout.data_parallel, plan.layout.pipeline_stages, plan.layout.tensor_parallel),
               plan.evaluation.step_seconds, plan.complete ? "yes" : "no");
    for (const int32_t losses : {1, std::min(50, servers / 4)}) {
      Cluster after;
      after.rack = cluster.rack;
      after.leaf = cluster.leaf;
      after.spine = cluster.spine;
      for (int32_t i = 0; i < servers; ++i) {
        const bool lost = i % (servers / losses) == servers / losses / 2 && i / (servers / losses) < losses;
        if (!lost) after.servers.push_back(cluster.servers[static_cast<size_t>(i)]);
      }
      double replan_ms = kInfinite;
      std::string option;
      for (int repeat = 0; repeat < 2; ++repeat) {
        const auto start = Clock::now();
        const CostModel now = Must(CostModel::Create(after, job, BuiltInTables(), {}));
        const auto replan = MakeReplan(now, input);
        replan_ms = std::min(replan_ms, Milliseconds(start));
        option = replan.ok() ? OptionName(replan->choice().kind) : replan.status().message();
      }
      fmt::print(" {:.0f} | {} |", replan_ms, option);
    }
    fmt::print("\n");
    std::fflush(stdout);
  }
  fmt::print("\n");
}

// ---- templates

void PrintTemplates() {
  fmt::print("## Pipeline templates of the synthetic profile: 96 layers, forward (i mod 13 + 1) ms, backward (i mod 7 + 1) ms\n\n");
  fmt::print("| stages | cost of the exact cut ms | bottleneck ms | cost of the smallest bottleneck's cut ms | time us |\n"
             "| --- | --- | --- | --- | --- |\n");
  std::vector<double> work;
  for (int i = 0; i < 96; ++i) work.push_back(i % 13 + 1 + i % 7 + 1);
  const auto times = [&](const std::vector<int32_t>& bounds) {
    std::vector<double> out;
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      out.push_back(std::accumulate(work.begin() + bounds[s], work.begin() + bounds[s + 1], 0.0));
    }
    return out;
  };
  double total_us = 0;
  for (int32_t stages = 1; stages <= 96; ++stages) {
    const auto start = Clock::now();
    const auto bounds = CutForTemplate(work, stages, 4 * stages);
    const double us = Milliseconds(start) * 1e3;
    total_us += us;
    if (stages > 4 && (stages & (stages - 1)) != 0 && stages != 96 && stages != 24) continue;
    const auto smallest = CutChain(
        96, stages, [&](int32_t, int32_t b, int32_t e) { return std::accumulate(work.begin() + b, work.begin() + e, 0.0); },
        [](int32_t, int32_t) { return 0.0; });
    const auto exact = times(bounds);
    fmt::print("| {} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |\n", stages, TemplateCost(exact, 4 * stages),
               *std::max_element(exact.begin(), exact.end()), TemplateCost(times(smallest), 4 * stages), us);
  }
  fmt::print("\nall 96 numbers of stages: {:.1f} ms\n\n", total_us / 1e3);
}

// ---- uneven clusters

Job UnevenJob(Prng& prng, int64_t devices) {
  Job job;
  for (int64_t i = prng.Between(4, 7); i > 0; --i) {
    const double ms = static_cast<double>(prng.Between(5, 50));
    job.profile.push_back({ms / 3e3, ms / 1.5e3, 1e6, static_cast<double>(prng.Between(1, 30)) * 1e5, 1e6});
  }
  job.global_batch = devices * prng.Between(2, 8);
  job.micro_batch_max = 1;
  job.reserve_bytes = 0;
  job.spread = Spread::kOff;
  return job;
}
Cluster UnevenCluster(Prng& prng, int64_t devices) {
  Cluster cluster;
  for (int64_t i = 0; i < devices; ++i) {
    PlanServer s = Server("n" + std::to_string(i), "cpu", 1, static_cast<double>(prng.Between(2, 40)) * 1e8);
    s.speed = static_cast<double>(prng.Between(10, 40)) / 10;
    if (prng.Chance(1, 3)) s.memory_bytes = static_cast<double>(prng.Between(100, 250)) * 1e6;
    cluster.servers.push_back(s);
  }
  return cluster;
}

// Every shape, ordered choice of devices and cut.
double Exhaustive(const CostModel& model) {
  const auto count = static_cast<int32_t>(model.servers().size());
  double best = kInfinite;
  for (int32_t pp = 1; pp <= std::min(count, model.layer_count()); ++pp) {
    std::vector<std::vector<int32_t>> cuts;
    for (uint32_t mask = 0; mask < 1u << (model.layer_count() - 1); ++mask) {
      std::vector<int32_t> bounds = {0};
      for (int32_t i = 1; i < model.layer_count(); ++i) {
        if ((mask >> (i - 1) & 1) != 0) bounds.push_back(i);
      }
      bounds.push_back(model.layer_count());
      if (static_cast<int32_t>(bounds.size()) == pp + 1) cuts.push_back(bounds);
    }
    for (int32_t dp = 1; dp * pp <= count && dp <= model.job().global_batch; ++dp) {
      Layout layout;
      layout.data_parallel = dp;
      layout.pipeline_stages = pp;
      layout.slots.resize(static_cast<size_t>(dp * pp));
      std::vector<bool> used(static_cast<size_t>(count), false);
      std::function<void(size_t)> place = [&](size_t role) {
        if (role == layout.slots.size()) {
          for (const auto& cut : cuts) {
            layout.bounds = cut;
            const Evaluation e = model.Evaluate(layout, true);
            if (e.verdict == Verdict::kFits) best = std::min(best, e.step_seconds);
          }
          return;
        }
        for (int32_t i = 0; i < count; ++i) {
          if (used[static_cast<size_t>(i)]) continue;
          const auto first = static_cast<size_t>(pp);
          if (role % first == 0 && role > 0 && i < layout.slots[role - first].server) continue;
          used[static_cast<size_t>(i)] = true;
          layout.slots[role].server = i;
          place(role + 1);
          used[static_cast<size_t>(i)] = false;
        }
      };
      place(0);
    }
  }
  return best;
}

void PrintUneven() {
  fmt::print("## Uneven clusters: speeds 1 to 4, network 0.2 to 4 GB/s, some short of memory; one device each\n\n");
  fmt::print("| devices | clusters | of exhaustive, mean | worst | gain over all-as-the-slowest | over equal shares | plan ms, mean |\n"
             "| --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t devices : {4, 5, 6, 8, 12, 16}) {
    const int cases = devices == 4 ? 40 : devices == 5 ? 20 : 6;
    double ratio_sum = 0, ratio_worst = 1, slowest_gain = 0, equal_gain = 0, ms = 0;
    int done = 0;
    for (int number = 0; number < cases; ++number) {
      Prng prng(static_cast<uint64_t>(number * 100 + devices));
      const Cluster cluster = UnevenCluster(prng, devices);
      const Job job = UnevenJob(prng, devices);
      const CostModel model = Must(CostModel::Create(cluster, job, BuiltInTables(), {}));
      const auto start = Clock::now();
      const auto plan = MakePlan(model);
      ms += Milliseconds(start);
      if (!plan.ok()) continue;
      ++done;
      const double step = plan->evaluation.step_seconds;
      if (devices <= 6) {
        const double ratio = Exhaustive(model) / step;
        ratio_sum += ratio;
        ratio_worst = std::min(ratio_worst, ratio);
      }
      // A planner that takes every device for the slowest, run on the real ones.
      Cluster flat = cluster;
      double speed = kInfinite, memory = kInfinite;
      for (const PlanServer& s : cluster.servers) {
        speed = std::min(speed, s.speed);
        if (s.memory_bytes > 0) memory = std::min(memory, s.memory_bytes);
      }
      for (PlanServer& s : flat.servers) {
        s.speed = speed;
        if (memory < kInfinite) s.memory_bytes = memory;
      }
      const auto slow = MakePlan(flat, job, BuiltInTables());
      slowest_gain += slow.ok() ? model.Evaluate(slow->layout, true).step_seconds / step : 1;
      // The same places with equal shares.
      Layout equal = plan->layout;
      for (size_t r = 0; r < equal.shares.size(); ++r) {
        const auto count = static_cast<int64_t>(equal.shares.size());
        equal.shares[r] = job.global_batch / count + (static_cast<int64_t>(r) < job.global_batch % count ? 1 : 0);
      }
      equal_gain += model.Evaluate(equal, true).step_seconds / step;
    }
    const std::string mean = devices <= 6 ? fmt::format("{:.2f} %", 100 * ratio_sum / done) : "-";
    const std::string worst = devices <= 6 ? fmt::format("{:.2f} %", 100 * ratio_worst) : "-";
    fmt::print("| {} | {} | {} | {} | {:.2f}x | {:.2f}x | {:.1f} |\n", devices, done, mean, worst, slowest_gain / done,
               equal_gain / done, ms / cases);
    std::fflush(stdout);
  }
  fmt::print("\n");
}

}  // namespace
}  // namespace everstep::planner

int main(int argc, char** argv) {
  using namespace everstep::planner;
  std::vector<std::string> parts(argv + 1, argv + argc);
  if (parts.empty()) parts = {"published", "templates", "uneven", "scale"};
  for (const std::string& part : parts) {
    if (part == "published") {
      PrintPublished();
    } else if (part == "scale") {
      PrintScale();
    } else if (part == "templates") {
      PrintTemplates();
    } else if (part == "uneven") {
      PrintUneven();
    } else {
      fmt::print(stderr, "planner_bench: no part named {}\n", part);
      return 2;
    }
  }
  return 0;
}
