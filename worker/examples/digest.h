// The digest by which runs are compared: XXH3-128 over bytes, 32 hex digits. Pure, any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace everstep::examples {

std::string Digest128(std::span<const std::byte> bytes);

// Of the parameters of a whole model: those of stage 0, of stage 1, ... as one array.
template <typename Scalar>
std::string ParameterDigest(std::span<const Scalar> parameters) {
  return Digest128(std::as_bytes(parameters));
}

}  // namespace everstep::examples
