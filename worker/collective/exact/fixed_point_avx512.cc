// The loops again, for machines with AVX-512DQ. Nothing but the loops may be in here: an inline
// function compiled in this file could otherwise be the one that the linker keeps for everybody.
#include <bit>

#include "worker/collective/exact/fixed_point.h"

namespace everstep::collective {
namespace {

#include "worker/collective/exact/fixed_point_loops.inc"

}  // namespace

FixedPointLoops LoopsForAvx512(DataType type);
FixedPointLoops LoopsForAvx512(DataType type) { return Loops(type); }

}  // namespace everstep::collective
