// Who holds which rank: tables, and what must hold for any request.
#include "controller/core/planner/placement.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep {
namespace {

Incumbent Member(int rank, const std::string& server, int shard = 0, bool source = true) {
  return {ProcessId(100 + static_cast<uint64_t>(rank)), Rank(rank), ServerId(server), DeviceIndex(0), ShardIndex(shard), source};
}
Candidate At(Candidate::Kind kind, const std::string& server, const std::string& domain = "", const std::string& model = "cpu") {
  Candidate c;
  c.kind = kind;
  c.server = ServerId(server);
  c.failure_domain = domain;
  c.device_model = model;
  if (kind == Candidate::Kind::kReadyStandby || kind == Candidate::Kind::kStartingStandby) c.process = ProcessId(7);
  return c;
}
LostRank Lost(int rank, const std::string& server, const std::string& domain = "", const std::string& model = "cpu") {
  return {Rank(rank), ServerId(server), DeviceIndex(0), domain, model};
}
using Kind = Candidate::Kind;

PlacementRequest Request(int wanted, int min = 1, int stages = 1) {
  PlacementRequest request;
  request.world_wanted = wanted;
  request.world_min = min;
  request.pipeline_stages = stages;
  return request;
}

TEST(PlacementTest, AFirstPlanUsesFreeDevicesInOrderOfTheirNames) {
  PlacementRequest request = Request(2);
  request.candidates = {At(Kind::kFreeDevice, "b"), At(Kind::kFreeDevice, "a"), At(Kind::kFreeDevice, "c")};
  const PlacementResult result = Place(request);
  ASSERT_TRUE(result.placement);
  EXPECT_EQ(result.placement->reason, Reason::kJobStarted);
  EXPECT_EQ(result.placement->ranks[0].server.value, "a");
  EXPECT_EQ(result.placement->ranks[1].server.value, "b");
}

TEST(PlacementTest, PrefersAWarmStandbyThenTheSamePlaceThenASpare) {
  PlacementRequest request = Request(2);
  request.incumbents = {Member(0, "a")};
  request.lost = {Lost(1, "b")};
  request.candidates = {At(Kind::kFreeDevice, "d"), At(Kind::kFreedInPlace, "b"), At(Kind::kReadyStandby, "c")};
  EXPECT_EQ(Place(request).placement->reason, Reason::kStandbyPromoted);
  EXPECT_EQ(Place(request).placement->ranks[1].process, ProcessId(7));
  request.candidates.pop_back();
  EXPECT_EQ(Place(request).placement->reason, Reason::kRestartedInPlace);
  request.candidates.pop_back();
  EXPECT_EQ(Place(request).placement->reason, Reason::kSpareTaken);
  EXPECT_FALSE(Place(request).placement->alternatives.empty());
}

TEST(PlacementTest, PrefersTheSameModelThenTheSameDomain) {
  PlacementRequest request = Request(2);
  request.incumbents = {Member(0, "a")};
  request.lost = {Lost(1, "b", "rack1", "H200")};
  request.candidates = {At(Kind::kFreeDevice, "c", "rack1", "H100"), At(Kind::kFreeDevice, "d", "rack2", "H200"),
                        At(Kind::kFreeDevice, "e", "rack1", "H200")};
  EXPECT_EQ(Place(request).placement->ranks[1].server.value, "e");
  request.candidates.pop_back();
  EXPECT_EQ(Place(request).placement->ranks[1].server.value, "d");
}

TEST(PlacementTest, WithoutASpareItShrinksAndSaysSo) {
  PlacementRequest request = Request(3, 2);
  request.incumbents = {Member(0, "a"), Member(2, "c")};
  request.lost = {Lost(1, "b")};
  const PlacementResult result = Place(request);
  ASSERT_TRUE(result.placement);
  EXPECT_EQ(result.placement->reason, Reason::kJobShrunk);
  EXPECT_EQ(result.placement->ranks.size(), 2u);
  EXPECT_EQ(result.placement->ranks[0].server.value, "a") << "who can keep its rank keeps it";
  EXPECT_EQ(result.placement->ranks[1].server.value, "c");
}

TEST(PlacementTest, RefusesBelowTheMinimumWithTheNumbers) {
  PlacementRequest request = Request(4, 3);
  request.incumbents = {Member(0, "a")};
  request.candidates = {At(Kind::kFreeDevice, "b")};
  const PlacementResult result = Place(request);
  EXPECT_FALSE(result.placement);
  EXPECT_EQ(result.refusal, "2 devices are healthy and free for this job, 1 survivors among them; it needs at least 3");
}

TEST(PlacementTest, APipelineShrinksByWholeReplicasAndShardsStayWithTheirHolders) {
  PlacementRequest request = Request(4, 2, 2);
  request.incumbents = {Member(1, "b", 1), Member(2, "c", 0), Member(3, "d", 1)};
  request.lost = {Lost(0, "a")};
  const PlacementResult result = Place(request);
  ASSERT_TRUE(result.placement);
  ASSERT_EQ(result.placement->ranks.size(), 2u);
  EXPECT_EQ(result.placement->ranks[0].server.value, "c") << "rank 0's shard is held by old rank 2";
  EXPECT_EQ(result.placement->ranks[1].server.value, "b");
}

TEST(PlacementTest, TheOnlyHolderOfAShardIsSeatedBeforeAnIncumbentWithoutIt) {
  PlacementRequest request = Request(4, 2, 2);
  request.incumbents = {Member(0, "a", 0, false), Member(1, "b", 1), Member(2, "c", 0, true)};
  const PlacementResult result = Place(request);
  ASSERT_TRUE(result.placement);
  ASSERT_EQ(result.placement->ranks.size(), 2u);
  EXPECT_EQ(result.placement->ranks[0].server.value, "c");
}

TEST(PlacementTest, HoldsItsPromisesForAnyRequestInAnyOrder) {
  for (uint64_t seed = 1; seed <= 5000; ++seed) {
    Prng prng(seed);
    const auto stages = static_cast<int32_t>(prng.Between(1, 3));
    const auto replicas = static_cast<int32_t>(prng.Between(1, 4));
    PlacementRequest request = Request(stages * replicas, static_cast<int32_t>(prng.Between(1, stages * replicas)), stages);
    for (int rank = 0; rank < stages * replicas; ++rank) {
      const std::string server = fmt::format("s{:02}", rank);
      if (prng.Chance(2, 3)) request.incumbents.push_back(Member(rank, server, rank % stages, prng.Chance(3, 4)));
      else if (prng.Chance(1, 2)) request.lost.push_back(Lost(rank, server, "r", "cpu"));
    }
    for (uint64_t i = prng.UpTo(6); i > 0; --i) {
      Candidate c = At(static_cast<Kind>(prng.UpTo(4)), fmt::format("t{:02}", i), prng.Chance(1, 2) ? "r" : "q");
      if (c.process.value != 0) c.process = ProcessId(1000 + i);
      request.candidates.push_back(c);
    }
    const PlacementResult result = Place(request);
    const auto available = static_cast<int32_t>(request.incumbents.size() + request.candidates.size());
    const int32_t world = std::min(available, request.world_wanted) / stages * stages;
    ASSERT_EQ(result.placement.has_value(), world > 0 && world >= request.world_min) << "seed " << seed;
    if (!result.placement) {
      ASSERT_FALSE(result.refusal.empty());
      continue;
    }
    const Placement& p = *result.placement;
    ASSERT_EQ(static_cast<int32_t>(p.ranks.size()), world) << "seed " << seed;
    std::set<std::pair<ServerId, DeviceIndex>> devices;
    std::multiset<int> kinds;
    for (int32_t rank = 0; rank < world; ++rank) {
      const PlacedRank& r = p.ranks[static_cast<size_t>(rank)];
      ASSERT_EQ(r.rank, Rank(rank));
      ASSERT_EQ(r.pp, rank % stages);
      ASSERT_EQ(r.dp, rank / stages);
      ASSERT_TRUE(devices.insert({r.server, r.device}).second) << "seed " << seed << ": a device twice";
      if (!r.incumbent) kinds.insert(static_cast<int>(r.kind));
    }
    // Nobody that holds the state is left out while its shard is seated by those without.
    for (int32_t shard = 0; shard < stages; ++shard) {
      bool exists = false, seated = false;
      for (const Incumbent& i : request.incumbents) {
        if (i.shard.value != shard || !i.source) continue;
        exists = true;
        for (const PlacedRank& r : p.ranks) seated |= r.incumbent && r.process == i.process && r.pp == shard;
      }
      ASSERT_EQ(exists, seated) << "seed " << seed << ": shard " << shard << " lost its holder";
    }
    // An incumbent whose rank exists keeps it, unless its shard's only holder needed the seat.
    for (const Incumbent& i : request.incumbents) {
      if (i.rank.value >= world || !i.source) continue;
      ASSERT_EQ(p.ranks[static_cast<size_t>(i.rank.value)].process, i.process) << "seed " << seed;
    }
    // The order in which things are listed changes nothing.
    PlacementRequest shuffled = request;
    std::reverse(shuffled.candidates.begin(), shuffled.candidates.end());
    std::reverse(shuffled.incumbents.begin(), shuffled.incumbents.end());
    const Placement again = *Place(shuffled).placement;
    for (size_t rank = 0; rank < p.ranks.size(); ++rank) {
      ASSERT_EQ(again.ranks[rank].server, p.ranks[rank].server) << "seed " << seed;
      ASSERT_EQ(again.ranks[rank].process, p.ranks[rank].process) << "seed " << seed;
    }
    // Other names, the same kinds of devices.
    PlacementRequest renamed = request;
    for (Candidate& c : renamed.candidates) c.server = ServerId("z" + std::string(c.server.value.rbegin(), c.server.value.rend()));
    std::multiset<int> renamed_kinds;
    const Placement other = *Place(renamed).placement;
    for (const PlacedRank& r : other.ranks) {
      if (!r.incumbent) renamed_kinds.insert(static_cast<int>(r.kind));
    }
    ASSERT_EQ(kinds, renamed_kinds) << "seed " << seed;
  }
}

TEST(EqualSharesTest, AreContiguousCompleteAndDifferByOneAtMost) {
  for (int32_t batches = 0; batches <= 40; ++batches) {
    for (int32_t replicas = 1; replicas <= 12; ++replicas) {
      const std::vector<Share> shares = EqualShares(batches, replicas);
      ASSERT_EQ(static_cast<int32_t>(shares.size()), replicas);
      int32_t next = 0, least = batches, most = 0;
      for (const Share& share : shares) {
        ASSERT_EQ(share.first, next);
        next += share.count;
        least = std::min(least, share.count);
        most = std::max(most, share.count);
      }
      ASSERT_EQ(next, batches);
      ASSERT_LE(most - least, 1);
    }
  }
}

}  // namespace
}  // namespace everstep
