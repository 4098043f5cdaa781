// A fixed-length array on a cache-line border, zeroed at creation: where parameters, gradients,
// optimizer state and activations live. Owned by whoever trains; thread-compatible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

namespace everstep::examples {

template <typename Scalar>
class AlignedBuffer {
 public:
  static constexpr size_t kAlignmentBytes = 64;

  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t count)
      : data_(static_cast<Scalar*>(::operator new(static_cast<size_t>(count) * sizeof(Scalar),
                                                  std::align_val_t(kAlignmentBytes)))),
        count_(static_cast<size_t>(count)) {
    Clear();
  }

  Scalar* data() { return data_.get(); }
  const Scalar* data() const { return data_.get(); }
  size_t size() const { return count_; }
  Scalar& operator[](size_t i) { return data_.get()[i]; }
  const Scalar& operator[](size_t i) const { return data_.get()[i]; }
  std::span<Scalar> span() { return {data_.get(), count_}; }
  std::span<const Scalar> span() const { return {data_.get(), count_}; }
  void Clear() { std::fill_n(data_.get(), count_, Scalar(0)); }

 private:
  struct Release {
    void operator()(Scalar* data) const {
      ::operator delete(data, std::align_val_t(kAlignmentBytes));
    }
  };
  std::unique_ptr<Scalar[], Release> data_;
  size_t count_ = 0;
};

}  // namespace everstep::examples
