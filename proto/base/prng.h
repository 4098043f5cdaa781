// Our own seeded generator (splitmix64-seeded xoshiro256**; Blackman and Vigna, public domain), so that a seed
// means the same run on every compiler and library. Integers only: decisions must not depend on floating point.
// Thread-compatible.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace everstep {

class Prng {
 public:
  explicit constexpr Prng(uint64_t seed) {
    for (uint64_t& word : state_) {
      seed += 0x9e3779b97f4a7c15u;
      uint64_t z = seed;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      word = z ^ (z >> 31);
    }
  }

  constexpr uint64_t Next() {
    const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // Uniform in [0, last], both ends included.
  constexpr uint64_t UpTo(uint64_t last) {
    if (last == UINT64_MAX) return Next();
    const uint64_t range = last + 1;
    const uint64_t limit = UINT64_MAX - (UINT64_MAX % range + 1) % range;
    uint64_t value = Next();
    while (value > limit) value = Next();
    return value % range;
  }
  constexpr int64_t Between(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(UpTo(static_cast<uint64_t>(last - first)));
  }
  // True with probability numerator / denominator.
  constexpr bool Chance(uint64_t numerator, uint64_t denominator) { return UpTo(denominator - 1) < numerator; }

  // An independent stream for another purpose.
  constexpr Prng Fork() { return Prng(Next()); }

 private:
  std::array<uint64_t, 4> state_{};
};

}  // namespace everstep
