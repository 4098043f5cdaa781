#include "checkpoint/core/placement.h"

#include <gtest/gtest.h>

namespace everstep::checkpoint {
namespace {

PlacementCandidate Server(const char* name, const char* domain, uint64_t held = 0, uint64_t bytes_free = 100) {
  return {ServerId(name), domain, bytes_free, held};
}

TEST(Placement, PrefersAnotherFailureDomain) {
  EXPECT_EQ(PlaceCopies(Server("s0", "a"), {Server("s1", "a"), Server("s2", "b", 50)}, 10, 1),
            (std::vector<Placement>{{ServerId("s2"), true}}));
}

TEST(Placement, FallsBackToTheSameDomainAndSaysSo) {
  EXPECT_EQ(PlaceCopies(Server("s0", "a"), {Server("s0", "a"), Server("s1", "a")}, 10, 2),
            (std::vector<Placement>{{ServerId("s1"), false}}));
}

TEST(Placement, SpreadsSeveralCopiesOverDomains) {
  EXPECT_EQ(PlaceCopies(Server("s0", "a"), {Server("s1", "b"), Server("s2", "b"), Server("s3", "c", 90)}, 10, 2),
            (std::vector<Placement>{{ServerId("s1"), true}, {ServerId("s3"), true}}));
}

TEST(Placement, LeavesOutServersWithoutRoom) {
  EXPECT_EQ(PlaceCopies(Server("s0", "a"), {Server("s1", "b", 0, 9), Server("s2", "c", 90)}, 10, 1),
            (std::vector<Placement>{{ServerId("s2"), true}}));
}

TEST(Placement, TakesTheLeastLoadedThenTheLowestName) {
  EXPECT_EQ(PlaceCopies(Server("s0", "a"), {Server("s3", "b", 5), Server("s2", "c", 1), Server("s1", "d", 1)}, 10, 3),
            (std::vector<Placement>{{ServerId("s1"), true}, {ServerId("s2"), true}, {ServerId("s3"), true}}));
}

TEST(Placement, TreatsUnknownDomainsAsOne) {
  EXPECT_EQ(PlaceCopies(Server("s0", ""), {Server("s1", "")}, 10, 1),
            (std::vector<Placement>{{ServerId("s1"), false}}));
}

}  // namespace
}  // namespace everstep::checkpoint
