// Exact cores of the planner, each a pure function that brute force confirms (tests/unit/planner): shares, gradient
// buckets, partition with placement, device order, ring order. Ties end in indexes. Thread-compatible.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "proto/base/status.h"

namespace everstep::planner {

inline constexpr double kInfinite = std::numeric_limits<double>::infinity();

// One replica's time for n micro-batches is fixed + n * each; it takes between `least` and `cap` of them.
struct ShareTerm {
  double fixed = 0;
  double each = 1;
  int64_t least = 0;
  int64_t cap = std::numeric_limits<int64_t>::max();
};
// Shares that add up to `total` with the smallest possible greatest time; the lower index gets a tie.
// kInvalidArgument: a time that is not positive; kResourceExhausted: the caps or the least shares do not admit the total.
Result<std::vector<int64_t>> MicroBatchShares(int64_t total, const std::vector<ShareTerm>& terms);

// Gradients in the order in which backward makes them. Merging neighbours saves start-up time and delays the first.
struct BucketPlan {
  std::vector<int32_t> ends;      // each bucket's end (exclusive) in the order of gradients
  double finish = 0;              // when the last all-reduce ends, on the clock of `ready`
};
// Smallest finish over all ways to cut: O(L^2). REQUIRES: equal sizes of both vectors, ready not falling.
BucketPlan GradientBuckets(const std::vector<double>& bytes, const std::vector<double>& ready, double latency,
                           double seconds_per_byte);

// A chain of layers for partitions.
struct ChainLayer {
  double work = 0;
  double memory = 0;
  double output = 0;              // bytes handed to the next layer
};
struct ChainDevice {
  double speed = 1;
  double memory = kInfinite;
};
struct ChainStage {
  int32_t layer_begin = 0, layer_end = 0;
  std::vector<int32_t> devices;
};
struct ChainPlan {
  double bottleneck = kInfinite;  // kInfinite: nothing fits
  std::vector<ChainStage> stages;
};
// Devices in a given order: each stage is a run of layers on a run of devices which split its work; leading devices first,
// all of them used. links[i]: bandwidth between device i and i + 1. O(L^2 n^2).
ChainPlan PartitionInOrder(const std::vector<ChainLayer>& layers, const std::vector<ChainDevice>& devices,
                           const std::vector<double>& links);

inline constexpr size_t kPlacementDevicesMax = 8;
// Any order, any subset, one device for each stage; links[a][b]: bandwidth from a to b. Exact over the subsets of at
// most kPlacementDevicesMax devices: O(L^2 n^2 2^n). Of equal bottlenecks, the plan with the smaller sum of times.
ChainPlan PartitionAndPlace(const std::vector<ChainLayer>& layers, const std::vector<ChainDevice>& devices,
                            const std::vector<std::vector<double>>& links);

// Cuts `layers` into exactly `stages` non-empty runs. run(stage, begin, end) is the time of a run, kInfinite when it does
// not fit; it never falls when the run grows. joint(stage, begin) is the time of the transfer into a stage that begins
// there. Smallest greatest time first, then the smallest sum. Empty: nothing fits. O(stages * layers^2).
template <typename Run, typename Joint>
std::vector<int32_t> CutChain(int32_t layers, int32_t stages, const Run& run, const Joint& joint) {
  if (stages < 1 || stages > layers) return {};
  const auto width = static_cast<size_t>(layers + 1);
  struct Cell {
    double worst = kInfinite, sum = kInfinite;
    int32_t from = -1;
  };
  std::vector<Cell> cells(width * static_cast<size_t>(stages + 1));
  cells[0] = {0, 0, 0};
  for (int32_t s = 1; s <= stages; ++s) {
    const Cell* before = &cells[static_cast<size_t>(s - 1) * width];
    Cell* row = &cells[static_cast<size_t>(s) * width];
    for (int32_t end = s; end <= layers - (stages - s); ++end) {
      Cell& cell = row[end];
      for (int32_t begin = end - 1; begin >= s - 1; --begin) {
        const double own = run(s - 1, begin, end);
        if (own > cell.worst || own == kInfinite) break;  // so are all longer runs
        const Cell& rest = before[begin];
        if (rest.worst == kInfinite) continue;
        const double move = begin > 0 ? joint(s - 1, begin) : 0;
        double worst = rest.worst > own ? rest.worst : own;
        worst = worst > move ? worst : move;
        const double sum = rest.sum + own + move;
        if (worst < cell.worst || (worst == cell.worst && sum < cell.sum)) cell = {worst, sum, begin};
      }
    }
  }
  const Cell& last = cells[static_cast<size_t>(stages) * width + static_cast<size_t>(layers)];
  if (last.worst == kInfinite) return {};
  std::vector<int32_t> bounds(static_cast<size_t>(stages + 1), layers);
  for (int32_t s = stages; s > 0; --s) {
    bounds[static_cast<size_t>(s - 1)] =
        cells[static_cast<size_t>(s) * width + static_cast<size_t>(bounds[static_cast<size_t>(s)])].from;
  }
  return bounds;
}

// The cut of a chain into `stages` runs with the least cost of a pipeline template (TemplateCost, schedule.h). Exact: each
// run is tried as the rightmost slowest one, with as few stages before it as possible. O(L^3). Empty: stages > layers.
std::vector<int32_t> CutForTemplate(const std::vector<double>& work, int32_t stages, int64_t micro_batches);

// Nodes in an order in which strong links are neighbours: the graph is cut in two at its weakest cut, again and again.
// REQUIRES: a square, symmetric matrix of bandwidths.
std::vector<int32_t> DeviceOrder(const std::vector<std::vector<double>>& bandwidth);

// A ring whose weakest edge is as strong as exchanging edges (2-opt) can make it, then with the greatest sum of edges.
// Starts at node 0.
std::vector<int32_t> RingOrder(const std::vector<std::vector<double>>& bandwidth);

}  // namespace everstep::planner
