#include "checkpoint/core/reshard.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace everstep::checkpoint {
namespace {

// A box in the global tensor, [first, first + count) in each dimension.
struct Box {
  std::vector<int64_t> first;
  std::vector<int64_t> count;
  int64_t elements() const {
    return std::accumulate(count.begin(), count.end(), int64_t{1}, std::multiplies<>());
  }
};

Result<Box> BoxOf(const TensorInfo& tensor, uint64_t element_bytes) {
  const size_t dimensions = tensor.global_shape.size();
  if (dimensions > kTensorDimensionsMax) {
    return InvalidArgument(fmt::format("tensor {} has {} dimensions, at most {}", tensor.name, dimensions,
                                       kTensorDimensionsMax));
  }
  Box box{tensor.offsets, tensor.shape};
  if (box.first.empty()) box.first.assign(dimensions, 0);
  if (box.count.empty()) box.count = tensor.global_shape;
  if (box.first.size() != dimensions || box.count.size() != dimensions) {
    return InvalidArgument(fmt::format("tensor {}: offsets and shape need {} dimensions", tensor.name, dimensions));
  }
  uint64_t elements = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    const int64_t global = tensor.global_shape[d];
    if (global < 0 || box.first[d] < 0 || box.count[d] < 0 || box.first[d] > global ||
        box.count[d] > global - box.first[d]) {
      return InvalidArgument(fmt::format("tensor {}: piece [{}, +{}) leaves dimension {} of {}", tensor.name,
                                         box.first[d], box.count[d], d, global));
    }
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(box.count[d]), &elements)) {
      return InvalidArgument(fmt::format("tensor {}: too many elements", tensor.name));
    }
  }
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements, element_bytes, &bytes) || bytes != tensor.bytes) {
    return InvalidArgument(fmt::format("tensor {}: {} bytes do not fit {} elements of {}", tensor.name,
                                       tensor.bytes, elements, tensor.dtype));
  }
  return box;
}

// Row-major index of global position `at` within `box`, in elements.
int64_t IndexIn(const Box& box, const std::vector<int64_t>& at) {
  int64_t index = 0;
  for (size_t d = 0; d < at.size(); ++d) index = index * box.count[d] + (at[d] - box.first[d]);
  return index;
}

bool Intersect(const Box& a, const Box& b, Box& out) {
  out.first.resize(a.first.size());
  out.count.resize(a.first.size());
  for (size_t d = 0; d < a.first.size(); ++d) {
    const int64_t first = std::max(a.first[d], b.first[d]);
    const int64_t end = std::min(a.first[d] + a.count[d], b.first[d] + b.count[d]);
    if (first >= end) return false;
    out.first[d] = first;
    out.count[d] = end - first;
  }
  return true;
}

// Cuts `hole` by `part` (inside it): what is left, as at most two boxes per dimension.
void Subtract(const Box& hole, const Box& part, std::vector<Box>& left) {
  Box rest = hole;
  for (size_t d = 0; d < hole.first.size(); ++d) {
    const int64_t before = part.first[d] - rest.first[d];
    if (before > 0) {
      Box piece = rest;
      piece.count[d] = before;
      left.push_back(std::move(piece));
    }
    const int64_t part_end = part.first[d] + part.count[d];
    const int64_t after = rest.first[d] + rest.count[d] - part_end;
    if (after > 0) {
      Box piece = rest;
      piece.first[d] = part_end;
      piece.count[d] = after;
      left.push_back(std::move(piece));
    }
    rest.first[d] = part.first[d];
    rest.count[d] = part.count[d];
  }
}

// Appends one run per row of `part` (rows along the last dimension).
Status AppendRuns(const Box& part, const Box& source, const Box& target, CopyRun base, uint64_t element_bytes,
                  std::vector<CopyRun>& runs) {
  const size_t dimensions = part.first.size();
  const int64_t row = dimensions == 0 ? 1 : part.count.back();
  const int64_t rows = part.elements() / row;
  if (runs.size() + static_cast<uint64_t>(rows) > kCopyRunsMax) {
    return ResourceExhausted("the new layout cuts a tensor into too many runs");
  }
  std::vector<int64_t> at = part.first;
  for (int64_t r = 0; r < rows; ++r) {
    CopyRun run = base;
    run.source_offset += static_cast<uint64_t>(IndexIn(source, at)) * element_bytes;
    run.target_offset += static_cast<uint64_t>(IndexIn(target, at)) * element_bytes;
    run.bytes = static_cast<uint64_t>(row) * element_bytes;
    runs.push_back(run);
    for (size_t d = dimensions; d-- > 1;) {  // the dimension before the last one turns fastest
      if (++at[d - 1] < part.first[d - 1] + part.count[d - 1]) break;
      at[d - 1] = part.first[d - 1];
    }
  }
  return OkStatus();
}

void JoinAdjacent(std::vector<CopyRun>& runs) {
  std::sort(runs.begin(), runs.end(),
            [](const CopyRun& a, const CopyRun& b) { return a.target_offset < b.target_offset; });
  std::vector<CopyRun> joined;
  for (const CopyRun& run : runs) {
    if (!joined.empty() && joined.back().source == run.source &&
        joined.back().source_offset + joined.back().bytes == run.source_offset &&
        joined.back().target_offset + joined.back().bytes == run.target_offset) {
      joined.back().bytes += run.bytes;
    } else {
      joined.push_back(run);
    }
  }
  runs = std::move(joined);
}

}  // namespace

uint64_t DtypeBytes(const std::string& dtype) {
  static constexpr std::array<std::pair<std::string_view, uint64_t>, 13> kSizes = {{
      {"f64", 8}, {"i64", 8}, {"u64", 8}, {"f32", 4}, {"i32", 4}, {"u32", 4}, {"f16", 2},
      {"bf16", 2}, {"i16", 2}, {"u16", 2}, {"i8", 1}, {"u8", 1}, {"bool", 1}}};
  for (const auto& [name, bytes] : kSizes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

Result<std::vector<CopyRun>> PlanReshard(const TensorInfo& wanted, const std::vector<TensorInfo>& available) {
  const uint64_t element_bytes = DtypeBytes(wanted.dtype);
  if (element_bytes == 0) {
    return InvalidArgument(fmt::format("tensor {}: dtype {} is not known", wanted.name, wanted.dtype));
  }
  EVERSTEP_ASSIGN_OR_RETURN(const Box target, BoxOf(wanted, element_bytes));
  std::vector<CopyRun> runs;
  std::vector<Box> holes;
  if (target.elements() > 0) holes.push_back(target);
  for (size_t i = 0; i < available.size() && !holes.empty(); ++i) {
    const TensorInfo& piece = available[i];
    if (piece.name != wanted.name) continue;
    if (piece.dtype != wanted.dtype || piece.global_shape != wanted.global_shape) {
      return InvalidArgument(fmt::format("tensor {}: a piece has another dtype or global shape", wanted.name));
    }
    EVERSTEP_ASSIGN_OR_RETURN(const Box source, BoxOf(piece, element_bytes));
    std::vector<Box> left;
    for (const Box& hole : holes) {
      Box part;
      if (!Intersect(hole, source, part)) {
        left.push_back(hole);
        continue;
      }
      EVERSTEP_RETURN_IF_ERROR(AppendRuns(part, source, target,
                                          {i, piece.buffer_offset, wanted.buffer_offset, 0}, element_bytes, runs));
      Subtract(hole, part, left);
    }
    holes = std::move(left);
  }
  if (!holes.empty()) {
    int64_t missing = 0;
    for (const Box& hole : holes) missing += hole.elements();
    return NotFound(fmt::format("tensor {}: {} elements are in no piece", wanted.name, missing));
  }
  JoinAdjacent(runs);
  return runs;
}

}  // namespace everstep::checkpoint
