// The fixed seeds: clusters of 32 to 256 servers for ten minutes with faults throughout, small ones struck in the middle of
// every step, and every seed that once showed a bug (seeds.txt). EVERSTEP_SIM_SEED=N runs one of a suite alone;
// sim_run --profile small|large --seed N --trace prints its conversation.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "controller/sim/run.h"

namespace everstep::sim {
namespace {

const char* NameOf(Profile profile) { return profile == Profile::kLarge ? "large" : "small"; }

void ExpectClean(const RunReport& report, Profile profile) {
  for (const Violation& v : report.violations) {
    ADD_FAILURE() << "seed " << report.seed << " " << v.checker << ": " << v.what << "\n  " << report.options
                  << "\n  repeat: sim_run --profile " << NameOf(profile) << " --seed " << report.seed << " --trace";
  }
}

// Runs [first, last] and prints what was struck. Each suite is cut in two, so that both processors run one.
void RunSeeds(Profile profile, uint64_t first, uint64_t last, int median_least) {
  const char* only = std::getenv("EVERSTEP_SIM_SEED");
  std::vector<int> faults;
  std::map<std::string, int> kinds;
  int64_t steps = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    if (only != nullptr && std::to_string(seed) != only) continue;
    const RunReport report = RunSeed(seed, profile);
    ExpectClean(report, profile);
    faults.push_back(report.faults);
    steps += report.steps;
    for (const auto& [kind, count] : report.fault_counts) kinds[kind] += count;
  }
  if (faults.empty()) return;
  std::sort(faults.begin(), faults.end());
  const int median = faults[faults.size() / 2];
  std::printf("%zu seeds, median %d faults a seed (%d to %d), %lld steps\n", faults.size(), median, faults.front(),
              faults.back(), static_cast<long long>(steps));
  for (const auto& [kind, count] : kinds) std::printf("  %-24s %d\n", kind.c_str(), count);
  EXPECT_GE(median, median_least);
}

TEST(Seeds, LargeClustersForTenMinutesFirstHalf) { RunSeeds(Profile::kLarge, 1, 100, 5); }
TEST(Seeds, LargeClustersForTenMinutesSecondHalf) { RunSeeds(Profile::kLarge, 101, 200, 5); }
TEST(Seeds, SmallClustersStruckInTheMiddleOfSteps) { RunSeeds(Profile::kSmall, 1, 400, 5); }

TEST(Seeds, SameSeedGivesTheSameTrace) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(RunSeed(seed, Profile::kSmall).trace_hash, RunSeed(seed, Profile::kSmall).trace_hash) << "small " << seed;
  }
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(RunSeed(seed, Profile::kLarge).trace_hash, RunSeed(seed, Profile::kLarge).trace_hash) << "large " << seed;
  }
}

// "profile seed what it showed", one a line.
TEST(Seeds, EachSeedThatOnceShowedABugIsClean) {
  std::ifstream file(EVERSTEP_SOURCE_DIR "/tests/sim/seeds.txt");
  ASSERT_TRUE(file.good());
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string profile;
    uint64_t seed = 0;
    if (!(words >> profile >> seed) || profile[0] == '#') continue;
    const Profile p = profile == "large" ? Profile::kLarge : Profile::kSmall;
    ExpectClean(RunSeed(seed, p), p);
    ++count;
  }
  EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace everstep::sim
