// What memory truly holds, kept beside the cores: for each step of a state, the generation in which it was applied, so
// that two histories of one step never look equal (the representation of the executable model). Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "proto/model/rank_messages.h"

namespace everstep::sim {

using Content = std::vector<uint64_t>;

inline Digest128 DigestOf(const Content& content) {
  Digest128 digest{content.size() + 1, 1469598103934665603u};
  for (uint64_t g : content) {
    digest[1] ^= g;
    digest[1] *= 1099511628211u;
  }
  return digest;
}

// "[3x1 2x4]": three steps in generation 1, two in generation 4.
inline std::string Text(const Content& content) {
  std::string text = "[";
  for (size_t i = 0; i < content.size();) {
    size_t j = i;
    while (j < content.size() && content[j] == content[i]) ++j;
    text += fmt::format("{}{}x{}", i == 0 ? "" : " ", j - i, content[i]);
    i = j;
  }
  return text + "]";
}

}  // namespace everstep::sim
