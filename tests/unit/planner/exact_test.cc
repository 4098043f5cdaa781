// The exact cores against brute force. Each random test prints its case on failure; cases are functions of their number.
#include "controller/core/planner/exact.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <gtest/gtest.h>

#include "controller/core/planner/schedule.h"
#include "proto/base/prng.h"

namespace everstep::planner {
namespace {

double BestShares(const std::vector<ShareTerm>& terms, size_t at, int64_t left, double worst) {
  if (at == terms.size()) return left == 0 ? worst : kInfinite;
  double best = kInfinite;
  for (int64_t n = terms[at].least; n <= std::min(left, terms[at].cap); ++n) {
    const double own = n > 0 ? terms[at].fixed + static_cast<double>(n) * terms[at].each : 0;
    best = std::min(best, BestShares(terms, at + 1, left - n, std::max(worst, own)));
  }
  return best;
}

TEST(ExactTest, SharesEqualBruteForceOn3000Cases) {
  for (int number = 0; number < 3000; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 1);
    const auto total = prng.Between(1, 9);
    std::vector<ShareTerm> terms;
    for (int64_t i = prng.Between(1, 4); i > 0; --i) {
      ShareTerm t;
      t.each = static_cast<double>(prng.Between(1, 20)) / 4;
      if (prng.Chance(1, 2)) t.fixed = static_cast<double>(prng.Between(0, 40)) / 4;
      if (prng.Chance(1, 4)) t.least = 1;
      if (prng.Chance(1, 3)) t.cap = prng.Between(t.least, 5);
      terms.push_back(t);
    }
    const double best = BestShares(terms, 0, total, 0);
    const auto shares = MicroBatchShares(total, terms);
    ASSERT_EQ(shares.ok(), best < kInfinite) << "case " << number;
    if (!shares.ok()) continue;
    double worst = 0;
    for (size_t i = 0; i < terms.size(); ++i) {
      const auto n = (*shares)[i];
      EXPECT_GE(n, terms[i].least);
      EXPECT_LE(n, terms[i].cap);
      if (n > 0) worst = std::max(worst, terms[i].fixed + static_cast<double>(n) * terms[i].each);
    }
    EXPECT_EQ(std::accumulate(shares->begin(), shares->end(), int64_t{0}), total);
    EXPECT_DOUBLE_EQ(worst, best) << "case " << number;
  }
}

TEST(ExactTest, SpeedsOneTwoFourShareAsOneTwoFour) {
  for (int64_t total = 7; total <= 4096; total += 5) {
    const auto shares = MicroBatchShares(total, {{0, 4}, {0, 2}, {0, 1}});
    ASSERT_TRUE(shares.ok());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(static_cast<double>((*shares)[i]), static_cast<double>(total) * (1 << i) / 7, 1) << total;
    }
  }
}

TEST(ExactTest, SharesOfManyReplicasTakeTheShortcutAndStayOptimal) {
  // Against the plain heap: one micro-batch at a time to whoever ends first.
  for (int number = 0; number < 100; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 77);
    std::vector<ShareTerm> terms;
    for (int i = 0; i < 20; ++i) {
      terms.push_back({static_cast<double>(prng.Between(0, 900)), static_cast<double>(prng.Between(1, 50)), 1});
    }
    const auto total = prng.Between(20, 400);
    std::vector<int64_t> plain(terms.size(), 1);
    for (int64_t given = 20; given < total; ++given) {
      size_t best = 0;
      const auto end = [&](size_t i) { return terms[i].fixed + static_cast<double>(plain[i] + 1) * terms[i].each; };
      for (size_t i = 1; i < terms.size(); ++i) {
        if (end(i) < end(best)) best = i;
      }
      ++plain[best];
    }
    const auto shares = MicroBatchShares(total, terms);
    ASSERT_TRUE(shares.ok());
    double expected = 0, actual = 0;
    for (size_t i = 0; i < terms.size(); ++i) {
      expected = std::max(expected, terms[i].fixed + static_cast<double>(plain[i]) * terms[i].each);
      actual = std::max(actual, terms[i].fixed + static_cast<double>((*shares)[i]) * terms[i].each);
    }
    EXPECT_DOUBLE_EQ(actual, expected) << "case " << number;
  }
}

TEST(ExactTest, SharesRefuseWhatCannotBe) {
  EXPECT_EQ(MicroBatchShares(4, {{0, 0}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MicroBatchShares(4, {{0, -1}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(MicroBatchShares(4, {{0, std::numeric_limits<double>::quiet_NaN()}}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(MicroBatchShares(4, {{0, 1, 0, 3}}).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(MicroBatchShares(1, {{0, 1, 1}, {0, 1, 1}}).status().code(), StatusCode::kResourceExhausted);
}

TEST(ExactTest, BucketsEqualBruteForceOn3000Cases) {
  for (int number = 0; number < 3000; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 5);
    const auto count = static_cast<size_t>(prng.Between(1, 9));
    std::vector<double> bytes, ready;
    double clock = 0;
    for (size_t i = 0; i < count; ++i) {
      bytes.push_back(static_cast<double>(prng.Between(0, 12)));
      clock += static_cast<double>(prng.Between(0, 6));
      ready.push_back(clock);
    }
    const auto latency = static_cast<double>(prng.Between(0, 8));
    double best = kInfinite;
    for (uint32_t cuts = 0; cuts < 1u << (count - 1); ++cuts) {
      double finish = 0, size = 0;
      for (size_t i = 0; i < count; ++i) {
        size += bytes[i];
        if (i + 1 == count || (cuts >> i & 1) != 0) {
          finish = std::max(finish, ready[i]) + latency + size;
          size = 0;
        }
      }
      best = std::min(best, finish);
    }
    const BucketPlan plan = GradientBuckets(bytes, ready, latency, 1);
    EXPECT_DOUBLE_EQ(plan.finish, best) << "case " << number;
    ASSERT_EQ(plan.ends.back(), static_cast<int32_t>(count));
    double finish = 0;
    for (size_t b = 0, i = 0; b < plan.ends.size(); ++b) {
      double size = 0;
      for (; i < static_cast<size_t>(plan.ends[b]); ++i) size += bytes[i];
      finish = std::max(finish, ready[i - 1]) + latency + size;
    }
    EXPECT_DOUBLE_EQ(finish, plan.finish) << "case " << number;
  }
}

TEST(ExactTest, BucketsBeatTheGreedyRuleOnItsSmallestCounterexample) {
  // Layers 2, 1, 0 in the order of backward: sizes 3, 1, 2, ready at 1, 3, 7.
  EXPECT_DOUBLE_EQ(GradientBuckets({3, 1, 2}, {1, 3, 7}, 3, 1).finish, 13);
}

TEST(ExactTest, BucketsChangeWhenLatencyRises) {
  const std::vector<double> bytes(12, 4), ready = {4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48};
  EXPECT_GT(GradientBuckets(bytes, ready, 0.1, 0.5).ends.size(), GradientBuckets(bytes, ready, 10, 0.5).ends.size());
}

struct RandomChain {
  std::vector<ChainLayer> layers;
  std::vector<ChainDevice> devices;
  std::vector<std::vector<double>> links;
};
RandomChain MakeChain(int number) {
  Prng prng(static_cast<uint64_t>(number) + 11);
  RandomChain chain;
  for (int64_t i = prng.Between(1, 7); i > 0; --i) {
    chain.layers.push_back({static_cast<double>(prng.Between(1, 30)), static_cast<double>(prng.Between(1, 10)),
                            static_cast<double>(prng.Between(1, 40))});
  }
  const auto devices = static_cast<size_t>(prng.Between(1, 5));
  chain.links.assign(devices, std::vector<double>(devices, 0));
  for (size_t a = 0; a < devices; ++a) {
    ChainDevice device{static_cast<double>(prng.Between(1, 8)), kInfinite};
    if (prng.Chance(2, 3)) device.memory = static_cast<double>(prng.Between(4, 40));
    chain.devices.push_back(device);
    for (size_t b = 0; b < a; ++b) chain.links[a][b] = chain.links[b][a] = static_cast<double>(prng.Between(1, 16));
  }
  return chain;
}

// All cuts of the layers over all ordered choices of devices.
double BestPlacement(const RandomChain& c, size_t layer, uint32_t used, size_t last) {
  if (layer == c.layers.size()) return 0;
  double best = kInfinite;
  for (size_t d = 0; d < c.devices.size(); ++d) {
    if ((used >> d & 1) != 0) continue;
    const double move = layer == 0 ? 0 : c.layers[layer - 1].output / c.links[last][d];
    double work = 0, memory = 0;
    for (size_t end = layer + 1; end <= c.layers.size(); ++end) {
      work += c.layers[end - 1].work;
      memory += c.layers[end - 1].memory;
      if (memory > c.devices[d].memory) break;
      best = std::min(best, std::max({move, work / c.devices[d].speed, BestPlacement(c, end, used | 1u << d, d)}));
    }
  }
  return best;
}

TEST(ExactTest, PartitionAndPlacementEqualBruteForceOn1000Cases) {
  int fitting = 0;
  for (int number = 0; number < 1000; ++number) {
    const RandomChain chain = MakeChain(number);
    const ChainPlan plan = PartitionAndPlace(chain.layers, chain.devices, chain.links);
    EXPECT_DOUBLE_EQ(plan.bottleneck, BestPlacement(chain, 0, 0, 0)) << "case " << number;
    if (plan.bottleneck == kInfinite) continue;
    ++fitting;
    // The plan is what it says.
    double worst = 0;
    int32_t at = 0;
    uint32_t used = 0;
    for (size_t s = 0; s < plan.stages.size(); ++s) {
      const ChainStage& stage = plan.stages[s];
      ASSERT_EQ(stage.layer_begin, at);
      at = stage.layer_end;
      const auto d = static_cast<size_t>(stage.devices[0]);
      EXPECT_EQ(used >> d & 1, 0u);
      used |= 1u << d;
      double work = 0, memory = 0;
      for (int32_t i = stage.layer_begin; i < stage.layer_end; ++i) {
        work += chain.layers[static_cast<size_t>(i)].work;
        memory += chain.layers[static_cast<size_t>(i)].memory;
      }
      EXPECT_LE(memory, chain.devices[d].memory);
      worst = std::max(worst, work / chain.devices[d].speed);
      if (s > 0) {
        worst = std::max(worst, chain.layers[static_cast<size_t>(stage.layer_begin - 1)].output /
                                    chain.links[static_cast<size_t>(plan.stages[s - 1].devices[0])][d]);
      }
    }
    EXPECT_EQ(at, static_cast<int32_t>(chain.layers.size()));
    EXPECT_DOUBLE_EQ(worst, plan.bottleneck);
  }
  EXPECT_GT(fitting, 500);  // the cases are about plans, not refusals
}

// All cuts of layers and of the ordered devices at once.
double BestInOrder(const RandomChain& c, size_t layer, size_t device) {
  if (layer == c.layers.size()) return device == c.devices.size() ? 0 : kInfinite;
  double best = kInfinite;
  const double move = layer == 0 || device == 0 ? 0 : c.layers[layer - 1].output / c.links[device - 1][std::min(device, c.devices.size() - 1)];
  for (size_t last = device + 1; last <= c.devices.size(); ++last) {
    double speed = 0, least = kInfinite;
    for (size_t d = device; d < last; ++d) {
      speed += c.devices[d].speed;
      least = std::min(least, c.devices[d].memory);
    }
    double work = 0, memory = 0;
    for (size_t end = layer + 1; end <= c.layers.size(); ++end) {
      work += c.layers[end - 1].work;
      memory += c.layers[end - 1].memory;
      if (memory > least) break;
      best = std::min(best, std::max({move, work / speed, BestInOrder(c, end, last)}));
    }
  }
  return best;
}

TEST(ExactTest, PartitionOverDevicesInOrderEqualsBruteForceOn1000Cases) {
  for (int number = 0; number < 1000; ++number) {
    const RandomChain chain = MakeChain(number + 5000);
    std::vector<double> links;
    for (size_t d = 0; d + 1 < chain.devices.size(); ++d) links.push_back(chain.links[d][d + 1]);
    const ChainPlan plan = PartitionInOrder(chain.layers, chain.devices, links);
    EXPECT_DOUBLE_EQ(plan.bottleneck, BestInOrder(chain, 0, 0)) << "case " << number;
  }
}

TEST(ExactTest, PermutingDeviceNumbersDoesNotChangeTheCost) {
  for (int number = 0; number < 200; ++number) {
    const RandomChain chain = MakeChain(number);
    Prng prng(static_cast<uint64_t>(number));
    std::vector<size_t> order(chain.devices.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[prng.UpTo(i - 1)]);
    RandomChain other = chain;
    for (size_t a = 0; a < order.size(); ++a) {
      other.devices[a] = chain.devices[order[a]];
      for (size_t b = 0; b < order.size(); ++b) other.links[a][b] = chain.links[order[a]][order[b]];
    }
    EXPECT_DOUBLE_EQ(PartitionAndPlace(chain.layers, chain.devices, chain.links).bottleneck,
                     PartitionAndPlace(other.layers, other.devices, other.links).bottleneck) << "case " << number;
  }
}

TEST(ExactTest, CutsOfAChainEqualBruteForce) {
  for (int number = 0; number < 1000; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 3);
    const auto layers = static_cast<int32_t>(prng.Between(1, 8));
    const auto stages = static_cast<int32_t>(prng.Between(1, layers));
    std::vector<double> work, output, speed, memory;
    for (int32_t i = 0; i < layers; ++i) {
      work.push_back(static_cast<double>(prng.Between(1, 20)));
      output.push_back(static_cast<double>(prng.Between(0, 30)));
    }
    for (int32_t s = 0; s < stages; ++s) {
      speed.push_back(static_cast<double>(prng.Between(1, 5)));
      memory.push_back(static_cast<double>(prng.Between(2, 8)));
    }
    const auto run = [&](int32_t s, int32_t begin, int32_t end) {
      if (end - begin > memory[static_cast<size_t>(s)]) return kInfinite;
      double sum = 0;
      for (int32_t i = begin; i < end; ++i) sum += work[static_cast<size_t>(i)];
      return sum / speed[static_cast<size_t>(s)];
    };
    const auto joint = [&](int32_t, int32_t begin) { return output[static_cast<size_t>(begin - 1)]; };
    std::function<double(int32_t, int32_t)> brute = [&](int32_t s, int32_t begin) -> double {
      if (s == stages) return begin == layers ? 0 : kInfinite;
      double best = kInfinite;
      for (int32_t end = begin + 1; end <= layers; ++end) {
        best = std::min(best, std::max({run(s, begin, end), begin > 0 ? joint(s, begin) : 0, brute(s + 1, end)}));
      }
      return best;
    };
    const double best = brute(0, 0);
    const auto bounds = CutChain(layers, stages, run, joint);
    ASSERT_EQ(bounds.empty(), best == kInfinite) << "case " << number;
    if (bounds.empty()) continue;
    double worst = 0;
    for (int32_t s = 0; s < stages; ++s) {
      const int32_t begin = bounds[static_cast<size_t>(s)];
      worst = std::max(worst, run(s, begin, bounds[static_cast<size_t>(s + 1)]));
      if (begin > 0) worst = std::max(worst, joint(s, begin));
    }
    EXPECT_DOUBLE_EQ(worst, best) << "case " << number;
  }
}

TEST(ExactTest, TemplateCutsEqualBruteForce) {
  for (int number = 0; number < 1000; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 31);
    const auto layers = static_cast<int32_t>(prng.Between(1, 9));
    const auto stages = static_cast<int32_t>(prng.Between(1, layers));
    const int64_t micro_batches = 4 * stages;
    std::vector<double> work;
    for (int32_t i = 0; i < layers; ++i) work.push_back(static_cast<double>(prng.Between(1, 12)));
    const auto cost = [&](const std::vector<int32_t>& bounds) {
      std::vector<double> times;
      for (size_t s = 0; s + 1 < bounds.size(); ++s) {
        times.push_back(std::accumulate(work.begin() + bounds[s], work.begin() + bounds[s + 1], 0.0));
      }
      return TemplateCost(times, micro_batches);
    };
    double best = kInfinite;
    for (uint32_t cuts = 0; cuts < 1u << (layers - 1); ++cuts) {
      std::vector<int32_t> bounds = {0};
      for (int32_t i = 1; i < layers; ++i) {
        if ((cuts >> (i - 1) & 1) != 0) bounds.push_back(i);
      }
      bounds.push_back(layers);
      if (static_cast<int32_t>(bounds.size()) == stages + 1) best = std::min(best, cost(bounds));
    }
    const auto bounds = CutForTemplate(work, stages, micro_batches);
    ASSERT_EQ(static_cast<int32_t>(bounds.size()), stages + 1) << "case " << number;
    EXPECT_EQ(bounds.back(), layers);
    EXPECT_DOUBLE_EQ(cost(bounds), best) << "case " << number;
  }
}

TEST(ExactTest, DeviceOrderCrossesASlowBisectingLinkOnce) {
  // Two halves, interleaved by number, with one slow link between them.
  const size_t count = 8;
  std::vector<std::vector<double>> bandwidth(count, std::vector<double>(count, 0));
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = 0; b < count; ++b) {
      if (a != b) bandwidth[a][b] = a % 2 == b % 2 ? 100 : 1;
    }
  }
  const auto order = DeviceOrder(bandwidth);
  int crossings = 0;
  for (size_t i = 0; i + 1 < count; ++i) crossings += order[i] % 2 != order[i + 1] % 2;
  EXPECT_EQ(crossings, 1);
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < count; ++i) EXPECT_EQ(sorted[i], static_cast<int32_t>(i));
}

TEST(ExactTest, RingOrderIsWithinASmallFactorOfTheBestRingAndNeverBelowTheGivenOrder) {
  int exact = 0;
  for (int number = 0; number < 200; ++number) {
    Prng prng(static_cast<uint64_t>(number) + 9);
    const auto count = static_cast<size_t>(prng.Between(4, 7));
    std::vector<std::vector<double>> bandwidth(count, std::vector<double>(count, 0));
    for (size_t a = 0; a < count; ++a) {
      for (size_t b = 0; b < a; ++b) bandwidth[a][b] = bandwidth[b][a] = static_cast<double>(prng.Between(1, 20));
    }
    const auto weakest = [&](const std::vector<int32_t>& ring) {
      double least = kInfinite;
      for (size_t i = 0; i < count; ++i) {
        least = std::min(least, bandwidth[static_cast<size_t>(ring[i])][static_cast<size_t>(ring[(i + 1) % count])]);
      }
      return least;
    };
    std::vector<int32_t> ring(count);
    std::iota(ring.begin(), ring.end(), 0);
    double best = 0;
    do {
      best = std::max(best, weakest(ring));
    } while (std::next_permutation(ring.begin() + 1, ring.end()));
    const auto order = RingOrder(bandwidth);
    ASSERT_EQ(order.size(), count);
    EXPECT_EQ(order[0], 0);
    exact += weakest(order) == best;
  }
  EXPECT_GE(exact, 120);  // 2-opt is a heuristic; most small rings it finds
}

}  // namespace
}  // namespace everstep::planner
