#include "worker/examples/gradient_reducer.h"

#include <algorithm>

#include "worker/collective/exact/exact_reducer.h"
#include "worker/examples/aligned_buffer.h"

namespace everstep::examples {
namespace {

using collective::DataType;
using collective::ReduceOp;

template <typename Scalar>
constexpr DataType TypeOf() {
  return sizeof(Scalar) == 4 ? DataType::kF32 : DataType::kF64;
}

int64_t ElementCount(const std::vector<TensorInfo>& tensors) {
  return tensors.empty() ? 0 : tensors.back().offset + tensors.back().count;
}

template <typename Scalar>
class NativeReducer : public GradientReducer<Scalar> {
 public:
  NativeReducer(const std::vector<TensorInfo>& tensors, int64_t micro_batch_count)
      : sum_(ElementCount(tensors)), weight_(Scalar(1) / static_cast<Scalar>(micro_batch_count)) {}

  void Begin() override { sum_.Clear(); }
  Scalar weight() const override { return weight_; }
  std::span<Scalar> micro_batch() override { return sum_.span(); }
  void Accumulate() override {}
  Status Reduce(collective::Communicator& replicas, VoteExtras&) override {
    if (replicas.world_size() == 1) return OkStatus();
    return replicas.AllReduce(sum_.data(), sum_.data(), sum_.size(), TypeOf<Scalar>(), ReduceOp::kSum);
  }
  Status Raise(collective::Communicator&) override { return OkStatus(); }
  std::span<const Scalar> gradients() const override { return sum_.span(); }
  void Adopt() override {}
  std::vector<ReducerState> state() override { return {}; }
  void ResetState() override {}

 private:
  AlignedBuffer<Scalar> sum_;
  const Scalar weight_;
};

// Micro-batches are rounded to fixed point one by one; integers are summed, then divided once.
template <typename Scalar>
class FixedPointReducer : public GradientReducer<Scalar> {
 public:
  FixedPointReducer(const std::vector<TensorInfo>& tensors, int64_t micro_batch_count)
      : micro_batch_(ElementCount(tensors)),
        mean_(ElementCount(tensors)),
        reducer_(Counts(tensors), static_cast<size_t>(micro_batch_count), TypeOf<Scalar>()),
        initial_exponents_(reducer_.exponents().begin(), reducer_.exponents().end()) {}

  void Begin() override {
    reducer_.BeginStep();
    micro_batch_.Clear();
  }
  Scalar weight() const override { return Scalar(1); }
  std::span<Scalar> micro_batch() override { return micro_batch_.span(); }
  void Accumulate() override {
    reducer_.Accumulate(micro_batch_.data());
    micro_batch_.Clear();
  }
  Status Reduce(collective::Communicator& replicas, VoteExtras& extras) override {
    extras.out_of_range = reducer_.out_of_range();
    extras.not_finite = reducer_.not_finite();
    return reducer_.Finish(replicas, mean_.data());
  }
  Status Raise(collective::Communicator& replicas) override {
    Status status = reducer_.RaiseExponents(replicas);
    // It was another stage's value that did not fit; here there is nothing to raise.
    return status.code() == StatusCode::kFailedPrecondition ? OkStatus() : status;
  }
  std::span<const Scalar> gradients() const override { return mean_.span(); }
  void Adopt() override { reducer_.UpdateExponents(); }
  std::vector<ReducerState> state() override {
    const std::span<int16_t> exponents = reducer_.exponents();
    return {{"reduction/exponents", "i16", exponents.data(), exponents.size(), exponents.size_bytes()}};
  }
  void ResetState() override {
    std::copy(initial_exponents_.begin(), initial_exponents_.end(), reducer_.exponents().begin());
  }

 private:
  static std::vector<size_t> Counts(const std::vector<TensorInfo>& tensors) {
    std::vector<size_t> counts;
    for (const TensorInfo& tensor : tensors) counts.push_back(static_cast<size_t>(tensor.count));
    return counts;
  }

  AlignedBuffer<Scalar> micro_batch_;
  AlignedBuffer<Scalar> mean_;
  collective::ExactReducer reducer_;
  const std::vector<int16_t> initial_exponents_;
};

}  // namespace

template <typename Scalar>
std::unique_ptr<GradientReducer<Scalar>> MakeReducer(Reduction reduction, const std::vector<TensorInfo>& tensors,
                                                     int64_t micro_batch_count) {
  if (reduction == Reduction::kNative) return std::make_unique<NativeReducer<Scalar>>(tensors, micro_batch_count);
  return std::make_unique<FixedPointReducer<Scalar>>(tensors, micro_batch_count);
}

template std::unique_ptr<GradientReducer<float>> MakeReducer(Reduction, const std::vector<TensorInfo>&, int64_t);
template std::unique_ptr<GradientReducer<double>> MakeReducer(Reduction, const std::vector<TensorInfo>&, int64_t);

}  // namespace everstep::examples
