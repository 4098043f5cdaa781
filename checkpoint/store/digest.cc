#include "checkpoint/store/digest.h"

#include <fmt/format.h>

#define XXH_STATIC_LINKING_ONLY  // the state as a plain member
#include <xxhash.h>

#include "proto/base/check.h"

namespace everstep::checkpoint {
namespace {
Digest128 FromHash(const XXH128_hash_t& hash) { return {hash.low64, hash.high64}; }
}  // namespace

Digest128 DigestOf(std::span<const std::byte> bytes) {
  return FromHash(XXH3_128bits(bytes.data(), bytes.size()));
}

struct Digester::State {
  XXH3_state_t hash;
};

Digester::Digester() : state_(std::make_unique<State>()) {
  EVERSTEP_CHECK(XXH3_128bits_reset(&state_->hash) == XXH_OK);
}
Digester::~Digester() = default;

void Digester::Add(std::span<const std::byte> bytes) {
  EVERSTEP_CHECK(XXH3_128bits_update(&state_->hash, bytes.data(), bytes.size()) == XXH_OK);
}

Digest128 Digester::Finish() const { return FromHash(XXH3_128bits_digest(&state_->hash)); }

std::string DigestText(const Digest128& digest) { return fmt::format("{:016x}{:016x}", digest[1], digest[0]); }

}  // namespace everstep::checkpoint
