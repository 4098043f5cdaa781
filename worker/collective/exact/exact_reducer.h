// ExactReducer: sums of micro-batch gradients whose bits do not depend on the order of summation,
// on how micro-batches are shared out, or on how many ranks there are (protocol.md section 8). One
// per model, owned by the rank library or the training program; thread-compatible, called by the
// training thread.
//
// Each micro-batch gradient is rounded to 64-bit fixed point with one exponent per block of 1,024
// elements (blocks never span tensors); integers are summed, locally and by a reduce-scatter,
// converted once and all-gathered. A block with exponent e holds |g| < 2^e per micro-batch in steps
// of 2^(e - b), b = 62 - ceil(log2(micro-batches)), so no sum of a whole global batch can overflow.
//
//   reducer.BeginStep();
//   for each micro-batch of this rank: reducer.Accumulate(gradients);
//   reducer.Finish(communicator, mean);           // collective
//   vote, with out_of_range() and not_finite() of this rank as flags
//   passed, no flag:       apply; reducer.UpdateExponents();
//   some rank out of range: reducer.RaiseExponents(communicator); redo the step from BeginStep
//
// Exponents are replicated state: equal on all ranks, saved and restored with the rest of the state
// (exponents()). They follow from reduced gradients only, never from a rank's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/status.h"
#include "worker/collective/communicator.h"

namespace everstep::collective {

class ExactReducer {
 public:
  static constexpr size_t kBlockElements = 1024;
  static constexpr int kHeadroomBits = 8;  // above the largest reduced |g| of the last applied step
  static constexpr int kFloorBits = 16;    // no block lies further below its tensor's largest
  static constexpr int16_t kInitialExponent = 8;
  static constexpr size_t kMicroBatchesMax = size_t{1} << 20;

  // Element counts of the tensors, in the order in which a flat gradient buffer holds them, without
  // gaps. `micro_batches`: of the global batch, over all ranks. `type`: of the gradients, f16,
  // bf16, f32 or f64. REQUIRES: 1 <= micro_batches <= kMicroBatchesMax and a floating point type
  ExactReducer(std::span<const size_t> tensor_elements, size_t micro_batches, DataType type);

  size_t elements() const { return elements_; }
  size_t tensor_count() const { return first_block_.size() - 1; }

  // Forgets what was accumulated, and the flags.
  void BeginStep();
  // Adds the gradient of one micro-batch: all tensors, flat; or tensor by tensor, where each tensor
  // is added once per micro-batch. Sets out_of_range and not_finite; values that do not fit add
  // nothing.
  void Accumulate(const void* gradients);
  void AccumulateTensor(size_t tensor, const void* gradients);

  // Collective. Sums over all ranks and writes sum / divisor (default: the number of micro-batches)
  // everywhere, to f32 or, for f64 gradients, f64. The bits of `out` depend on the micro-batch
  // gradients and exponents alone. Uses up the accumulator: BeginStep must follow before the next
  // Accumulate. Codes of Communicator::Run.
  Status Finish(Communicator& communicator, void* out, double divisor = 0);

  bool out_of_range() const {
    return out_of_range_;
  }  // of this rank's micro-batches; the vote ORs it
  bool not_finite() const { return not_finite_; }

  // After the step was applied: exponents from the gradient that Finish gave.
  void UpdateExponents();
  // Collective, after a step in which some rank was out of range: raises each block that needs it
  // to what the largest micro-batch gradient of all ranks needs, plus headroom. The same for any
  // split of the micro-batches.
  Status RaiseExponents(Communicator& communicator);

  // One per block, tensors in order. Register this memory as replicated state; restoring may
  // overwrite it between steps.
  std::span<int16_t> exponents() { return exponents_; }

 private:
  struct Block {
    size_t start = 0;
    uint32_t elements = 0;
    uint32_t tensor = 0;
  };

  void AddBlocks(size_t first_block, size_t last_block, const std::byte* gradients);

  const DataType type_;
  const size_t micro_batches_;
  const int bits_;  // of one micro-batch
  size_t elements_ = 0;
  std::vector<Block> blocks_;
  std::vector<size_t> first_block_;  // per tensor, and one past the last
  std::vector<int64_t> sums_;
  std::vector<uint8_t>
      summed_;  // per block: sums_ holds a sum of this step; otherwise it stands for zeros
  std::vector<int16_t> exponents_;
  std::vector<int16_t> needed_;  // per block: exponent that this rank's micro-batches needed
  std::vector<int16_t>
      reduced_;  // per block: exponent of the largest |reduced g|, kNothing when all are 0
  bool out_of_range_ = false;
  bool not_finite_ = false;
};

}  // namespace everstep::collective
