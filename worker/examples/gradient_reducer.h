// How the gradients of the micro-batches of all replicas become one sum. Used by the distributed
// trainer, which owns one reducer per shard; thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/client/session.h"
#include "worker/collective/communicator.h"
#include "worker/examples/transformer.h"

namespace everstep::examples {

enum class Reduction : uint8_t {
  kExact,   // fixed point: the same bits for any split of micro-batches over any ranks
  kNative,  // floating point, in the order of micro-batches and of the backend
};

// What a reducer carries from step to step; it is part of the shard's state.
struct ReducerState {
  std::string_view name;
  std::string_view dtype;
  void* data = nullptr;
  size_t count = 0;
  size_t bytes = 0;
};

template <typename Scalar>
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  // A step begins (again): nothing is accumulated.
  virtual void Begin() = 0;
  // By what Backward multiplies a micro-batch's gradient.
  virtual Scalar weight() const = 0;
  // Where Backward adds the gradients of the micro-batch in hand ...
  virtual std::span<Scalar> micro_batch() = 0;
  // ... which is then taken in.
  virtual void Accumulate() = 0;
  // Sums over the replicas. `extras.out_of_range`: this rank saw a value that its fixed point can't
  // hold; the step must be done again, after Raise on all ranks.
  virtual Status Reduce(collective::Communicator& replicas, VoteExtras& extras) = 0;
  virtual Status Raise(collective::Communicator& replicas) = 0;
  // The sum, from Reduce until the next Begin.
  virtual std::span<const Scalar> gradients() const = 0;
  // The step is applied: what the next one starts from is derived from its sum.
  virtual void Adopt() = 0;
  virtual std::vector<ReducerState> state() = 0;
  virtual void ResetState() = 0;  // as before the first step
};

template <typename Scalar>
std::unique_ptr<GradientReducer<Scalar>> MakeReducer(Reduction reduction,
                                                     const std::vector<TensorInfo>& tensors,
                                                     int64_t micro_batch_count);

}  // namespace everstep::examples
