// Text for the tests of the example model: written here, so that they need no file. Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/prng.h"

namespace everstep::examples {

// Sentences of a small grammar, at least `size_bytes` long: enough structure to be learned.
inline std::string GrammarText(size_t size_bytes) {
  constexpr const char* kSubjects[] = {"the server", "a rank", "the agent", "this spare", "a peer"};
  constexpr const char* kVerbs[] = {"restores", "receives", "replaces", "reports", "retains"};
  constexpr const char* kObjects[] = {"the shard", "a gradient", "its state", "the step", "a copy"};
  Prng prng(7);
  std::string text;
  while (text.size() < size_bytes) {
    text += std::string(kSubjects[prng.UpTo(4)]) + " " + kVerbs[prng.UpTo(4)] + " " +
            kObjects[prng.UpTo(4)] + ".\n";
  }
  return text;
}

}  // namespace everstep::examples
