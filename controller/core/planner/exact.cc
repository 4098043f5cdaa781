#include "controller/core/planner/exact.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <queue>

#include <fmt/format.h>

#include "proto/base/check.h"

namespace everstep::planner {

Result<std::vector<int64_t>> MicroBatchShares(int64_t total, const std::vector<ShareTerm>& terms) {
  std::vector<int64_t> shares(terms.size(), 0);
  int64_t given = 0;
  int64_t room = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    const ShareTerm& t = terms[i];
    const bool times = std::isfinite(t.each) && t.each > 0 && std::isfinite(t.fixed) && t.fixed >= 0;
    if (!times || t.least < 0 || t.cap < t.least) return InvalidArgument("a share's time is not positive, or its bounds cross");
    shares[i] = t.least;
    given += t.least;
    room += std::min(t.cap, total);
  }
  if (total < given || total > room) {
    return ResourceExhausted(fmt::format("{} micro-batches do not fit {} replicas that take {} to {}", total, terms.size(),
                                         given, room));
  }
  // Where all shares were fractions, every replica with a share would end at `level`. Micro-batches are given in the order
  // of the time at which they end, so those that end before it go out at once, when they are not too many (bounds can
  // make them so); the rest goes through the heap.
  double level = kInfinite;
  for (size_t round = 0; round <= terms.size(); ++round) {
    double rate = 0, offset = 0;
    for (const ShareTerm& t : terms) {
      if (t.fixed >= level) continue;
      rate += 1 / t.each;
      offset += t.fixed / t.each;
    }
    if (rate <= 0) break;
    const double next = (static_cast<double>(total) + offset) / rate;
    if (next >= level) break;
    level = next;
  }
  std::vector<int64_t> early = shares;
  int64_t early_total = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    const double whole = std::floor((level - terms[i].fixed) / terms[i].each * (1 - 1e-12)) - 1;
    if (whole >= 1) early[i] = std::max(early[i], std::min({static_cast<int64_t>(whole), terms[i].cap, total}));
    early_total += early[i];
  }
  if (early_total <= total) {
    shares = std::move(early);
    given = early_total;
  }
  using Entry = std::pair<double, size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  const auto push = [&](size_t i) {
    if (shares[i] < terms[i].cap) heap.emplace(terms[i].fixed + static_cast<double>(shares[i] + 1) * terms[i].each, i);
  };
  for (size_t i = 0; i < terms.size(); ++i) push(i);
  for (; given < total; ++given) {
    EVERSTEP_CHECK(!heap.empty());
    const size_t i = heap.top().second;
    heap.pop();
    ++shares[i];
    push(i);
  }
  return shares;
}

BucketPlan GradientBuckets(const std::vector<double>& bytes, const std::vector<double>& ready, double latency,
                           double seconds_per_byte) {
  EVERSTEP_CHECK(bytes.size() == ready.size());
  const size_t count = bytes.size();
  std::vector<double> finish(count + 1, kInfinite);
  std::vector<size_t> from(count + 1, 0);
  std::vector<double> before(count + 1, 0);
  for (size_t i = 0; i < count; ++i) before[i + 1] = before[i] + bytes[i];
  finish[0] = 0;
  for (size_t i = 1; i <= count; ++i) {
    for (size_t j = i; j-- > 0;) {
      const double end = std::max(finish[j], ready[i - 1]) + latency + seconds_per_byte * (before[i] - before[j]);
      if (end < finish[i]) {
        finish[i] = end;
        from[i] = j;
      }
      // Finishes never fall from one gradient to the next: a bucket that waits for its gradient only does not begin
      // earlier when it grows.
      if (finish[j] <= ready[i - 1]) break;
    }
  }
  BucketPlan plan;
  plan.finish = finish[count];
  for (size_t i = count; i > 0; i = from[i]) plan.ends.push_back(static_cast<int32_t>(i));
  std::reverse(plan.ends.begin(), plan.ends.end());
  return plan;
}

ChainPlan PartitionInOrder(const std::vector<ChainLayer>& layers, const std::vector<ChainDevice>& devices,
                           const std::vector<double>& links) {
  const size_t layer_count = layers.size();
  const size_t device_count = devices.size();
  EVERSTEP_CHECK(device_count > 0 && layer_count > 0 && links.size() + 1 >= device_count);
  const auto at = [&](size_t j, size_t b) { return j * (device_count + 1) + b; };
  struct Cell {
    double worst = kInfinite;
    size_t layer = 0, device = 0;
  };
  std::vector<Cell> cells((layer_count + 1) * (device_count + 1));
  cells[at(0, 0)].worst = 0;
  for (size_t j = 1; j <= layer_count; ++j) {
    for (size_t b = 1; b <= device_count; ++b) {
      Cell& cell = cells[at(j, b)];
      double work = 0, memory = 0;
      for (size_t i = j; i-- > 0;) {
        work += layers[i].work;
        memory += layers[i].memory;
        double speed = 0, least = kInfinite;
        for (size_t a = b; a-- > 0;) {
          speed += devices[a].speed;
          least = std::min(least, devices[a].memory);
          if (memory > least) break;
          double worst = std::max(cells[at(i, a)].worst, work / speed);
          if (i > 0 && a > 0) worst = std::max(worst, layers[i - 1].output / links[a - 1]);
          if (worst < cell.worst) cell = {worst, i, a};
        }
      }
    }
  }
  ChainPlan plan;
  plan.bottleneck = cells[at(layer_count, device_count)].worst;
  if (plan.bottleneck == kInfinite) return plan;
  for (size_t j = layer_count, b = device_count; j > 0;) {
    const Cell& cell = cells[at(j, b)];
    ChainStage stage{static_cast<int32_t>(cell.layer), static_cast<int32_t>(j), {}};
    for (size_t d = cell.device; d < b; ++d) stage.devices.push_back(static_cast<int32_t>(d));
    plan.stages.insert(plan.stages.begin(), std::move(stage));
    j = cell.layer;
    b = cell.device;
  }
  return plan;
}

ChainPlan PartitionAndPlace(const std::vector<ChainLayer>& layers, const std::vector<ChainDevice>& devices,
                            const std::vector<std::vector<double>>& links) {
  const size_t layer_count = layers.size();
  const size_t device_count = devices.size();
  EVERSTEP_CHECK(layer_count > 0 && device_count > 0 && device_count <= kPlacementDevicesMax);
  struct Cell {
    double worst = kInfinite, sum = kInfinite;
    size_t layer = 0, previous = kPlacementDevicesMax;  // of the cell before
  };
  const size_t masks = size_t{1} << device_count;
  const auto at = [&](size_t j, size_t mask, size_t last) { return (j * masks + mask) * device_count + last; };
  std::vector<Cell> cells((layer_count + 1) * masks * device_count);
  std::vector<double> work(layer_count + 1, 0), memory(layer_count + 1, 0);
  for (size_t i = 0; i < layer_count; ++i) {
    work[i + 1] = work[i] + layers[i].work;
    memory[i + 1] = memory[i] + layers[i].memory;
  }
  const auto stage = [&](size_t device, size_t begin, size_t end) {
    if (memory[end] - memory[begin] > devices[device].memory) return kInfinite;
    return (work[end] - work[begin]) / devices[device].speed;
  };
  for (size_t j = 1; j <= layer_count; ++j) {
    for (size_t mask = 1; mask < masks; ++mask) {
      for (size_t last = 0; last < device_count; ++last) {
        if ((mask >> last & 1) == 0) continue;
        Cell& cell = cells[at(j, mask, last)];
        const size_t rest = mask & ~(size_t{1} << last);
        for (size_t i = 0; i < j; ++i) {
          const double own = stage(last, i, j);
          if (own == kInfinite) continue;
          if (i == 0) {
            if (rest == 0 && (own < cell.worst)) cell = {own, own, 0, kPlacementDevicesMax};
            continue;
          }
          for (size_t previous = 0; previous < device_count; ++previous) {
            if ((rest >> previous & 1) == 0) continue;
            const Cell& before = cells[at(i, rest, previous)];
            if (before.worst == kInfinite || links[previous][last] <= 0) continue;
            const double transfer = layers[i - 1].output / links[previous][last];
            const double worst = std::max({before.worst, own, transfer});
            const double sum = before.sum + own + transfer;
            if (worst < cell.worst || (worst == cell.worst && sum < cell.sum)) cell = {worst, sum, i, previous};
          }
        }
      }
    }
  }
  ChainPlan plan;
  size_t best_mask = 0, best_last = 0;
  double best_sum = kInfinite;
  for (size_t mask = 1; mask < masks; ++mask) {
    for (size_t last = 0; last < device_count; ++last) {
      const Cell& cell = cells[at(layer_count, mask, last)];
      if (cell.worst < plan.bottleneck || (cell.worst == plan.bottleneck && cell.sum < best_sum)) {
        plan.bottleneck = cell.worst;
        best_sum = cell.sum;
        best_mask = mask;
        best_last = last;
      }
    }
  }
  if (plan.bottleneck == kInfinite) return plan;
  for (size_t j = layer_count, mask = best_mask, last = best_last; j > 0;) {
    const Cell& cell = cells[at(j, mask, last)];
    plan.stages.insert(plan.stages.begin(), {static_cast<int32_t>(cell.layer), static_cast<int32_t>(j),
                                             {static_cast<int32_t>(last)}});
    mask &= ~(size_t{1} << last);
    j = cell.layer;
    last = cell.previous;
  }
  return plan;
}

std::vector<int32_t> CutForTemplate(const std::vector<double>& work, int32_t stages, int64_t micro_batches) {
  const auto count = static_cast<int32_t>(work.size());
  if (stages < 1 || stages > count) return {};
  std::vector<double> sum(work.size() + 1, 0);
  for (size_t i = 0; i < work.size(); ++i) sum[i + 1] = sum[i] + work[i];
  const auto run = [&](int32_t begin, int32_t end) { return sum[static_cast<size_t>(end)] - sum[static_cast<size_t>(begin)]; };
  // Fewest runs of [begin, end) that stay within `limit` (below it, when strict); count + 1: none.
  const auto fewest = [&](int32_t begin, int32_t end, double limit, bool strict) {
    int32_t runs = 0;
    for (int32_t at = begin; at < end; ++runs) {
      int32_t next = at;
      while (next < end && (strict ? run(at, next + 1) < limit : run(at, next + 1) <= limit)) ++next;
      if (next == at) return count + 1;
      at = next;
    }
    return runs;
  };
  double best = kInfinite;
  int32_t best_begin = 0, best_end = 0, best_before = 0;
  for (int32_t begin = 0; begin < count; ++begin) {
    for (int32_t end = begin + 1; end <= count; ++end) {
      const double slowest = run(begin, end);
      const int32_t least_before = fewest(0, begin, slowest, false);
      const int32_t least_after = fewest(end, count, slowest, true);
      if (least_before > begin || least_after > count - end) continue;
      // As many stages behind it as there can be, so that few are before it.
      const int32_t before = std::max(least_before, stages - 1 - (count - end));
      if (before > begin || before + 1 + least_after > stages) continue;
      const double cost = sum.back() + static_cast<double>(micro_batches - stages + before - 1) * slowest + run(begin, count);
      if (cost >= best) continue;
      best = cost;
      best_begin = begin;
      best_end = end;
      best_before = before;
    }
  }
  if (best == kInfinite) return {};
  // Fill each side greedily, leaving a layer for every stage that still follows.
  std::vector<int32_t> bounds = {0};
  const auto fill = [&](int32_t begin, int32_t end, int32_t runs, bool strict) {
    const double limit = run(best_begin, best_end);
    for (int32_t at = begin, left = runs; left > 0; --left) {
      int32_t next = at + 1;
      while (next < end - (left - 1) && (strict ? run(at, next + 1) < limit : run(at, next + 1) <= limit)) ++next;
      bounds.push_back(next);
      at = next;
    }
  };
  fill(0, best_begin, best_before, false);
  bounds.push_back(best_end);
  fill(best_end, count, stages - 1 - best_before, true);
  return bounds;
}

namespace {

// The weakest cut of the graph on `nodes` (Stoer and Wagner): the nodes of one side. O(n^3).
std::vector<int32_t> WeakestCut(const std::vector<std::vector<double>>& bandwidth, const std::vector<int32_t>& nodes) {
  const size_t count = nodes.size();
  std::vector<std::vector<double>> weight(count, std::vector<double>(count, 0));
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = 0; b < count; ++b) {
      if (a != b) weight[a][b] = bandwidth[static_cast<size_t>(nodes[a])][static_cast<size_t>(nodes[b])];
    }
  }
  std::vector<std::vector<int32_t>> merged(count);
  std::vector<size_t> alive;
  for (size_t i = 0; i < count; ++i) {
    merged[i] = {nodes[i]};
    alive.push_back(i);
  }
  double best = kInfinite;
  std::vector<int32_t> side;
  while (alive.size() > 1) {
    std::vector<double> pull(count, 0);
    std::vector<bool> added(count, false);
    size_t previous = alive[0], last = alive[0];
    for (size_t step = 0; step < alive.size(); ++step) {
      size_t next = count;
      for (const size_t i : alive) {
        if (!added[i] && (next == count || pull[i] > pull[next])) next = i;
      }
      added[next] = true;
      previous = last;
      last = next;
      if (step + 1 == alive.size()) break;
      for (const size_t i : alive) {
        if (!added[i]) pull[i] += weight[next][i];
      }
    }
    if (pull[last] < best) {
      best = pull[last];
      side = merged[last];
    }
    for (const size_t i : alive) {
      weight[previous][i] += weight[last][i];
      weight[i][previous] = weight[previous][i];
    }
    merged[previous].insert(merged[previous].end(), merged[last].begin(), merged[last].end());
    alive.erase(std::find(alive.begin(), alive.end(), last));
  }
  std::sort(side.begin(), side.end());
  return side;
}

void OrderInto(const std::vector<std::vector<double>>& bandwidth, const std::vector<int32_t>& nodes,
               std::vector<int32_t>* order) {
  if (nodes.size() <= 2) {
    order->insert(order->end(), nodes.begin(), nodes.end());
    return;
  }
  std::vector<int32_t> side = WeakestCut(bandwidth, nodes);
  std::vector<int32_t> rest;
  std::set_difference(nodes.begin(), nodes.end(), side.begin(), side.end(), std::back_inserter(rest));
  if (rest.front() < side.front()) std::swap(side, rest);
  std::vector<int32_t> first, second;
  OrderInto(bandwidth, side, &first);
  OrderInto(bandwidth, rest, &second);
  // The two halves may be turned: the strongest of the four possible joints.
  const auto link = [&](int32_t a, int32_t b) { return bandwidth[static_cast<size_t>(a)][static_cast<size_t>(b)]; };
  double best = link(first.back(), second.front());
  int turn = 0;
  const double joints[3] = {link(first.front(), second.front()), link(first.back(), second.back()),
                            link(first.front(), second.back())};
  for (int i = 0; i < 3; ++i) {
    if (joints[i] > best) {
      best = joints[i];
      turn = i + 1;
    }
  }
  if (turn == 1 || turn == 3) std::reverse(first.begin(), first.end());
  if (turn == 2 || turn == 3) std::reverse(second.begin(), second.end());
  order->insert(order->end(), first.begin(), first.end());
  order->insert(order->end(), second.begin(), second.end());
}

}  // namespace

std::vector<int32_t> DeviceOrder(const std::vector<std::vector<double>>& bandwidth) {
  std::vector<int32_t> nodes;
  for (size_t i = 0; i < bandwidth.size(); ++i) nodes.push_back(static_cast<int32_t>(i));
  std::vector<int32_t> order;
  OrderInto(bandwidth, nodes, &order);
  return order;
}

std::vector<int32_t> RingOrder(const std::vector<std::vector<double>>& bandwidth) {
  std::vector<int32_t> ring = DeviceOrder(bandwidth);
  const size_t count = ring.size();
  const auto link = [&](size_t i, size_t k) {
    return bandwidth[static_cast<size_t>(ring[i % count])][static_cast<size_t>(ring[k % count])];
  };
  const auto score = [&] {
    double least = kInfinite, sum = 0;
    for (size_t i = 0; i < count; ++i) {
      least = std::min(least, link(i, i + 1));
      sum += link(i, i + 1);
    }
    return std::make_pair(least, sum);
  };
  if (count > 3) {
    auto best = score();
    for (bool better = true; better;) {
      better = false;
      for (size_t i = 0; i + 1 < count; ++i) {
        for (size_t k = i + 1; k < count; ++k) {
          // Reversing i+1..k exchanges the edges (i, i+1) and (k, k+1).
          const double gain = link(i, k) + link(i + 1, k + 1) - link(i, i + 1) - link(k, k + 1);
          const double weaker = std::min(link(i, i + 1), link(k, k + 1));
          if (gain <= 0 && std::min(link(i, k), link(i + 1, k + 1)) <= weaker) continue;
          std::reverse(ring.begin() + static_cast<std::ptrdiff_t>(i + 1), ring.begin() + static_cast<std::ptrdiff_t>(k + 1));
          const auto now = score();
          if (now.first > best.first || (now.first == best.first && now.second > best.second * (1 + 1e-12))) {
            best = now;
            better = true;
          } else {
            std::reverse(ring.begin() + static_cast<std::ptrdiff_t>(i + 1), ring.begin() + static_cast<std::ptrdiff_t>(k + 1));
          }
        }
      }
    }
  }
  std::rotate(ring.begin(), std::find(ring.begin(), ring.end(), 0), ring.end());
  return ring;
}

}  // namespace everstep::planner
