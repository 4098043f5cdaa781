// Element types and reductions of the collectives. Plain data, used on any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/base/ids.h"

namespace everstep::collective {

enum class DataType : uint8_t { kU8, kI8, kI32, kI64, kU64, kF16, kBF16, kF32, kF64 };
inline constexpr int kDataTypeCount = 9;

// kAvg is a sum divided by the number of ranks, for floating point types only. kBitOr is for
// integers only.
enum class ReduceOp : uint8_t { kSum, kProduct, kMin, kMax, kBitOr, kAvg };
inline constexpr int kReduceOpCount = 6;

constexpr size_t ElementBytes(DataType type) {
  switch (type) {
    case DataType::kU8:
    case DataType::kI8: return 1;
    case DataType::kF16:
    case DataType::kBF16: return 2;
    case DataType::kI32:
    case DataType::kF32: return 4;
    case DataType::kI64:
    case DataType::kU64:
    case DataType::kF64: return 8;
  }
  return 1;
}

constexpr bool IsFloatingPoint(DataType type) {
  return type == DataType::kF16 || type == DataType::kBF16 || type == DataType::kF32 ||
         type == DataType::kF64;
}

constexpr bool ReductionApplies(ReduceOp op, DataType type) {
  if (op == ReduceOp::kBitOr) return !IsFloatingPoint(type);
  if (op == ReduceOp::kAvg) return IsFloatingPoint(type);
  return true;
}

const char* DataTypeName(DataType type);  // "f32"
const char* ReduceOpName(ReduceOp op);    // "sum"

// Names one communicator among those of a generation. 0 is the world.
using GroupId = StrongNumber<struct GroupIdTag, uint64_t>;

}  // namespace everstep::collective
