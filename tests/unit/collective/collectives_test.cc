// Every collective, for every data type and reduction, on both backends and worlds of 1 to 5 ranks,
// against a naive reference; sizes on both sides of each switch between algorithms, and uneven
// ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "proto/base/prng.h"
#include "tests/unit/collective/world.h"
#include "worker/collective/fake/fake_fabric.h"
#include "worker/collective/reduce_kernels.h"

namespace everstep::collective {
namespace {

enum class Backend { kHost, kFake };
using Bytes = std::vector<std::byte>;

struct Case {
  Backend backend;
  int32_t size;
};

class Collectives : public testing::TestWithParam<Case> {
 protected:
  int32_t size() const { return GetParam().size; }
  size_t ranks() const { return static_cast<size_t>(GetParam().size); }

  void SetUp() override {
    if (GetParam().backend == Backend::kHost) {
      communicators_ = HostWorld(size()).Connect();
      return;
    }
    FakeFabric fabric({.size = size()});
    for (int32_t rank = 0; rank < size(); ++rank)
      communicators_.push_back(fabric.Connect(Rank(rank)));
  }

  void Everywhere(const std::function<void(Communicator&, size_t rank)>& body) {
    OnRanks(size(), [&](int32_t rank) {
      body(*communicators_[static_cast<size_t>(rank)], static_cast<size_t>(rank));
    });
  }

  std::vector<std::unique_ptr<Communicator>> communicators_;
};

constexpr DataType kTypes[] = {DataType::kU8,   DataType::kI8,  DataType::kI32,
                               DataType::kI64,  DataType::kU64, DataType::kF16,
                               DataType::kBF16, DataType::kF32, DataType::kF64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBitOr,   ReduceOp::kAvg};

// Small integers, so that sums and products of five are exact in every type and the reference needs
// no tolerance.
double SmallValue(uint64_t seed, size_t index) {
  return static_cast<double>((seed * 31 + index * 7) % 3);
}

void Store(DataType type, void* at, size_t i, double value) {
  switch (type) {
    case DataType::kU8: static_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(value); break;
    case DataType::kI8: static_cast<int8_t*>(at)[i] = static_cast<int8_t>(value); break;
    case DataType::kI32: static_cast<int32_t*>(at)[i] = static_cast<int32_t>(value); break;
    case DataType::kI64: static_cast<int64_t*>(at)[i] = static_cast<int64_t>(value); break;
    case DataType::kU64: static_cast<uint64_t*>(at)[i] = static_cast<uint64_t>(value); break;
    case DataType::kF16:
      static_cast<uint16_t*>(at)[i] = FloatToHalf(static_cast<float>(value));
      break;
    case DataType::kBF16:
      static_cast<uint16_t*>(at)[i] = FloatToBFloat16(static_cast<float>(value));
      break;
    case DataType::kF32: static_cast<float*>(at)[i] = static_cast<float>(value); break;
    case DataType::kF64: static_cast<double*>(at)[i] = value; break;
  }
}

double Load(DataType type, const void* at, size_t i) {
  switch (type) {
    case DataType::kU8: return static_cast<const uint8_t*>(at)[i];
    case DataType::kI8: return static_cast<const int8_t*>(at)[i];
    case DataType::kI32: return static_cast<const int32_t*>(at)[i];
    case DataType::kI64: return static_cast<double>(static_cast<const int64_t*>(at)[i]);
    case DataType::kU64: return static_cast<double>(static_cast<const uint64_t*>(at)[i]);
    case DataType::kF16: return HalfToFloat(static_cast<const uint16_t*>(at)[i]);
    case DataType::kBF16: return BFloat16ToFloat(static_cast<const uint16_t*>(at)[i]);
    case DataType::kF32: return static_cast<const float*>(at)[i];
    case DataType::kF64: return static_cast<const double*>(at)[i];
  }
  return 0;
}

Bytes Input(DataType type, size_t rank, size_t count) {
  Bytes bytes(count * ElementBytes(type));
  for (size_t i = 0; i < count; ++i) Store(type, bytes.data(), i, SmallValue(rank + 1, i));
  return bytes;
}

double NaiveReduce(ReduceOp op, size_t ranks, size_t i) {
  double total = SmallValue(1, i);
  for (size_t rank = 1; rank < ranks; ++rank) {
    const double value = SmallValue(rank + 1, i);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: total += value; break;
      case ReduceOp::kProduct: total *= value; break;
      case ReduceOp::kMin: total = std::min(total, value); break;
      case ReduceOp::kMax: total = std::max(total, value); break;
      case ReduceOp::kBitOr:
        total = static_cast<double>(static_cast<int>(total) | static_cast<int>(value));
        break;
    }
  }
  return total;
}

// What the type can hold of the average.
double Rounded(DataType type, double value) {
  Bytes one(ElementBytes(type));
  Store(type, one.data(), 0, value);
  return Load(type, one.data(), 0);
}

// `first`: index of bytes[0] in the whole.
void ExpectReduced(DataType type, ReduceOp op, size_t ranks, const Bytes& bytes, size_t first) {
  for (size_t i = 0; i < bytes.size() / ElementBytes(type); ++i) {
    double expected = NaiveReduce(op, ranks, first + i);
    if (op == ReduceOp::kAvg) {
      // Divided in the type's own arithmetic (float for the 16-bit ones).
      expected =
          type == DataType::kF64
              ? expected / static_cast<double>(ranks)
              : static_cast<double>(static_cast<float>(expected) / static_cast<float>(ranks));
      expected = Rounded(type, expected);
    }
    ASSERT_EQ(Load(type, bytes.data(), i), expected)
        << DataTypeName(type) << " " << ReduceOpName(op) << " element " << first + i << " of "
        << ranks << " ranks";
  }
}

std::vector<size_t> UnevenCounts(size_t ranks) {
  std::vector<size_t> counts;
  for (size_t i = 0; i < ranks; ++i) counts.push_back(i == 1 ? 0 : 3 + i * 1001);
  return counts;
}

TEST_P(Collectives, AllReduceMatchesTheReferenceForAllTypesAndReductions) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    for (const DataType type : kTypes) {
      for (const ReduceOp op : kOps) {
        if (!ReductionApplies(op, type)) continue;
        // None, one, fewer than ranks, the inline limit, both sides of the switch to the ring.
        for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, 4096 / ElementBytes(type) + 1,
                                   16384 / ElementBytes(type), 16384 / ElementBytes(type) + 3}) {
          const Bytes input = Input(type, rank, count);
          Bytes output(input.size());
          ASSERT_EQ(communicator.AllReduce(input.data(), output.data(), count, type, op),
                    OkStatus());
          ExpectReduced(type, op, ranks(), output, 0);
        }
      }
    }
  });
}

TEST_P(Collectives, AllReduceInPlaceOfTwoMegabytesMatchesTheReference) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    const size_t count = 600'001;
    Bytes data = Input(DataType::kF32, rank, count);
    ASSERT_EQ(
        communicator.AllReduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kSum),
        OkStatus());
    ExpectReduced(DataType::kF32, ReduceOp::kSum, ranks(), data, 0);
  });
}

// Sums of arbitrary floats depend on the order, so this shows that the order is the same everywhere
// and always.
TEST_P(Collectives, FloatSumsAreTheSameBitsOnAllRanksAndInEveryRun) {
  for (const size_t count : {size_t{100}, size_t{50'000}}) {
    std::vector<std::vector<float>> first(ranks());
    for (int run = 0; run < 3; ++run) {
      std::vector<std::vector<float>> outputs(ranks());
      Everywhere([&](Communicator& communicator, size_t rank) {
        Prng prng(rank + 17);
        std::vector<float> data(count);
        for (float& value : data)
          value = std::ldexp(static_cast<float>(prng.Between(-1'000'000, 1'000'000)),
                             static_cast<int>(prng.Between(-30, 3)));
        ASSERT_EQ(
            communicator.AllReduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kSum),
            OkStatus());
        outputs[rank] = data;
      });
      for (size_t rank = 0; rank < ranks(); ++rank) {
        ASSERT_EQ(std::memcmp(outputs[rank].data(), outputs[0].data(), count * sizeof(float)), 0);
      }
      if (run == 0) first = outputs;
      ASSERT_EQ(std::memcmp(first[0].data(), outputs[0].data(), count * sizeof(float)), 0);
    }
  }
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsReducedBlock) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    for (const DataType type : kTypes) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{513},
                                 type == DataType::kF32 ? size_t{70'001} : size_t{5'001}}) {
        const ReduceOp op = IsFloatingPoint(type) ? ReduceOp::kAvg : ReduceOp::kSum;
        Bytes input = Input(type, rank, count * ranks());
        Bytes output(count * ElementBytes(type));
        ASSERT_EQ(communicator.ReduceScatter(input.data(), output.data(), count, type, op),
                  OkStatus());
        ExpectReduced(type, op, ranks(), output, rank * count);
        std::byte* own = input.data() + rank * output.size();
        ASSERT_EQ(communicator.ReduceScatter(input.data(), own, count, type, op), OkStatus());
        ExpectReduced(type, op, ranks(), Bytes(own, own + output.size()), rank * count);
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterTakesUnevenBlocks) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    const std::vector<size_t> counts = UnevenCounts(ranks());
    const size_t before =
        std::accumulate(counts.begin(), counts.begin() + static_cast<long>(rank), size_t{0});
    const Bytes input =
        Input(DataType::kI64, rank, std::accumulate(counts.begin(), counts.end(), size_t{0}));
    Bytes output(counts[rank] * 8);
    ASSERT_EQ(communicator.ReduceScatterV(input.data(), output.data(), counts, DataType::kI64,
                                          ReduceOp::kSum),
              OkStatus());
    ExpectReduced(DataType::kI64, ReduceOp::kSum, ranks(), output, before);
  });
}

TEST_P(Collectives, AllGatherCollectsEqualAndUnevenBlocksInRankOrder) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    for (const DataType type : kTypes) {
      for (const size_t count : {size_t{1}, size_t{100}, size_t{9'000}}) {
        const Bytes input = Input(type, rank, count);
        Bytes output(input.size() * ranks());
        ASSERT_EQ(communicator.AllGather(input.data(), output.data(), count, type), OkStatus());
        for (size_t from = 0; from < ranks(); ++from) {
          const Bytes expected = Input(type, from, count);
          ASSERT_EQ(
              std::memcmp(output.data() + from * input.size(), expected.data(), expected.size()),
              0);
        }
      }
      const std::vector<size_t> counts = UnevenCounts(ranks());
      const Bytes input = Input(type, rank, counts[rank]);
      Bytes output(std::accumulate(counts.begin(), counts.end(), size_t{0}) * ElementBytes(type));
      ASSERT_EQ(communicator.AllGatherV(input.data(), output.data(), counts, type), OkStatus());
      const std::byte* at = output.data();
      for (size_t from = 0; from < ranks(); ++from) {
        const Bytes expected = Input(type, from, counts[from]);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), at));
        at += expected.size();
      }
    }
  });
}

TEST_P(Collectives, BroadcastAndReduceWorkFromEveryRoot) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    for (int32_t root = 0; root < size(); ++root) {
      const auto root_index = static_cast<size_t>(root);
      for (const size_t count : {size_t{1}, size_t{1000}, size_t{100'001}}) {
        Bytes data = Input(DataType::kBF16, rank, count);
        ASSERT_EQ(communicator.Broadcast(data.data(), count, DataType::kBF16, Rank(root)),
                  OkStatus());
        ASSERT_EQ(data, Input(DataType::kBF16, root_index, count));

        const Bytes input = Input(DataType::kF32, rank, count);
        Bytes output(rank == root_index ? input.size() : 0);
        ASSERT_EQ(communicator.Reduce(input.data(), output.data(), count, DataType::kF32,
                                      ReduceOp::kAvg, Rank(root)),
                  OkStatus());
        if (rank == root_index) ExpectReduced(DataType::kF32, ReduceOp::kAvg, ranks(), output, 0);
      }
    }
  });
}

TEST_P(Collectives, GatherAndScatterMoveUnevenBlocksFromAndToEveryRoot) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    const std::vector<size_t> counts = UnevenCounts(ranks());
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    for (int32_t root = 0; root < size(); ++root) {
      const Bytes input = Input(DataType::kI32, rank, counts[rank]);
      Bytes all(total * 4);
      ASSERT_EQ(communicator.GatherV(input.data(), all.data(), counts, DataType::kI32, Rank(root)),
                OkStatus());
      if (rank == static_cast<size_t>(root)) {
        const std::byte* at = all.data();
        for (size_t from = 0; from < ranks(); ++from) {
          const Bytes expected = Input(DataType::kI32, from, counts[from]);
          ASSERT_TRUE(std::equal(expected.begin(), expected.end(), at));
          at += expected.size();
        }
      }
      Bytes back(input.size());
      ASSERT_EQ(communicator.ScatterV(all.data(), back.data(), counts, DataType::kI32, Rank(root)),
                OkStatus());
      ASSERT_EQ(back, input);
    }
  });
}

TEST_P(Collectives, AllToAllTransposesEqualAndUnevenBlocks) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    // Element value names (from, to, index).
    const auto value = [](size_t from, size_t to, size_t i) {
      return static_cast<int64_t>(from * 1'000'000 + to * 10'000 + i);
    };
    for (const bool uneven : {false, true}) {
      std::vector<size_t> send(ranks(), 1000);
      std::vector<size_t> receive(ranks(), 1000);
      for (size_t peer = 0; uneven && peer < ranks(); ++peer) {
        send[peer] = rank * 10 + peer * 100;
        receive[peer] = peer * 10 + rank * 100;
      }
      std::vector<int64_t> input;
      std::vector<int64_t> expected;
      for (size_t peer = 0; peer < ranks(); ++peer) {
        for (size_t i = 0; i < send[peer]; ++i) input.push_back(value(rank, peer, i));
        for (size_t i = 0; i < receive[peer]; ++i) expected.push_back(value(peer, rank, i));
      }
      std::vector<int64_t> output(expected.size());
      ASSERT_EQ(uneven ? communicator.AllToAllV(input.data(), send, output.data(), receive,
                                                DataType::kI64)
                       : communicator.AllToAll(input.data(), output.data(), 1000, DataType::kI64),
                OkStatus());
      ASSERT_EQ(output, expected);
    }
  });
}

TEST_P(Collectives, SendAndReceiveJoinAnyPairAndBarriersHoldEveryoneBack) {
  std::atomic<size_t> arrived{0};
  Everywhere([&](Communicator& communicator, size_t rank) {
    // Everyone to everyone else, in an order that meets: by distance.
    for (size_t distance = 1; distance < ranks(); ++distance) {
      const Rank to(static_cast<int32_t>((rank + distance) % ranks()));
      const Rank from(static_cast<int32_t>((rank + ranks() - distance) % ranks()));
      const Bytes message = Input(DataType::kU8, rank, 5000 + rank);
      std::shared_ptr<Work> sending =
          communicator.SendAsync(message.data(), message.size(), DataType::kU8, to);
      const Bytes expected = Input(DataType::kU8, static_cast<size_t>(from.value),
                                   5000 + static_cast<size_t>(from.value));
      Bytes got(expected.size());
      ASSERT_EQ(communicator.Receive(got.data(), got.size(), DataType::kU8, from), OkStatus());
      ASSERT_EQ(sending->Wait(), OkStatus());
      ASSERT_EQ(got, expected);
    }
    arrived.fetch_add(1);
    ASSERT_EQ(communicator.Barrier(), OkStatus());
    EXPECT_EQ(arrived.load(), ranks());
  });
}

TEST_P(Collectives, SendReceiveExchangesMoreThanTheSocketsHold) {
  if (size() < 2) return;
  Everywhere([&](Communicator& communicator, size_t rank) {
    const Rank to(static_cast<int32_t>((rank + 1) % ranks()));
    const Rank from(static_cast<int32_t>((rank + ranks() - 1) % ranks()));
    const Bytes message = Input(DataType::kU8, rank, (16 << 20) + rank);
    const Bytes expected = Input(DataType::kU8, static_cast<size_t>(from.value),
                                 (16 << 20) + static_cast<size_t>(from.value));
    Bytes got(expected.size());
    ASSERT_EQ(communicator.SendReceive(message.data(), message.size(), to, got.data(), got.size(),
                                       from, DataType::kU8),
              OkStatus());
    ASSERT_EQ(got, expected);
    EXPECT_EQ(
        communicator.SendReceive(nullptr, 0, Rank(size()), nullptr, 0, from, DataType::kU8).code(),
        StatusCode::kInvalidArgument);
  });
}

TEST_P(Collectives, LastMessageOfARankThatLeavesArrives) {
  if (size() < 2) return;
  Everywhere([&](Communicator& communicator, size_t rank) {
    if (rank > 1) return;
    const Bytes message = Input(DataType::kU8, 0, 24 << 20);  // more than the sockets hold
    if (rank == 0) {
      ASSERT_EQ(communicator.Send(message.data(), message.size(), DataType::kU8, Rank(1)),
                OkStatus());
      communicators_[0].reset();
    } else {
      Bytes got(message.size());
      ASSERT_EQ(communicator.Receive(got.data(), got.size(), DataType::kU8, Rank(0)), OkStatus());
      ASSERT_EQ(got, message);
    }
  });
}

TEST_P(Collectives, AsynchronousOperationsRunInOrderAndCallBackOnce) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    std::vector<std::vector<float>> buffers(20,
                                            std::vector<float>(10'000, static_cast<float>(rank)));
    std::vector<std::shared_ptr<Work>> works;
    std::atomic<int> called{0};
    for (std::vector<float>& buffer : buffers) {
      works.push_back(communicator.AllReduceAsync(buffer.data(), buffer.data(), buffer.size(),
                                                  DataType::kF32, ReduceOp::kMax));
      works.back()->OnComplete([&](const Status& status) { called += status.ok() ? 1 : 100; });
    }
    // A blocking operation queues behind the pending ones.
    ASSERT_EQ(communicator.Barrier(), OkStatus());
    for (const auto& work : works) {
      ASSERT_EQ(work->Wait(), OkStatus());
      ASSERT_TRUE(work->Done());
    }
    EXPECT_EQ(called.load(), 20);
    for (const std::vector<float>& buffer : buffers)
      ASSERT_EQ(buffer.back(), static_cast<float>(ranks() - 1));
  });
}

TEST_P(Collectives, GroupsAndSplitsReduceAmongTheirMembersOnly) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    // Even and odd ranks, highest first; rank 0's group has rank 0 last.
    Result<std::unique_ptr<Communicator>> half =
        communicator.Split(static_cast<int32_t>(rank % 2), -static_cast<int32_t>(rank));
    ASSERT_TRUE(half.ok()) << half.status().ToString();
    int64_t sum = static_cast<int64_t>(rank);
    ASSERT_EQ((*half)->AllReduce(&sum, &sum, 1, DataType::kI64, ReduceOp::kSum), OkStatus());
    int64_t expected = 0;
    for (size_t i = rank % 2; i < ranks(); i += 2) expected += static_cast<int64_t>(i);
    EXPECT_EQ(sum, expected);
    EXPECT_EQ((*half)->rank().value, static_cast<int32_t>((ranks() - 1 - rank) / 2));

    Result<std::unique_ptr<Communicator>> none = communicator.Split(rank == 0 ? -1 : 3, 0);
    ASSERT_TRUE(none.ok()) << none.status().ToString();
    EXPECT_EQ(*none == nullptr, rank == 0);

    if (rank + 1 == ranks()) return;
    std::vector<Rank> members;
    for (int32_t i = 0; i + 1 < size(); ++i) members.push_back(Rank(i));
    Result<std::unique_ptr<Communicator>> group = communicator.CreateGroup(members, GroupId(5));
    ASSERT_TRUE(group.ok()) << group.status().ToString();
    EXPECT_EQ((*group)->world_size(), size() - 1);
    ASSERT_EQ((*group)->Barrier(), OkStatus());
    EXPECT_EQ(communicator.CreateGroup(members, GroupId(0)).status().code(),
              StatusCode::kInvalidArgument);
  });
}

TEST_P(Collectives, RefusesArgumentsThatMakeNoSenseAndStaysUsable) {
  Everywhere([&](Communicator& communicator, size_t rank) {
    float value = 1;
    const std::vector<size_t> too_many(ranks() + 1, 1);
    EXPECT_EQ(communicator.AllReduce(&value, &value, 1, DataType::kF32, ReduceOp::kBitOr).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator.AllReduce(&value, &value, 1, DataType::kI32, ReduceOp::kAvg).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator.Broadcast(&value, 1, DataType::kF32, Rank(size())).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator.Send(&value, 1, DataType::kF32, Rank(static_cast<int32_t>(rank))).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator.AllGatherV(&value, &value, too_many, DataType::kF32).code(),
              StatusCode::kInvalidArgument);
    EXPECT_FALSE(communicator.aborted());
    EXPECT_EQ(communicator.Barrier(), OkStatus());
    EXPECT_EQ(communicator.CheckHealth(), OkStatus());
  });
}

TEST_P(Collectives, DetectsRanksThatDisagreeAboutTheOperation) {
  if (size() < 2) return;
  std::atomic<int> disagreements{0};
  Everywhere([&](Communicator& communicator, size_t rank) {
    std::vector<float> data(8);
    const size_t count = rank == 0 ? 7 : 8;
    const Status status =
        communicator.AllReduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kSum);
    if (status.code() == StatusCode::kInternal) ++disagreements;
    // Ranks that saw nothing themselves may finish this one or learn from the abort, and nobody
    // gets further.
    if (rank == 0) {
      EXPECT_FALSE(status.ok());
    }
    EXPECT_NE(communicator.Barrier(), OkStatus());
  });
  EXPECT_GE(disagreements.load(), 1);
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const Backend backend : {Backend::kHost, Backend::kFake}) {
    for (int32_t size = 1; size <= 5; ++size) cases.push_back({backend, size});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, testing::ValuesIn(AllCases()), [](const auto& info) {
  return std::string(info.param.backend == Backend::kHost ? "Host" : "Fake") +
         std::to_string(info.param.size);
});

TEST(ReduceKernels, HalfConversionsRoundToNearestEvenAndKeepEveryHalf) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float wide = HalfToFloat(half);
    if (wide != wide) {
      EXPECT_NE(HalfToFloat(FloatToHalf(wide)), HalfToFloat(FloatToHalf(wide)));
      continue;
    }
    ASSERT_EQ(FloatToHalf(wide), half);
  }
  EXPECT_EQ(FloatToHalf(65519.0f), 0x7bff);          // rounds down to the largest
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);          // the tie goes to infinity
  EXPECT_EQ(FloatToHalf(std::ldexp(1.0f, -25)), 0);  // tie to even: zero
  EXPECT_EQ(FloatToHalf(std::ldexp(1.5f, -25)), 1);
  EXPECT_EQ(FloatToHalf(1.0f + std::ldexp(1.0f, -11)), 0x3c00);  // tie to even
  EXPECT_EQ(FloatToHalf(1.0f + std::ldexp(3.0f, -11)), 0x3c02);
  EXPECT_EQ(FloatToBFloat16(1.0f + std::ldexp(1.0f, -8)), 0x3f80);
  EXPECT_EQ(FloatToBFloat16(1.0f + std::ldexp(3.0f, -8)), 0x3f82);
}

}  // namespace
}  // namespace everstep::collective
