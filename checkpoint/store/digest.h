// XXH3-128 of bytes, the digest of shards and chunks everywhere: at capture, transfer, rest and load. Detects errors,
// not forgers. Pure; Digester is thread-compatible.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

inline constexpr size_t kChunkBytes = 1u << 20;  // shards are cut into chunks of this size, the last one shorter

// {low 64 bits, high 64 bits}, equal to XXH3_128bits(data, size).
Digest128 DigestOf(std::span<const std::byte> bytes);

// The same digest over bytes that come in pieces.
class Digester {
 public:
  Digester();
  ~Digester();
  void Add(std::span<const std::byte> bytes);
  Digest128 Finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string DigestText(const Digest128& digest);  // 32 hexadecimal digits, high bits first

}  // namespace everstep::checkpoint
