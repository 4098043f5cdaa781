#include "worker/collective/reduce_kernels.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "proto/base/check.h"

namespace everstep::collective {

const char* DataTypeName(DataType type) {
  switch (type) {
    case DataType::kU8: return "u8";
    case DataType::kI8: return "i8";
    case DataType::kI32: return "i32";
    case DataType::kI64: return "i64";
    case DataType::kU64: return "u64";
    case DataType::kF16: return "f16";
    case DataType::kBF16: return "bf16";
    case DataType::kF32: return "f32";
    case DataType::kF64: return "f64";
  }
  return "unknown";
}

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kBitOr: return "bit-or";
    case ReduceOp::kAvg: return "avg";
  }
  return "unknown";
}

// Branch-free on the common path, so that loops over them vectorise.
float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Shift exponent and mantissa into place and rescale by 2^112: subnormals come out right as well.
  const float scaled = std::bit_cast<float>(magnitude << 13) * std::bit_cast<float>(0x77800000u);
  const uint32_t special =
      magnitude >= 0x7c00u ? 0x7f800000u | (magnitude << 13) : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(sign | special);
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u)
    return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past the largest half
  if (magnitude < 0x38800000u) {                   // subnormal half, or zero
    // Adding 0.5 puts the wanted bits, correctly rounded, at the bottom of the mantissa.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

float BFloat16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

namespace {

// A 16-bit float: stored as bits, computed in float, rounded after each operation.
struct Half {
  uint16_t bits;
  static float Widen(Half h) { return HalfToFloat(h.bits); }
  static Half Narrow(float f) { return Half{FloatToHalf(f)}; }
};
struct BFloat16 {
  uint16_t bits;
  static float Widen(BFloat16 b) { return BFloat16ToFloat(b.bits); }
  static BFloat16 Narrow(float f) { return BFloat16{FloatToBFloat16(f)}; }
};

template <typename T>
inline constexpr bool kIsNarrow = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// Integers wrap: signed overflow would be undefined, and wrapping is what keeps the sum independent
// of order.
struct Sum {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};
// A NaN in either operand wins, so that a bad value is never hidden.
struct Min {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a < b || a != a ? a : b;
    } else {
      return a < b ? a : b;
    }
  }
};
struct Max {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a > b || a != a ? a : b;
    } else {
      return a > b ? a : b;
    }
  }
};
struct BitOr {
  template <typename T>
  static T Apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

template <typename T, typename Op>
void ReduceLoop(void* into_raw, const void* a_raw, const void* b_raw, size_t count) {
  T* into = static_cast<T*>(into_raw);
  const T* a = static_cast<const T*>(a_raw);
  const T* b = static_cast<const T*>(b_raw);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kIsNarrow<T>) {
      into[i] = T::Narrow(Op::Apply(T::Widen(a[i]), T::Widen(b[i])));
    } else {
      into[i] = Op::Apply(a[i], b[i]);
    }
  }
}

template <typename T>
void DivideLoop(void* data_raw, size_t count, double divisor) {
  T* data = static_cast<T*>(data_raw);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kIsNarrow<T>) {
      data[i] = T::Narrow(T::Widen(data[i]) / static_cast<float>(divisor));
    } else {
      data[i] = data[i] / static_cast<T>(divisor);
    }
  }
}

template <typename Op>
ReduceFunction ForAnyType(DataType type) {
  switch (type) {
    case DataType::kU8: return &ReduceLoop<uint8_t, Op>;
    case DataType::kI8: return &ReduceLoop<int8_t, Op>;
    case DataType::kI32: return &ReduceLoop<int32_t, Op>;
    case DataType::kI64: return &ReduceLoop<int64_t, Op>;
    case DataType::kU64: return &ReduceLoop<uint64_t, Op>;
    case DataType::kF16: return &ReduceLoop<Half, Op>;
    case DataType::kBF16: return &ReduceLoop<BFloat16, Op>;
    case DataType::kF32: return &ReduceLoop<float, Op>;
    case DataType::kF64: return &ReduceLoop<double, Op>;
  }
  return nullptr;
}

ReduceFunction BitOrFor(DataType type) {
  switch (ElementBytes(type)) {
    case 1: return &ReduceLoop<uint8_t, BitOr>;
    case 4: return &ReduceLoop<uint32_t, BitOr>;
    default: return &ReduceLoop<uint64_t, BitOr>;
  }
}

}  // namespace

ReduceFunction ReductionFor(ReduceOp op, DataType type) {
  EVERSTEP_CHECK(ReductionApplies(op, type));
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return ForAnyType<Sum>(type);
    case ReduceOp::kProduct: return ForAnyType<Product>(type);
    case ReduceOp::kMin: return ForAnyType<Min>(type);
    case ReduceOp::kMax: return ForAnyType<Max>(type);
    case ReduceOp::kBitOr: return BitOrFor(type);
  }
  return nullptr;
}

DivideFunction DivisionFor(DataType type) {
  switch (type) {
    case DataType::kF16: return &DivideLoop<Half>;
    case DataType::kBF16: return &DivideLoop<BFloat16>;
    case DataType::kF32: return &DivideLoop<float>;
    case DataType::kF64: return &DivideLoop<double>;
    default: EVERSTEP_CHECK(!"division of integers"); return nullptr;
  }
}

}  // namespace everstep::collective
