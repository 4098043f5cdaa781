#include "checkpoint/core/placement.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace everstep::checkpoint {

std::vector<Placement> PlaceCopies(const PlacementCandidate& owner, std::vector<PlacementCandidate> candidates,
                                   uint64_t bytes, size_t count) {
  std::erase_if(candidates, [&](const PlacementCandidate& candidate) {
    return candidate.server == owner.server || candidate.bytes_free < bytes;
  });
  std::vector<Placement> chosen;
  std::set<std::string> domains_used = {owner.failure_domain};
  while (chosen.size() < count && !candidates.empty()) {
    const auto rank = [&](const PlacementCandidate& candidate) {
      return std::tuple(candidate.failure_domain == owner.failure_domain,
                        domains_used.contains(candidate.failure_domain), candidate.bytes_held,
                        candidate.server.value);
    };
    const auto best = std::min_element(candidates.begin(), candidates.end(),
                                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    chosen.push_back({best->server, best->failure_domain != owner.failure_domain});
    domains_used.insert(best->failure_domain);
    const ServerId taken = best->server;
    std::erase_if(candidates, [&](const PlacementCandidate& candidate) { return candidate.server == taken; });
  }
  return chosen;
}

}  // namespace everstep::checkpoint
