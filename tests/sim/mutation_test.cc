// A checker that never fires is not a checker: each deliberate mistake (proto/base/mutation.h, and those of the simulated
// shells) must be caught by some checker within a bounded number of seeds. Linked with cores that have them compiled in.
#include <cstdio>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "controller/sim/run.h"
#include "proto/base/mutation.h"

namespace everstep::sim {
namespace {

constexpr uint64_t kSeedsMax = 600;

struct Mistake {
  const char* name;
  const char* text;
  Mutation core = Mutation::kNone;
  ShellMistake shell = ShellMistake::kNone;
};
std::ostream& operator<<(std::ostream& out, const Mistake& mistake) { return out << mistake.text; }

// Most hosts lose power and stay away for two minutes: what the checkers say about that.
std::string TrueMassLoss() {
  WorldOptions options;
  options.seed = 9;
  World world(options);
  for (int i = 1; i <= 9; ++i) world.AddServer("s" + std::to_string(i));
  world.RunFor(Seconds(20));
  for (int i = 1; i <= 6; ++i) {
    world.Cut("s" + std::to_string(i), true);
    world.KillServer("s" + std::to_string(i));
  }
  world.RunFor(Seconds(120));
  return world.violations().empty() ? "" : world.violations()[0].checker + ": " + world.violations()[0].what;
}

class Caught : public ::testing::TestWithParam<Mistake> {};

TEST_P(Caught, WithinABoundedNumberOfSeeds) {
  const Mistake& mistake = GetParam();
  RunSettings settings;
  settings.mistake = mistake.shell;
  g_mutation = mistake.core;
  std::string by;
  uint64_t seed = 1;
  if (mistake.core == Mutation::kNeverReleaseBrake) by = TrueMassLoss();  // takes longer than a small run lasts
  for (; seed <= kSeedsMax && by.empty(); ++seed) {
    const RunReport report = RunSeed(seed, Profile::kSmall, settings);
    if (!report.violations.empty()) by = report.violations[0].checker + ": " + report.violations[0].what;
  }
  g_mutation = Mutation::kNone;
  EXPECT_FALSE(by.empty()) << "nothing notices that " << mistake.text;
  std::printf("%s: caught by seed %llu: %s\n", mistake.name, static_cast<unsigned long long>(seed - 1), by.c_str());
}

const std::vector<Mistake> kMistakes = [] {
  std::vector<Mistake> mistakes = {
#define EVERSTEP_MISTAKE(name, text) {#name, text, Mutation::k##name},
      EVERSTEP_MUTATION_LIST(EVERSTEP_MISTAKE)
#undef EVERSTEP_MISTAKE
      {"TellBeforePersist", "commands leave before their records are durable", Mutation::kNone, ShellMistake::kTellBeforePersist},
      {"StaleVoteBuffer", "a vote counts the ballot of the step before", Mutation::kNone, ShellMistake::kStaleVoteBuffer},
      {"ForgetDiscard", "a discarded step leaves its random numbers drawn", Mutation::kNone, ShellMistake::kForgetDiscard},
  };
  // A second guard makes these two harmless: whoever is left out is killed again when it is left over, and a state off the
  // chain is no source even when a copy of it is listed. They stay for whoever removes that guard.
  const std::set<std::string> guarded = {"AcceptOffChain", "KeepExcluded"};
  std::erase_if(mistakes, [&](const Mistake& m) { return guarded.contains(m.name); });
  return mistakes;
}();
INSTANTIATE_TEST_SUITE_P(Mistakes, Caught, ::testing::ValuesIn(kMistakes),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Mistakes, NoneIsOnByDefault) {
  EXPECT_EQ(TrueMassLoss(), "");
  for (uint64_t seed = 1; seed <= 20; ++seed) EXPECT_TRUE(RunSeed(seed, Profile::kSmall).violations.empty()) << seed;
}

}  // namespace
}  // namespace everstep::sim
