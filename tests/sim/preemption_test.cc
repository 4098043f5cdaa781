// The recorded spot preemptions of 64 nodes (shared/traces beside the checkout), minute by second: servers come and go as
// they did, and the job steps on.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

TEST(World, JobLivesThroughRecordedPreemptions) {
  std::ifstream file(EVERSTEP_SOURCE_DIR "/../shared/traces/aws-p3-spot.csv");
  if (!file) {
    std::printf("skipped: shared/traces/aws-p3-spot.csv is not beside the checkout\n");
    SUCCEED();
    return;
  }
  struct Entry { int64_t milliseconds; bool add; std::string node; };
  std::vector<Entry> entries;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string at, verb, node;
    if (std::getline(fields, at, ',') && std::getline(fields, verb, ',') && std::getline(fields, node, ',')) {
      entries.push_back({std::stoll(at), verb == "add", node});
    }
  }
  ASSERT_GT(entries.size(), 100u);
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.milliseconds < b.milliseconds; });
  // One recorded minute takes a second here, so that a test sees hours.
  constexpr int64_t kFaster = 60;
  WorldOptions options;
  options.seed = 64;
  options.compute_min = Milliseconds(80);
  options.compute_max = Milliseconds(120);
  options.snapshot_every = 5;
  options.replay_check_every = 16;
  World world(options);
  std::set<std::string> known;
  size_t i = 0;
  for (; i < entries.size() && entries[i].milliseconds == entries[0].milliseconds; ++i) {
    if (known.insert(entries[i].node).second) world.AddServer(entries[i].node);
  }
  world.RunFor(Milliseconds(100));
  JobSpec spec;
  spec.name = "spot";
  spec.program = "/bin/train";
  spec.servers_wanted = 24;
  spec.servers_min = 4;
  spec.micro_batch_count = 48;
  spec.persist_interval_steps = 20;
  spec.standbys_wanted = 2;
  const JobUid job = world.Submit(spec, 1000000);
  const Instant start = world.now();
  int losses = 0;
  for (; i < entries.size(); ++i) {
    if (entries.size() - i <= 63) break;  // the end of the recording tears everything down
    const Instant at = start + Milliseconds(entries[i].milliseconds / kFaster);
    if (at > world.now()) world.RunFor(at - world.now());
    if (entries[i].add) {
      if (known.insert(entries[i].node).second) world.AddServer(entries[i].node);
      else world.StartServer(entries[i].node);
    } else if (known.contains(entries[i].node)) {
      world.KillServer(entries[i].node);
      ++losses;
    }
  }
  world.RunFor(Seconds(10));
  for (const Violation& v : world.violations()) ADD_FAILURE() << v.checker << ": " << v.what;
  const auto view = world.ViewOf(job);
  ASSERT_TRUE(view.has_value());
  std::printf("%d losses in %.0f s, %lld steps on the chain of %lld voted, %llu generations\n", losses,
              ToSeconds(world.now() - start), static_cast<long long>(view->step.value),
              static_cast<long long>(world.steps_passed(job)), static_cast<unsigned long long>(view->entry.fenced.value));
  EXPECT_GT(losses, 50);
  EXPECT_EQ(view->state, JobState::kRunning);
  EXPECT_GT(view->step.value, 100);
}

}  // namespace
}  // namespace everstep::sim
