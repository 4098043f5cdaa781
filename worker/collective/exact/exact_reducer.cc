#include "worker/collective/exact/exact_reducer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "proto/base/check.h"
#include "worker/collective/exact/fixed_point.h"

namespace everstep::collective {
namespace {

constexpr int16_t kNothing = std::numeric_limits<int16_t>::min();  // exponent of zero
constexpr int kExponentMin = -900;                                 // scales stay normal doubles
constexpr uint64_t kInfinityBits = 0x7ff0000000000000u;
// Reduced and gathered piece by piece, so that the second half of a piece finds it in the cache.
constexpr size_t kPieceBlocks = 1024;

// Above this no finite value of the type lies, so a block that has it is never out of range.
int ExponentMax(DataType type) {
  switch (type) {
    case DataType::kF16: return 16;
    case DataType::kF64: return 1024;
    default: return 128;
  }
}

// Smallest e with value < 2^e. REQUIRES: value is finite
int16_t ExponentOf(double value) {
  if (value == 0) return kNothing;
  int exponent = 0;
  std::frexp(value, &exponent);
  return static_cast<int16_t>(exponent);
}

int BitsFor(size_t micro_batches) {
  return 62 - static_cast<int>(std::bit_width(micro_batches - 1));
}

}  // namespace

ExactReducer::ExactReducer(std::span<const size_t> tensor_elements, size_t micro_batches,
                           DataType type)
    : type_(type), micro_batches_(micro_batches), bits_(BitsFor(micro_batches)) {
  EVERSTEP_CHECK(micro_batches >= 1 && micro_batches <= kMicroBatchesMax && IsFloatingPoint(type));
  for (size_t tensor = 0; tensor < tensor_elements.size(); ++tensor) {
    first_block_.push_back(blocks_.size());
    for (size_t at = 0; at < tensor_elements[tensor]; at += kBlockElements) {
      const size_t count = std::min(kBlockElements, tensor_elements[tensor] - at);
      blocks_.push_back(
          {elements_ + at, static_cast<uint32_t>(count), static_cast<uint32_t>(tensor)});
    }
    elements_ += tensor_elements[tensor];
  }
  first_block_.push_back(blocks_.size());
  sums_.resize(elements_);
  summed_.assign(blocks_.size(), 0);
  exponents_.assign(blocks_.size(), kInitialExponent);
  needed_.assign(blocks_.size(), kNothing);
  reduced_.assign(blocks_.size(), kNothing);
}

void ExactReducer::BeginStep() {
  std::fill(summed_.begin(), summed_.end(), 0);
  std::fill(needed_.begin(), needed_.end(), kNothing);
  out_of_range_ = false;
  not_finite_ = false;
}

void ExactReducer::Accumulate(const void* gradients) {
  AddBlocks(0, blocks_.size(), static_cast<const std::byte*>(gradients));
}

void ExactReducer::AccumulateTensor(size_t tensor, const void* gradients) {
  EVERSTEP_CHECK(tensor + 1 < first_block_.size());
  AddBlocks(first_block_[tensor], first_block_[tensor + 1],
            static_cast<const std::byte*>(gradients));
}

void ExactReducer::AddBlocks(size_t first_block, size_t last_block, const std::byte* gradients) {
  const FixedPointLoops loops = LoopsFor(type_);
  for (size_t b = first_block; b < last_block; ++b) {
    const Block& block = blocks_[b];
    const std::byte* values =
        gradients + (block.start - blocks_[first_block].start) * ElementBytes(type_);
    const uint64_t largest_bits = loops.largest(values, block.elements);
    if (largest_bits >= kInfinityBits) {
      not_finite_ = true;
      continue;
    }
    const int16_t needed = ExponentOf(std::bit_cast<double>(largest_bits));
    needed_[b] = std::max(needed_[b], needed);
    if (needed > exponents_[b]) {
      out_of_range_ = true;
    } else if (needed != kNothing) {
      const auto add = summed_[b] != 0 ? loops.add : loops.assign;
      add(sums_.data() + block.start, values, block.elements,
          std::ldexp(1.0, bits_ - exponents_[b]));
      summed_[b] = 1;
    }
  }
}

Status ExactReducer::Finish(Communicator& communicator, void* out, double divisor) {
  if (divisor == 0) divisor = static_cast<double>(micro_batches_);
  const bool wide = type_ == DataType::kF64;
  const DataType out_type = wide ? DataType::kF64 : DataType::kF32;
  const auto size = static_cast<size_t>(communicator.world_size());
  const auto rank = static_cast<size_t>(communicator.rank().value);
  auto* out_bytes = static_cast<std::byte*>(out);
  const auto start_of = [&](size_t block) {
    return block == blocks_.size() ? elements_ : blocks_[block].start;
  };

  std::vector<size_t> counts(size);
  for (size_t first = 0; first < blocks_.size(); first += kPieceBlocks) {
    const size_t piece_blocks = std::min(kPieceBlocks, blocks_.size() - first);
    const auto share = [&](size_t r) { return first + piece_blocks * r / size; };
    for (size_t r = 0; r < size; ++r) counts[r] = start_of(share(r + 1)) - start_of(share(r));
    const size_t mine = start_of(share(rank));
    for (size_t b = first; b < first + piece_blocks; ++b) {
      if (summed_[b] == 0)
        std::fill_n(sums_.begin() + static_cast<ptrdiff_t>(blocks_[b].start), blocks_[b].elements,
                    0);
    }
    EVERSTEP_RETURN_IF_ERROR(communicator.ReduceScatterV(sums_.data() + start_of(first),
                                                         sums_.data() + mine, counts,
                                                         DataType::kI64, ReduceOp::kSum));
    for (size_t b = share(rank); b < share(rank + 1); ++b) {
      const Block& block = blocks_[b];
      const double scale = std::ldexp(1.0, exponents_[b] - bits_);
      const int64_t* sums = sums_.data() + block.start;
      if (wide) {
        ConvertToDouble(sums, static_cast<double*>(out) + block.start, block.elements, scale,
                        divisor);
      } else {
        ConvertToFloat(sums, static_cast<float*>(out) + block.start, block.elements, scale,
                       divisor);
      }
    }
    const size_t element = ElementBytes(out_type);
    EVERSTEP_RETURN_IF_ERROR(communicator.AllGatherV(
        out_bytes + mine * element, out_bytes + start_of(first) * element, counts, out_type));
  }

  // From the gathered result, so every rank computes the same. In terms of a micro-batch: what the
  // divisor is does not matter to the exponents.
  const FixedPointLoops loops = LoopsFor(out_type);
  const double to_micro_batch = std::abs(divisor) / static_cast<double>(micro_batches_);
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const uint64_t largest_bits =
        loops.largest(out_bytes + blocks_[b].start * ElementBytes(out_type), blocks_[b].elements);
    const double largest = std::bit_cast<double>(largest_bits) * to_micro_batch;
    if (largest_bits >= kInfinityBits || !std::isfinite(largest)) {
      not_finite_ = true;
      reduced_[b] = kNothing;
    } else {
      reduced_[b] = ExponentOf(largest);
    }
  }
  return OkStatus();
}

void ExactReducer::UpdateExponents() {
  for (size_t tensor = 0; tensor + 1 < first_block_.size(); ++tensor) {
    const size_t first = first_block_[tensor];
    const size_t last = first_block_[tensor + 1];
    int tensor_largest = kNothing;
    for (size_t b = first; b < last; ++b)
      tensor_largest = std::max<int>(tensor_largest, reduced_[b]);
    if (tensor_largest == kNothing) continue;  // all zero says nothing about the next step
    for (size_t b = first; b < last; ++b) {
      const int exponent = std::max<int>(reduced_[b], tensor_largest - kFloorBits) + kHeadroomBits;
      exponents_[b] = static_cast<int16_t>(std::clamp(exponent, kExponentMin, ExponentMax(type_)));
    }
  }
}

Status ExactReducer::RaiseExponents(Communicator& communicator) {
  std::vector<int32_t> needed(needed_.begin(), needed_.end());
  EVERSTEP_RETURN_IF_ERROR(communicator.AllReduce(needed.data(), needed.data(), needed.size(),
                                                  DataType::kI32, ReduceOp::kMax));
  bool raised = false;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    if (needed[b] <= exponents_[b]) continue;
    exponents_[b] = static_cast<int16_t>(
        std::clamp(needed[b] + kHeadroomBits, kExponentMin, ExponentMax(type_)));
    raised = true;
  }
  return raised ? OkStatus() : FailedPrecondition("no rank was out of range in this step");
}

}  // namespace everstep::collective
