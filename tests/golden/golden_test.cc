// Golden traces: each file holds a scenario, a line of dashes, and the whole conversation that the cores must lead. A
// changed rule shows as a changed conversation, and somebody reviews it. EVERSTEP_GOLDEN_UPDATE=1 writes the files anew.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "controller/sim/scenario.h"

namespace everstep::sim {
namespace {

constexpr const char* kDashes = "----\n";

std::vector<std::string> Files() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(EVERSTEP_GOLDEN_DIR)) {
    if (entry.path().extension() == ".txt" && entry.path().stem() != "CMakeLists") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, ConversationIsAsReviewed) {
  const std::string path = std::string(EVERSTEP_GOLDEN_DIR) + "/" + GetParam() + ".txt";
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t cut = text.find(kDashes);
  const std::string scenario = text.substr(0, cut);
  const std::string expected = cut == std::string::npos ? "" : text.substr(cut + std::string(kDashes).size());
  const Result<std::string> actual = RunScenario(scenario);
  ASSERT_TRUE(actual.ok()) << GetParam() << ".txt: " << actual.status().message();
  if (std::getenv("EVERSTEP_GOLDEN_UPDATE") != nullptr) {
    std::ofstream(path) << scenario << kDashes << *actual;
  } else if (expected != *actual) {
    std::istringstream a(expected), b(*actual);
    std::string was, is;
    int line = 0;
    do {
      ++line;
      was = is = "";
      std::getline(a, was);
      std::getline(b, is);
    } while (was == is && (a || b));
    ADD_FAILURE() << GetParam() << ".txt: the conversation differs from its line " << line << " on:\n  was " << was
                  << "\n  is  " << is << "\nEVERSTEP_GOLDEN_UPDATE=1 writes it anew; review the difference.";
  }
}
INSTANTIATE_TEST_SUITE_P(Files, Golden, ::testing::ValuesIn(Files()), [](const auto& info) { return info.param; });

TEST(Golden, ThereAreAtLeastTwentyFive) { EXPECT_GE(Files().size(), 25u); }

TEST(Golden, BadScenarioIsRefusedWithLineAndField) {
  EXPECT_EQ(RunScenario("servers four\n").status().message(), "line 1: servers: \"four\" is not a whole number");
  EXPECT_EQ(RunScenario("servers 2\nkill s9\n").status().message(), "line 2: kill: there is no server \"s9\"");
  EXPECT_EQ(RunScenario("servers 2\n\ndance\n").status().message(), "line 3: dance: is no command");
  EXPECT_EQ(RunScenario("job train\n").status().message(), "line 1: job: comes before `servers N`");
  EXPECT_EQ(RunScenario("servers 2\nfor 5\n").status().message(), "line 2: for: \"5\" is not a duration such as 500ms or 5s");
}

}  // namespace
}  // namespace everstep::sim
