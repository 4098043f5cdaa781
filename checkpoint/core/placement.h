// Where copies of a shard go: another failure domain first, so that the loss of any one domain leaves a copy. Called
// by whoever plans copies. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/ids.h"

namespace everstep::checkpoint {

struct PlacementCandidate {
  ServerId server;
  std::string failure_domain;   // empty: unknown, which counts as the same domain as every other unknown one
  uint64_t bytes_free = 0;
  uint64_t bytes_held = 0;      // copies it keeps already; less is better
};

struct Placement {
  ServerId server;
  bool other_domain = false;    // false: this copy does not protect against the loss of the owner's domain
  bool operator==(const Placement&) const = default;
};

// At most `count` servers other than the owner that have `bytes` free, best first: other failure domains before the
// owner's own, domains not used by an earlier choice before used ones, fewest bytes held, then id.
std::vector<Placement> PlaceCopies(const PlacementCandidate& owner, std::vector<PlacementCandidate> candidates,
                                   uint64_t bytes, size_t count);

}  // namespace everstep::checkpoint
