#include "checkpoint/core/reshard.h"

#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep::checkpoint {
namespace {

int64_t Elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

TensorInfo Piece(std::vector<int64_t> global, std::vector<int64_t> offsets, std::vector<int64_t> shape,
                 uint64_t buffer_offset = 0) {
  TensorInfo tensor;
  tensor.name = "w";
  tensor.dtype = "i64";
  tensor.global_shape = std::move(global);
  tensor.offsets = std::move(offsets);
  tensor.shape = std::move(shape);
  tensor.bytes = static_cast<uint64_t>(Elements(tensor.shape.empty() ? tensor.global_shape : tensor.shape)) * 8;
  tensor.buffer_offset = buffer_offset;
  return tensor;
}

// A buffer in which each element of the piece is its row-major index in the global tensor.
std::vector<int64_t> Fill(const TensorInfo& piece) {
  std::vector<int64_t> values;
  std::vector<int64_t> at(piece.shape.size(), 0);
  for (int64_t i = 0; i < Elements(piece.shape); ++i) {
    int64_t index = 0;
    for (size_t d = 0; d < at.size(); ++d) index = index * piece.global_shape[d] + piece.offsets[d] + at[d];
    values.push_back(index);
    for (size_t d = at.size(); d-- > 0;) {
      if (++at[d] < piece.shape[d]) break;
      at[d] = 0;
    }
  }
  return values;
}

TEST(Reshard, CopiesAWholeTensorInOneRun) {
  const TensorInfo whole = Piece({4, 6}, {}, {});
  const auto runs = PlanReshard(whole, {whole});
  ASSERT_TRUE(runs.ok()) << runs.status().ToString();
  EXPECT_EQ(*runs, (std::vector<CopyRun>{{0, 0, 0, 4 * 6 * 8}}));
}

TEST(Reshard, JoinsTwoHalvesAlongTheFirstDimension) {
  const auto runs = PlanReshard(Piece({4, 6}, {}, {}, 100),
                                {Piece({4, 6}, {2, 0}, {2, 6}, 8), Piece({4, 6}, {0, 0}, {2, 6}, 0)});
  ASSERT_TRUE(runs.ok()) << runs.status().ToString();
  EXPECT_EQ(*runs, (std::vector<CopyRun>{{1, 0, 100, 96}, {0, 8, 196, 96}}));
}

TEST(Reshard, CutsColumnsRowByRow) {
  const auto runs = PlanReshard(Piece({2, 4}, {0, 1}, {2, 2}), {Piece({2, 4}, {}, {})});
  ASSERT_TRUE(runs.ok()) << runs.status().ToString();
  EXPECT_EQ(*runs, (std::vector<CopyRun>{{0, 8, 0, 16}, {0, 40, 16, 16}}));
}

TEST(Reshard, SaysWhatIsMissing) {
  const auto runs = PlanReshard(Piece({4, 6}, {}, {}), {Piece({4, 6}, {0, 0}, {3, 6})});
  EXPECT_EQ(runs.status().code(), StatusCode::kNotFound);
  EXPECT_NE(runs.status().message().find("6 elements"), std::string::npos);
}

TEST(Reshard, RefusesPiecesThatContradictThemselves) {
  TensorInfo short_bytes = Piece({4}, {}, {});
  short_bytes.bytes = 24;
  EXPECT_EQ(PlanReshard(Piece({4}, {}, {}), {short_bytes}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanReshard(Piece({4}, {2}, {3}), {}).status().code(), StatusCode::kInvalidArgument);
  TensorInfo other_type = Piece({4}, {}, {});
  other_type.dtype = "f64";
  EXPECT_EQ(PlanReshard(Piece({4}, {}, {}), {other_type}).status().code(), StatusCode::kInvalidArgument);
  TensorInfo unknown = Piece({4}, {}, {});
  unknown.dtype = "complex";
  EXPECT_EQ(PlanReshard(unknown, {}).status().code(), StatusCode::kInvalidArgument);
  TensorInfo huge = Piece({1}, {}, {});
  huge.global_shape = {int64_t{1} << 62, int64_t{1} << 62};
  EXPECT_EQ(PlanReshard(huge, {}).status().code(), StatusCode::kInvalidArgument);
}

TEST(Reshard, HandlesScalarsAndEmptyPieces) {
  const auto scalar = PlanReshard(Piece({}, {}, {}), {Piece({}, {}, {})});
  ASSERT_TRUE(scalar.ok()) << scalar.status().ToString();
  EXPECT_EQ(*scalar, (std::vector<CopyRun>{{0, 0, 0, 8}}));
  const auto empty = PlanReshard(Piece({0, 3}, {}, {}), {});
  ASSERT_TRUE(empty.ok()) << empty.status().ToString();
  EXPECT_TRUE(empty->empty());
}

TEST(Reshard, MovesEveryElementToItsPlaceOnRandomLayouts) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Prng random(seed);
    const size_t dimensions = 1 + random.UpTo(3);
    std::vector<int64_t> global;
    for (size_t d = 0; d < dimensions; ++d) global.push_back(random.Between(1, 6));
    // A grid of pieces, some given twice, plus a random wanted box.
    std::vector<std::vector<int64_t>> cuts(dimensions);
    for (size_t d = 0; d < dimensions; ++d) {
      cuts[d] = {0, random.Between(0, global[d]), global[d]};
    }
    std::vector<TensorInfo> pieces;
    for (uint64_t cell = 0; cell < (uint64_t{1} << dimensions); ++cell) {
      std::vector<int64_t> offsets;
      std::vector<int64_t> shape;
      for (size_t d = 0; d < dimensions; ++d) {
        const size_t side = cell >> d & 1;
        offsets.push_back(cuts[d][side]);
        shape.push_back(cuts[d][side + 1] - cuts[d][side]);
      }
      pieces.push_back(Piece(global, offsets, shape, 8 * random.UpTo(3)));
      if (random.Chance(1, 4)) pieces.push_back(pieces.back());
    }
    std::vector<int64_t> offsets;
    std::vector<int64_t> shape;
    for (size_t d = 0; d < dimensions; ++d) {
      offsets.push_back(random.Between(0, global[d] - 1));
      shape.push_back(random.Between(1, global[d] - offsets[d]));
    }
    const TensorInfo wanted = Piece(global, offsets, shape, 16);
    const auto runs = PlanReshard(wanted, pieces);
    ASSERT_TRUE(runs.ok()) << runs.status().ToString();
    std::vector<std::byte> out(16 + wanted.bytes);
    uint64_t copied = 0;
    for (const CopyRun& run : *runs) {
      const TensorInfo& piece = pieces[run.source];
      std::vector<std::byte> buffer(piece.buffer_offset + piece.bytes);
      const std::vector<int64_t> values = Fill(piece);
      if (!values.empty()) std::memcpy(buffer.data() + piece.buffer_offset, values.data(), piece.bytes);
      ASSERT_LE(run.source_offset + run.bytes, buffer.size());
      ASSERT_LE(run.target_offset + run.bytes, out.size());
      std::memcpy(out.data() + run.target_offset, buffer.data() + run.source_offset, run.bytes);
      copied += run.bytes;
    }
    EXPECT_EQ(copied, wanted.bytes);
    const std::vector<int64_t> expected = Fill(wanted);
    EXPECT_EQ(std::memcmp(out.data() + 16, expected.data(), wanted.bytes), 0);
  }
}

}  // namespace
}  // namespace everstep::checkpoint
