#include "worker/examples/gradient_reducer.h"

#include "worker/examples/aligned_buffer.h"

namespace everstep::examples {
namespace {

using collective::DataType;
using collective::ReduceOp;

template <typename Scalar>
constexpr DataType TypeOf() {
  return sizeof(Scalar) == 4 ? DataType::kF32 : DataType::kF64;
}

template <typename Scalar>
class NativeReducer : public GradientReducer<Scalar> {
 public:
  explicit NativeReducer(const std::vector<TensorInfo>& tensors)
      : sum_(tensors.empty() ? 0 : tensors.back().offset + tensors.back().count) {}

  void Begin() override { sum_.Clear(); }
  std::span<Scalar> micro_batch() override { return sum_.span(); }
  void Accumulate() override {}
  Status Reduce(collective::Communicator& replicas, bool& out_of_range) override {
    out_of_range = false;
    if (replicas.world_size() == 1) return OkStatus();
    return replicas.AllReduce(sum_.data(), sum_.data(), sum_.size(), TypeOf<Scalar>(), ReduceOp::kSum);
  }
  void Raise() override {}
  std::span<const Scalar> gradients() const override { return sum_.span(); }
  void Adopt() override {}
  std::vector<ReducerState> state() override { return {}; }
  void ResetState() override {}

 private:
  AlignedBuffer<Scalar> sum_;
};

}  // namespace

template <typename Scalar>
std::unique_ptr<GradientReducer<Scalar>> MakeReducer(Reduction reduction,
                                                     const std::vector<TensorInfo>& tensors) {
  (void)reduction;
  return std::make_unique<NativeReducer<Scalar>>(tensors);
}

template std::unique_ptr<GradientReducer<float>> MakeReducer(Reduction, const std::vector<TensorInfo>&);
template std::unique_ptr<GradientReducer<double>> MakeReducer(Reduction, const std::vector<TensorInfo>&);

}  // namespace everstep::examples
