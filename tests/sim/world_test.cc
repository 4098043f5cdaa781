// Scripted worlds: what one fault, struck at a named moment, leads to. A failing case prints its seed; its trace is
// printed with EVERSTEP_SIM_TRACE=1.
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

void ExpectClean(World& world, uint64_t seed) {
  for (const Violation& v : world.violations()) ADD_FAILURE() << "seed " << seed << ": " << v.checker << ": " << v.what;
  if (::testing::Test::HasFailure() && std::getenv("EVERSTEP_SIM_TRACE")) {
    for (const std::string& line : world.trace()) std::fprintf(stderr, "%s\n", line.c_str());
  }
}

void ExpectFinished(World& world, const JobUid& job, uint64_t seed) {
  EXPECT_TRUE(world.RunUntil([&] { return world.Succeeded(job); }, Seconds(300))) << "seed " << seed;
  world.RunFor(Seconds(15));
  world.CheckEnd();
  ExpectClean(world, seed);
}

TEST(World, JobTrainsToTheEndWithoutFaults) {
  auto world = Cluster(1, 5);
  const JobUid job = world->Submit(Spec("train", 4, 2), 20);
  ExpectFinished(*world, job, 1);
  EXPECT_EQ(world->final_contents().at(job), Content(20, 1));
}

TEST(World, OpaqueJobIsStartedAgainAndEnds) {
  auto world = Cluster(5, 4);
  JobSpec spec = Spec("script", 2, 2);
  spec.opaque = true;
  const JobUid job = world->Submit(spec, 50);
  world->RunFor(Milliseconds(300));
  RankNode* rank = world->Member(job, 0);
  ASSERT_NE(rank, nullptr);
  world->KillProcess(rank->id);
  ExpectFinished(*world, job, 5);
}

// A rank is killed at each moment of a step and of its recovery.
class KillAtMoment : public ::testing::TestWithParam<const char*> {};

TEST_P(KillAtMoment, NoStepIsLostOrAppliedTwice) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    auto world = Cluster(seed, 6);
    const JobUid job = world->Submit(Spec("train", 4, 2), 30);
    int kills = 0;
    world->on_moment = [&](const std::string& what, const RankNode& rank) {
      if (what != GetParam() || kills >= 3 || rank.rank != static_cast<int>(seed % 4)) return;
      if (rank.memory.size() < 5u + 7u * static_cast<size_t>(kills)) return;
      ++kills;
      world->KillProcess(rank.id);
    };
    ExpectFinished(*world, job, seed);
    EXPECT_GE(kills, 1) << "seed " << seed;
    if (HasFailure()) return;
    EXPECT_EQ(world->final_contents().at(job).size(), 30u);
  }
}
INSTANTIATE_TEST_SUITE_P(Moments, KillAtMoment,
                         ::testing::Values("computing", "reducing", "reduced", "voting", "applying", "applied"));

// A rank is stopped there, is left out of the decision set, and wakes when it has long been replaced.
class StopAtMoment : public ::testing::TestWithParam<const char*> {};

TEST_P(StopAtMoment, TheWokenRankChangesNothing) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    auto world = Cluster(seed, 6);
    const JobUid job = world->Submit(Spec("train", 4, 2), 40);
    std::optional<ProcessId> stopped;
    world->on_moment = [&](const std::string& what, const RankNode& rank) {
      if (what != GetParam() || stopped || rank.rank != 2 || rank.memory.size() < 8) return;
      stopped = rank.id;
      world->StopRank(rank.id);
    };
    world->RunUntil([&] { return stopped.has_value(); }, Seconds(30));
    ASSERT_TRUE(stopped.has_value());
    world->KillRank(job, 0);
    world->RunUntil([&] { return world->ViewOf(job)->entry.resumed.value >= 2; }, Seconds(60));
    world->WakeRank(*stopped);
    ExpectFinished(*world, job, seed);
    if (HasFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(Moments, StopAtMoment,
                         ::testing::Values("computing", "reducing", "reduced", "voting", "applying", "applied"));

// The controller is killed at each of the first 120 effects of a recovery.
TEST(World, ControllerMayDieAtEveryEffectBoundary) {
  for (int64_t effect = 1; effect <= 120; ++effect) {
    auto world = Cluster(static_cast<uint64_t>(effect), 6, 2);
    const JobUid job = world->Submit(Spec("train", 4, 2, effect % 2 == 0 ? 2 : 1), 60);
    world->RunUntil([&] { return world->steps_passed(job) >= 10; }, Seconds(30));
    world->CrashControllerIn(effect);
    world->KillServer(world->Member(job, 1)->server.value);
    world->RunUntil([&] { return !world->controller_up(); }, Seconds(20));
    world->RunFor(Milliseconds(300));
    world->StartController();
    ExpectFinished(*world, job, static_cast<uint64_t>(effect));
    if (HasFailure()) return;
  }
}

// So is an agent, and it is stopped there, too.
TEST(World, AgentMayDieOrStopAtEveryEffectBoundary) {
  for (int64_t effect = 1; effect <= 40; ++effect) {
    auto world = Cluster(static_cast<uint64_t>(effect) + 1000, 6, 2);
    const JobUid job = world->Submit(Spec("train", 4, 2), 60);
    world->RunUntil([&] { return world->steps_passed(job) >= 10; }, Seconds(30));
    const std::string server = world->Member(job, 2)->server.value;
    if (effect % 2 == 0) {
      world->CrashAgentIn(server, effect / 2);
    } else {
      world->StopAgentIn(server, (effect + 1) / 2);
    }
    world->KillRank(job, 1);
    world->RunFor(Seconds(4));
    world->WakeServer(server);
    world->StartServer(server);
    ExpectFinished(*world, job, static_cast<uint64_t>(effect));
    if (HasFailure()) return;
  }
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
  ExpectClean(*world, 11);
}

TEST(World, LedgerRestoredFromABackupGoesOnAboveWhatItsAgentsReport) {
  auto world = Cluster(21, 6);
  const JobUid job = world->Submit(Spec("train", 4, 2), 200);
  world->RunUntil([&] { return world->steps_passed(job) >= 5; }, Seconds(30));
  world->BackUpLedger();
  for (int i = 0; i < 3; ++i) {
    world->KillRank(job, i);
    const uint64_t next = world->ViewOf(job)->entry.resumed.value + 1;
    ASSERT_TRUE(world->RunUntil([&] { return world->ViewOf(job)->entry.resumed.value >= next; }, Seconds(30)));
  }
  const uint64_t before = world->ViewOf(job)->entry.fenced.value;
  world->KillController();
  world->RestoreLedger();
  world->StartController();
  ASSERT_TRUE(world->RunUntil([&] { return world->ViewOf(job)->entry.resumed.value > before; }, Seconds(60)));
  EXPECT_TRUE(world->marks().contains("Ledger is behind an agent"));
  ExpectFinished(*world, job, 21);
}

TEST(World, TrueMassLossEndsInRecoveryNotInAFreeze) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    auto world = Cluster(seed, 9, 1);
    JobSpec spec = Spec("train", 4, 2);
    spec.persist_interval_steps = 2;
    const JobUid job = world->Submit(spec, 400);
    world->RunUntil([&] { return world->steps_passed(job) >= 20; }, Seconds(30));
    // Hosts and all, at one instant: nobody is left who could refuse a connection.
    for (int i = 1; i <= 6; ++i) {
      world->Cut("s" + std::to_string(i), true);
      world->KillServer("s" + std::to_string(i));
    }
    EXPECT_TRUE(world->RunUntil([&] { return !world->View().frozen && world->View().servers.size() >= 9 &&
                                             world->ViewOf(job)->state != JobState::kRunning; }, Seconds(60))) << seed;
    for (int i = 1; i <= 6; ++i) world->Link("s" + std::to_string(i), {});
    for (int i = 1; i <= 6; ++i) world->StartServer("s" + std::to_string(i));
    ExpectFinished(*world, job, seed);
    if (HasFailure()) return;
  }
}

TEST(World, CheckpointsAdvanceUnderPeriodicFailures) {
  auto world = Cluster(31, 6, 2);
  JobSpec spec = Spec("train", 4, 2);
  spec.persist_interval_steps = 4;
  const JobUid job = world->Submit(spec, 1000000);
  int64_t newest = 0;
  int advances = 0;
  for (int round = 0; round < 20; ++round) {
    world->RunFor(Milliseconds(400));
    world->KillRank(job, round % 4);
    const auto view = world->ViewOf(job);
    if (view->entry.manifests.empty() || view->entry.manifests.back().state.step.value <= newest) continue;
    newest = view->entry.manifests.back().state.step.value;
    ++advances;
  }
  EXPECT_GE(advances, 10);
  ExpectClean(*world, 31);
}

}  // namespace
}  // namespace everstep::sim
