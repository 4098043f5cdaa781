#include "worker/examples/digest.h"

#include <fmt/core.h>
#include <xxhash.h>

namespace everstep::examples {

std::string Digest128(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace everstep::examples
