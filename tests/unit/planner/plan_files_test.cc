// The files of `everstep plan`: what they mean, and in which words they are refused.
#include "controller/cli/plan_files.h"

#include <gtest/gtest.h>

namespace everstep::cli {
namespace {

const planner::Tables& Built() { return planner::BuiltInTables(); }

TEST(PlanFilesTest, QuantitiesHaveUnits) {
  EXPECT_DOUBLE_EQ(*ParseQuantity("400Gb/s", QuantityKind::kBandwidth), 50e9);
  EXPECT_DOUBLE_EQ(*ParseQuantity("25 GB/s", QuantityKind::kBandwidth), 25e9);
  EXPECT_DOUBLE_EQ(*ParseQuantity("80GiB", QuantityKind::kBytes), 80.0 * (1 << 30));
  EXPECT_DOUBLE_EQ(*ParseQuantity("5us", QuantityKind::kSeconds), 5e-6);
  EXPECT_DOUBLE_EQ(*ParseQuantity("1.3B", QuantityKind::kNumber), 1.3e9);
  for (const char* bad : {"", "fast", "400", "400Gbit", "nanGb/s", "1e999Gb/s"}) {
    EXPECT_FALSE(ParseQuantity(bad, QuantityKind::kBandwidth).ok()) << bad;
  }
}

TEST(PlanFilesTest, AClusterIsReadWithCountsRacksAndLinks) {
  const auto cluster = ReadCluster(R"(
servers:
  - {name: a, count: 6, device: H100, devices: 8, network: 3200Gb/s, rack: r, per_rack: 2, leaf: l, per_leaf: 4}
  - {name: old, device: A100-40, devices: 4, network: 400Gb/s, speed: 0.9, memory: 38GiB, failure_domain: room2}
network:
  spine: {bandwidth: 800Gb/s, latency: 12us}
links:
  - {a: a0, b: old, bandwidth: 1Gb/s, latency: 1ms}
)", "c.yaml");
  ASSERT_TRUE(cluster.ok()) << cluster.status().message();
  ASSERT_EQ(cluster->servers.size(), 7u);
  EXPECT_EQ(cluster->servers[5].id.value, "a5");
  EXPECT_EQ(cluster->servers[5].rack, "r2");
  EXPECT_EQ(cluster->servers[5].leaf, "l1");
  EXPECT_EQ(cluster->servers[5].failure_domain, "r2");
  EXPECT_EQ(cluster->servers[6].failure_domain, "room2");
  EXPECT_DOUBLE_EQ(cluster->servers[6].speed, 0.9);
  EXPECT_DOUBLE_EQ(cluster->spine.bandwidth, 100e9);
  ASSERT_EQ(cluster->links.size(), 1u);
  EXPECT_DOUBLE_EQ(cluster->links[0].latency, 1e-3);
}

TEST(PlanFilesTest, AJobIsReadFromTableOrNumbersOrProfile) {
  planner::Job named, numbers, profile;
  planner::ReplanInput replan;
  ASSERT_TRUE(ReadJob("{model: llama2-7b, global_batch: 128, recompute: selective, replan: {horizon: 2h, wait: 10m, "
                      "checkpoint_steps_behind: 20, warm: [s7]}}", "j.yaml", Built(), &named, &replan).ok());
  EXPECT_EQ(named.transformer.layers, 32);
  EXPECT_EQ(named.recompute, planner::Recompute::kSelective);
  EXPECT_DOUBLE_EQ(replan.horizon_seconds, 7200);
  EXPECT_DOUBLE_EQ(replan.wait_seconds, 600);
  ASSERT_EQ(replan.copies.size(), 1u);
  EXPECT_EQ(replan.copies[0].steps_behind, 20);
  EXPECT_EQ(replan.warm[0].value, "s7");
  ASSERT_TRUE(ReadJob("{transformer: {layers: 4, hidden: 256, heads: 8, ffn: 1024, vocabulary: 1000}, global_batch: 8}",
                      "j.yaml", Built(), &numbers, &replan).ok());
  EXPECT_EQ(numbers.transformer.kv_heads, 8);
  ASSERT_TRUE(ReadJob("{profile: [{forward: 1ms, backward: 2ms, parameters: 10M, output: 1MB, kept: 2MB, count: 5}], "
                      "global_batch: 8}", "j.yaml", Built(), &profile, &replan).ok());
  ASSERT_EQ(profile.profile.size(), 5u);
  EXPECT_DOUBLE_EQ(profile.profile[4].backward_seconds, 2e-3);
}

TEST(PlanFilesTest, ProblemsNameFileAndLine) {
  const std::pair<const char*, const char*> clusters[] = {
      {"servers:\n  - {name: a, devise: H100}\n", "c.yaml:2: unknown field \"devise\" of a server; did you mean \"device\"?"},
      {"servers:\n  - {device: H100}\n", "c.yaml:2: a server needs a name"},
      {"servers:\n  - {name: a, network: 400}\n", "c.yaml:2: \"400\" is not a number with one of the units"},
      {"servers: 4\n", "c.yaml:1: servers must be a list"},
      {"servers:\n  - {name: a, count: 99999999}\n", "c.yaml:2: count is 99999999; at most 16384 servers"},
      {"", "c.yaml: the file is empty"},
      {"servers: [}\n", "c.yaml:1: "}};
  for (const auto& [text, message] : clusters) {
    const auto cluster = ReadCluster(text, "c.yaml");
    ASSERT_FALSE(cluster.ok()) << text;
    EXPECT_NE(cluster.status().message().find(message), std::string::npos) << cluster.status().message();
  }
  const std::pair<const char*, const char*> jobs[] = {
      {"model: gpt5\n", "j.yaml:1: model \"gpt5\" is in no table; there are bert-large"},
      {"global_batch: many\n", "j.yaml:1: \"many\" is not a whole number"},
      {"precision: int8\n", "j.yaml:1: \"int8\" is not one of bf16, fp16, fp32"},
      {"shard_optimizer: maybe\n", "\"maybe\" is neither true nor false"},
      {"pinned: s1\n", "j.yaml:1: a list of names is expected"}};
  for (const auto& [text, message] : jobs) {
    planner::Job job;
    planner::ReplanInput replan;
    const Status status = ReadJob(text, "j.yaml", Built(), &job, &replan);
    ASSERT_FALSE(status.ok()) << text;
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  }
}

TEST(PlanFilesTest, AServerThatJoinsIsReadFromOneArgument) {
  planner::PlanServer like;
  like.network_bandwidth = 7e9;
  const auto added = ReadAddedServer("s9:H100:8", like);
  ASSERT_TRUE(added.ok());
  EXPECT_EQ(added->id.value, "s9");
  EXPECT_EQ(added->devices, 8);
  EXPECT_DOUBLE_EQ(added->network_bandwidth, 7e9);
  EXPECT_DOUBLE_EQ(ReadAddedServer("s9:H100:8:80Gb/s", like)->network_bandwidth, 10e9);
  for (const char* bad : {"", "s9", "s9:H100", "s9:H100:x", "s9:H100:8:80", "s9:H100:8:80Gb/s:more"}) {
    EXPECT_EQ(ReadAddedServer(bad, like).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace everstep::cli
