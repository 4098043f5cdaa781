// The three real cores joined in memory: jobs train through every kind of fault, and end where an uninterrupted run
// ends. A failing case prints its seed; repeat it alone with EVERSTEP_SIM_SEED=N, and
// EVERSTEP_SIM_TRACE=1 for its whole conversation.
#include "controller/sim/world.h"

#include <cstdlib>

#include <gtest/gtest.h>

namespace everstep::sim {
namespace {

JobSpec Spec(const std::string& name, int servers, int min, int stages = 1) {
  JobSpec spec;
  spec.name = name;
  spec.program = "/bin/train";
  spec.servers_wanted = servers;
  spec.servers_min = min;
  spec.pipeline_stages = stages;
  spec.micro_batch_count = 8;
  return spec;
}

std::unique_ptr<World> Cluster(uint64_t seed, int servers, int64_t snapshot_every = 0) {
  WorldOptions options;
  options.seed = seed;
  options.snapshot_every = snapshot_every;
  auto world = std::make_unique<World>(options);
  world->KeepTrace(true);
  for (int i = 1; i <= servers; ++i) world->AddServer("s" + std::to_string(i));
  return world;
}

void ExpectClean(World& world, const JobUid& job, uint64_t seed) {
  const bool succeeded = world.Succeeded(job);
  for (const Violation& v : world.violations()) ADD_FAILURE() << "seed " << seed << ": " << v.what;
  EXPECT_TRUE(succeeded) << "seed " << seed << ": the job did not finish";
  if ((!succeeded || !world.violations().empty()) && std::getenv("EVERSTEP_SIM_TRACE")) {
    for (const std::string& line : world.trace()) std::fprintf(stderr, "%s\n", line.c_str());
  }
}

TEST(World, JobTrainsToTheEndWithoutFaults) {
  auto world = Cluster(1, 5);
  const JobUid job = world->Submit(Spec("train", 4, 2), 20);
  world->RunUntil([&] { return world->Succeeded(job); }, Seconds(60));
  ExpectClean(*world, job, 1);
  EXPECT_EQ(world->final_contents().at(job), Content(20, 1));
}

// A rank is killed at each moment of a step and of its recovery.
class KillAtMoment : public ::testing::TestWithParam<const char*> {};

TEST_P(KillAtMoment, NoStepIsLostOrAppliedTwice) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    auto world = Cluster(seed, 6);
    const JobUid job = world->Submit(Spec("train", 4, 2), 30);
    int kills = 0;
    world->on_moment = [&](const std::string& what, const RankNode* rank) {
      if (what != GetParam() || kills >= 3 || rank->rank != static_cast<int>(seed % 4)) return;
      if (rank->memory.size() < 5u + 7u * static_cast<size_t>(kills)) return;
      ++kills;
      world->KillRank(job, rank->rank);
    };
    world->RunUntil([&] { return world->Succeeded(job); }, Seconds(120));
    ExpectClean(*world, job, seed);
    EXPECT_GE(kills, 1) << "seed " << seed;
    if (HasFailure()) return;
    EXPECT_EQ(world->final_contents().at(job).size(), 30u);
  }
}
INSTANTIATE_TEST_SUITE_P(Moments, KillAtMoment,
                         ::testing::Values("computing", "reducing", "reduced", "voting", "applying", "applied"));

TEST(World, SameSeedGivesTheSameTrace) {
  uint64_t hashes[2];
  for (uint64_t& hash : hashes) {
    auto world = Cluster(7, 6, 3);
    const JobUid job = world->Submit(Spec("train", 4, 2), 40);
    world->RunUntil([&] { return world->ViewOf(job)->step.value > 10; }, Seconds(60));
    world->KillServer("s2");
    world->RunUntil([&] { return world->Succeeded(job); }, Seconds(60));
    hash = world->trace_hash();
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(World, ShrunkenJobGrowsBeforeAnotherGetsAStandby) {
  auto world = Cluster(11, 5);
  JobSpec steady = Spec("steady", 1, 1);
  steady.priority = 5;
  const JobUid shrunken = world->Submit(Spec("shrunken", 3, 2), 100000);
  const JobUid job = world->Submit(steady, 100000);
  ASSERT_TRUE(world->RunUntil([&] {
    const auto a = world->ViewOf(shrunken), b = world->ViewOf(job);
    return a->state == JobState::kRunning && a->world_size == 3 && b->state == JobState::kRunning;
  }, Seconds(20)));
  const std::string first = world->Member(shrunken, 1)->server.value, second = world->Member(shrunken, 2)->server.value;
  world->KillServer(first);
  world->KillServer(second);
  ASSERT_TRUE(world->RunUntil([&] {
    const auto a = world->ViewOf(shrunken);
    return a->state == JobState::kRunning && a->world_size == 2;
  }, Seconds(20)));
  world->StartServer(first);  // the only free device: a rank of the one job, or a standby of the other
  EXPECT_TRUE(world->RunUntil([&] { return world->ViewOf(shrunken)->world_size == 3; }, Seconds(20)));
  for (const Violation& v : world->violations()) ADD_FAILURE() << v.what;
}

// Random faults of every kind, then a healed cluster: the job must finish, on the chain, step by step.
class RandomFaults : public ::testing::TestWithParam<uint64_t> {};

TEST_P(RandomFaults, AreSurvived) {
  const char* only = std::getenv("EVERSTEP_SIM_SEED");
  for (uint64_t seed = GetParam() * 40; seed < (GetParam() + 1) * 40; ++seed) {
    if (only != nullptr && std::to_string(seed) != only) continue;
    const int stages = seed % 3 == 0 ? 2 : 1;
    auto world = Cluster(seed, 7, seed % 2 == 0 ? 1 : 0);
    const JobUid job = world->Submit(Spec("train", 4, 2, stages), 150);
    Prng& random = world->faults();
    int faults = 0;
    std::set<std::string> down, stopped, cut;
    for (int round = 0; round < 14 && !world->Succeeded(job); ++round) {
      world->RunFor(Milliseconds(random.Between(1, 400)));
      const std::string server = "s" + std::to_string(random.Between(1, 7));
      switch (random.UpTo(9)) {
        case 0: case 1: world->KillRank(job, static_cast<int32_t>(random.UpTo(3))); break;
        case 2: case 3: if (down.size() < 2) { world->KillServer(server); down.insert(server); } break;
        case 4: if (stopped.size() < 1) { world->StopServer(server); stopped.insert(server); } break;
        case 5: for (const auto& s : stopped) world->WakeServer(s); stopped.clear(); break;
        case 6: for (const auto& s : down) world->StartServer(s); down.clear(); break;
        case 7: if (world->controller_up()) { world->KillController(); world->RunFor(Milliseconds(random.Between(1, 900))); world->StartController(); } break;
        case 8: if (cut.size() < 1) { world->CutServer(server, true); cut.insert(server); } break;
        case 9: for (const auto& s : cut) world->CutServer(s, false); cut.clear(); break;
      }
      ++faults;
    }
    for (const auto& s : stopped) world->WakeServer(s);
    for (const auto& s : cut) world->CutServer(s, false);
    for (int i = 1; i <= 7; ++i) world->StartServer("s" + std::to_string(i));
    world->RunUntil([&] { return world->Succeeded(job); }, Seconds(120));
    ExpectClean(*world, job, seed);
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, RandomFaults, ::testing::Range<uint64_t>(0, 10));

}  // namespace
}  // namespace everstep::sim
