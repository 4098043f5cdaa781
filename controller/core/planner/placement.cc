#include "controller/core/planner/placement.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "proto/base/check.h"
#include "proto/base/mutation.h"

namespace everstep {
namespace {

// How well a candidate replaces a lost rank; lower is better. Warm first, then near, then alike.
auto Cost(const Candidate& c, const LostRank* lost) {
  const bool other_server = lost != nullptr && c.server != lost->server;
  const bool other_domain = lost != nullptr && c.failure_domain != lost->failure_domain;
  const bool other_model = lost != nullptr && c.device_model != lost->device_model;
  return std::make_tuple(static_cast<int>(c.kind), other_model, other_domain, other_server, -c.speed, c.server.value,
                         c.device.value);
}

class Placer {
 public:
  explicit Placer(const PlacementRequest& request) : request_(request) {}

  PlacementResult Run() {
    const int32_t stages = request_.pipeline_stages;
    const auto available = static_cast<int32_t>(request_.incumbents.size() + request_.candidates.size());
    const int32_t world = std::min(available, request_.world_wanted) / stages * stages;
    if (world < request_.world_min || world == 0) {
      return {std::nullopt,
              fmt::format("{} devices are healthy and free for this job, {} survivors among them; it needs at least {}",
                          available, request_.incumbents.size(), std::max(request_.world_min, stages))};
    }
    placement_.dp_size = world / stages;
    placement_.ranks.resize(static_cast<size_t>(world));
    taken_.assign(request_.candidates.size(), false);
    SeatIncumbents();
    FillHoles();
    Explain(world);
    return {std::move(placement_), ""};
  }

 private:
  size_t World() const { return placement_.ranks.size(); }

  void Seat(size_t rank, const Incumbent& incumbent) {
    placement_.ranks[rank] = {Rank(static_cast<int32_t>(rank)), 0, 0, incumbent.server, incumbent.device,
                              incumbent.process, true, Candidate::Kind::kReadyStandby};
    seated_[rank] = true;
  }

  void SeatIncumbents() {
    seated_.assign(World(), false);
    std::vector<Incumbent> homeless;
    std::vector<Incumbent> sorted = request_.incumbents;
    std::sort(sorted.begin(), sorted.end(), [](const Incumbent& a, const Incumbent& b) {
      return std::tie(a.rank, a.process) < std::tie(b.rank, b.process);
    });
    const int32_t stages = request_.pipeline_stages;
    for (const Incumbent& i : sorted) {
      const auto rank = static_cast<size_t>(i.rank.value);
      // The shard a seat holds is rank mod stages; an incumbent keeps its rank when that is what it holds already.
      if (i.rank.value >= 0 && rank < World() && !seated_[rank] && i.rank.value % stages == i.shard.value) {
        Seat(rank, i);
      } else {
        homeless.push_back(i);
      }
    }
    // Then holes of the shard they hold.
    homeless = SeatInHoles(homeless, true);
    // A shard's only holder of the recovery point is seated before an incumbent that must fetch it.
    for (Incumbent& i : homeless) {
      if (!i.source) continue;
      size_t without = World();
      bool held = false;
      Incumbent displaced;
      for (size_t rank = 0; rank < World(); ++rank) {
        if (static_cast<int32_t>(rank) % stages != i.shard.value || !seated_[rank]) continue;
        const auto seated = std::find_if(sorted.begin(), sorted.end(), [&](const Incumbent& other) {
          return other.process == placement_.ranks[rank].process;
        });
        if (seated->source && seated->shard == i.shard) {
          held = true;
        } else if (without == World()) {
          without = rank;
          displaced = *seated;
        }
      }
      if (held || without == World()) continue;
      Seat(without, i);
      i = displaced;
    }
    // The others take any hole: their memory will be replaced.
    SeatInHoles(homeless, false);
  }

  // Seats who finds a hole, of its own shard or of any, lowest rank first; returns the others.
  std::vector<Incumbent> SeatInHoles(const std::vector<Incumbent>& homeless, bool same_shard) {
    std::vector<Incumbent> rest;
    for (const Incumbent& i : homeless) {
      size_t hole = World();
      for (size_t rank = 0; rank < World() && hole == World(); ++rank) {
        const bool fits = !same_shard || static_cast<int32_t>(rank) % request_.pipeline_stages == i.shard.value;
        if (!seated_[rank] && fits) hole = rank;
      }
      if (hole < World()) {
        Seat(hole, i);
      } else {
        rest.push_back(i);
      }
    }
    return rest;
  }

  void FillHoles() {
    std::map<Rank, const LostRank*> lost;
    for (const LostRank& l : request_.lost) lost.emplace(l.rank, &l);
    for (size_t rank = 0; rank < World(); ++rank) {
      if (!seated_[rank]) {
        auto it = lost.find(Rank(static_cast<int32_t>(rank)));
        const LostRank* model = it != lost.end() ? it->second : request_.lost.empty() ? nullptr : &request_.lost[0];
        const size_t best = Best(model);
        EVERSTEP_CHECK(best < request_.candidates.size());
        const Candidate& c = request_.candidates[best];
        taken_[best] = true;
        placement_.ranks[rank] = {Rank(static_cast<int32_t>(rank)), 0, 0, c.server, c.device, c.process, false, c.kind};
        ++used_[c.kind];
      }
      placement_.ranks[rank].dp = static_cast<int32_t>(rank) / request_.pipeline_stages;
      placement_.ranks[rank].pp = static_cast<int32_t>(rank) % request_.pipeline_stages;
    }
  }

  size_t Best(const LostRank* lost) const {
    size_t best = request_.candidates.size();
    for (size_t i = 0; i < request_.candidates.size(); ++i) {
      if (taken_[i]) continue;
      if (best == request_.candidates.size() || Cost(request_.candidates[i], lost) < Cost(request_.candidates[best], lost)) {
        best = i;
      }
    }
    return best;
  }

  void Explain(int32_t world) {
    const auto incumbents = static_cast<int32_t>(std::count_if(placement_.ranks.begin(), placement_.ranks.end(),
                                                               [](const PlacedRank& r) { return r.incumbent; }));
    const int32_t newcomers = world - incumbents;
    const bool first = request_.incumbents.empty() && request_.lost.empty();
    std::string where;
    for (const PlacedRank& r : placement_.ranks) {
      if (r.incumbent) continue;
      if (where.size() > 60) { where += " …"; break; }
      where += fmt::format("{}rank {} on {}", where.empty() ? "" : ", ", r.rank.value, r.server.value);
    }
    if (first) {
      placement_.reason = Reason::kJobStarted;
      placement_.message = fmt::format("Place {} ranks: {}", world, where);
    } else if (world < request_.world_wanted &&
               world < incumbents + static_cast<int32_t>(request_.lost.size())) {
      placement_.reason = Reason::kJobShrunk;
      placement_.message = fmt::format("Go on with {} of {} ranks, the global batch re-shared: {} spare devices for {} "
                                       "lost ranks", world, request_.world_wanted, request_.candidates.size(),
                                       request_.lost.size());
      if (!request_.rivals.empty()) {
        placement_.message += fmt::format("; the claim of job {} is higher (priority, then age)", request_.rivals.front());
      }
    } else if (newcomers == 0) {
      placement_.reason = Reason::kMemberLost;
      placement_.message = "Form the same ranks anew";
    } else if (used_[Candidate::Kind::kReadyStandby] == newcomers) {
      placement_.reason = Reason::kStandbyPromoted;
      placement_.message = fmt::format("Promote a warm standby: {}", where);
    } else if (used_[Candidate::Kind::kFreedInPlace] == newcomers) {
      placement_.reason = Reason::kRestartedInPlace;
      placement_.message = fmt::format("Start the process again on its device: {}", where);
    } else {
      placement_.reason = Reason::kSpareTaken;
      placement_.message = fmt::format("Take a spare: {}", where);
    }
    if (first) return;
    Rivals(world, incumbents, newcomers);
  }

  void Rivals(int32_t world, int32_t incumbents, int32_t newcomers) {
    const int32_t stages = request_.pipeline_stages;
    const int32_t shrunk = incumbents / stages * stages;
    if (newcomers > 0 && shrunk >= request_.world_min) {
      placement_.alternatives.push_back(fmt::format(
          "shrink to {} ranks at once: keeps {} % of the throughput for as long as no spare is used", shrunk,
          100 * shrunk / std::max(1, world)));
    } else if (newcomers > 0) {
      placement_.alternatives.push_back(fmt::format("shrink: refused, {} survivors are below the minimum of {} ranks",
                                                    incumbents, request_.world_min));
    }
    size_t warm = 0, cold = 0;
    for (size_t i = 0; i < taken_.size(); ++i) {
      if (taken_[i]) continue;
      (request_.candidates[i].kind == Candidate::Kind::kReadyStandby ? warm : cold) += 1;
    }
    if (newcomers > 0) {
      placement_.alternatives.push_back(fmt::format(
          "another device: {} warm and {} cold ones were left; farther, less alike or not started yet", warm, cold));
    }
    placement_.alternatives.push_back("restart every rank from the newest checkpoint: loses the steps since then");
  }

  const PlacementRequest& request_;
  Placement placement_;
  std::vector<bool> seated_;
  std::vector<bool> taken_;
  std::map<Candidate::Kind, int32_t> used_;
};

}  // namespace

PlacementResult Place(const PlacementRequest& request) {
  EVERSTEP_CHECK(request.pipeline_stages >= 1 && request.world_min >= 1);
  EVERSTEP_CHECK(request.world_wanted >= request.world_min);
  return Placer(request).Run();
}

std::vector<Share> EqualShares(int32_t micro_batches, int32_t replicas) {
  EVERSTEP_CHECK(replicas >= 1);
  std::vector<Share> shares(static_cast<size_t>(replicas));
  int32_t first = 0;
  for (int32_t i = 0; i < replicas; ++i) {
    const int32_t count = micro_batches / replicas + (i < micro_batches % replicas ? 1 : 0);
    shares[static_cast<size_t>(i)] = {first, count};
    first += Mutated(Mutation::kShareTwice) && i > 0 ? count - 1 : count;
  }
  return shares;
}

}  // namespace everstep
