// Tables, validation and calibration: what is refused, and in which words.
#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "controller/core/planner/calibration.h"
#include "controller/core/planner/cost.h"
#include "controller/core/planner/tables.h"
#include "controller/core/planner/validate.h"

namespace everstep::planner {
namespace {

const Tables& Built() { return BuiltInTables(); }

Cluster Servers(int count) {
  Cluster cluster;
  for (int i = 0; i < count; ++i) {
    PlanServer s;
    s.id = ServerId("s" + std::to_string(i));
    s.device = "A100-80";
    s.devices = 8;
    s.network_bandwidth = 200e9;
    cluster.servers.push_back(s);
  }
  return cluster;
}
Job Named(const std::string& model) {
  Job job;
  job.name = model;
  job.transformer = *Built().FindModel(model);
  job.global_batch = 64;
  return job;
}

TEST(TablesTest, EveryBuiltInRowHasASourceAndNamesAreFound) {
  EXPECT_GE(Built().devices.size(), 14u);
  EXPECT_GE(Built().models.size(), 12u);
  for (const DeviceModel& d : Built().devices) EXPECT_FALSE(d.source.empty()) << d.name;
  for (const TransformerModel& m : Built().models) EXPECT_FALSE(m.source.empty()) << m.name;
  ASSERT_NE(Built().FindDevice("H100"), nullptr);
  EXPECT_DOUBLE_EQ(Built().FindDevice("H100")->half_flops, 989e12);
  EXPECT_EQ(Built().FindDevice("H99"), nullptr);
  EXPECT_EQ(Built().FindModel("nothing"), nullptr);
}

TEST(TablesTest, ParameterCountsEqualThePublishedOnes) {
  const std::pair<const char*, double> published[] = {
      {"bert-large", 0.34}, {"gpt2-xl", 1.56},     {"gpt3-1.3b", 1.32}, {"gpt3-2.7b", 2.65}, {"gpt3-6.7b", 6.66},
      {"gpt3-13b", 12.85},  {"gpt3-175b", 174.6},  {"llama2-7b", 6.74}, {"llama2-13b", 13.02}, {"llama2-70b", 68.98},
      {"llama3-8b", 8.03},  {"llama3-70b", 70.55}, {"llama3-405b", 405.9}};
  for (const auto& [name, billions] : published) {
    EXPECT_NEAR(CountParameters(*Built().FindModel(name)) / 1e9, billions, billions * 0.02) << name;
  }
}

TEST(TablesTest, AUsersRowsAddAndReplace) {
  Tables tables = Built();
  const size_t before = tables.devices.size();
  const Status added = AddDeviceRows("name,skipped\n# remark\nH100,94,989,yes,67,3900,450,700,70,0.55,our data sheet\n"
                                     "X1,16,10,no,5,100,10,50,5,0.5,measured here\n", "mine.csv", &tables);
  ASSERT_TRUE(added.ok()) << added.message();
  EXPECT_EQ(tables.devices.size(), before + 1);
  EXPECT_DOUBLE_EQ(tables.FindDevice("H100")->memory_bytes, 94.0 * (1 << 30));
  EXPECT_FALSE(tables.FindDevice("X1")->bf16);
}

TEST(TablesTest, ABadRowIsRefusedWithFileAndLine) {
  const std::pair<const char*, const char*> bad[] = {
      {"X1,16,10,no,5,100,10,50,5,0.5", "mine.csv:1: 10 columns, expected 11"},
      {"X1,sixteen,10,no,5,100,10,50,5,0.5,s", "mine.csv:1: column 2: \"sixteen\" is not a number"},
      {"X1,-1,10,no,5,100,10,50,5,0.5,s", "column 2: \"-1\" is not a number from"},
      {"X1,16,nan,no,5,100,10,50,5,0.5,s", "column 3: \"nan\" is not a number"},
      {"X1,16,10,maybe,5,100,10,50,5,0.5,s", "\"maybe\" is neither yes nor no"},
      {"X1,16,10,no,5,100,10,50,5,0.5,", "each row names its source"},
      {"X1,16,10,no,5,100,10,50,60,0.5,s", "idle_watts is above watts"},
      {",16,10,no,5,100,10,50,5,0.5,s", "the name is empty"}};
  for (const auto& [row, message] : bad) {
    Tables tables;
    const Status status = AddDeviceRows(row, "mine.csv", &tables);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << row;
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
    EXPECT_TRUE(tables.devices.empty());
  }
  Tables tables;
  EXPECT_FALSE(AddModelRows("m,1.5,8,2,2,32,100,no,yes,0,s", "m.csv", &tables).ok());
}

TEST(ValidateTest, GoodInputPasses) { EXPECT_TRUE(Validate(Servers(4), Named("llama2-7b"), Built()).ok()); }

TEST(ValidateTest, BadInputIsRefusedAndNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    const char* message;
    std::function<void(Cluster&, Job&)> spoil;
  };
  const Case cases[] = {
      {"the cluster has no server", [](Cluster& c, Job&) { c.servers.clear(); }},
      {"a server has no name", [](Cluster& c, Job&) { c.servers[1].id = ServerId(""); }},
      {"server s0 is there twice", [](Cluster& c, Job&) { c.servers[1].id = ServerId("s0"); }},
      {"server s1: device \"Z80\" is in no table", [](Cluster& c, Job&) { c.servers[1].device = "Z80"; }},
      {"server s1: speed is 0", [](Cluster& c, Job&) { c.servers[1].speed = 0; }},
      {"server s1: speed is -1", [](Cluster& c, Job&) { c.servers[1].speed = -1; }},
      {"server s1: speed is nan", [=](Cluster& c, Job&) { c.servers[1].speed = nan; }},
      {"server s1: speed is inf", [](Cluster& c, Job&) { c.servers[1].speed = INFINITY; }},
      {"server s1: devices is 0", [](Cluster& c, Job&) { c.servers[1].devices = 0; }},
      {"server s1: devices is 9999", [](Cluster& c, Job&) { c.servers[1].devices = 9999; }},
      {"server s1: memory is -5", [](Cluster& c, Job&) { c.servers[1].memory_bytes = -5; }},
      {"server s1: network bandwidth (bytes/s) is 0", [](Cluster& c, Job&) { c.servers[1].network_bandwidth = 0; }},
      {"network spine: bandwidth is nan", [=](Cluster& c, Job&) { c.spine.bandwidth = nan; }},
      {"network leaf: latency is -1", [](Cluster& c, Job&) { c.leaf.latency = -1; }},
      {"link s0 - s9: both ends", [](Cluster& c, Job&) { c.links.push_back({ServerId("s0"), ServerId("s9"), 1}); }},
      {"link s0 - s1: bandwidth is -3", [](Cluster& c, Job&) { c.links.push_back({ServerId("s0"), ServerId("s1"), -3}); }},
      {"server s3 cannot be reached from s0",
       [](Cluster& c, Job&) {
         for (const char* s : {"s0", "s1", "s2"}) c.links.push_back({ServerId(s), ServerId("s3"), 0});
       }},
      {"give either a transformer or a profile", [](Cluster&, Job& j) { j.transformer.layers = 0; }},
      {"give either a transformer or a profile", [](Cluster&, Job& j) { j.profile.push_back({1, 1, 1, 1, 1}); }},
      {"job: layers is 100000", [](Cluster&, Job& j) { j.transformer.layers = 100000; }},
      {"job: kv_heads is 64", [](Cluster&, Job& j) { j.transformer.kv_heads = 64; }},
      {"job: global_batch is 0", [](Cluster&, Job& j) { j.global_batch = 0; }},
      {"job: global_batch is -4", [](Cluster&, Job& j) { j.global_batch = -4; }},
      {"job: micro_batch_max is 1", [](Cluster&, Job& j) { j.micro_batch_min = 2, j.micro_batch_max = 1; }},
      {"micro_batch_min 8 is above global_batch 4",
       [](Cluster&, Job& j) { j.micro_batch_min = j.micro_batch_max = 8, j.global_batch = 4; }},
      {"job: optimizer_bytes is nan", [=](Cluster&, Job& j) { j.optimizer_bytes = nan; }},
      {"servers_max 2 is below servers_min 3", [](Cluster&, Job& j) { j.servers_min = 3, j.servers_max = 2; }},
      {"pinned server s9 is not in the cluster", [](Cluster&, Job& j) { j.pinned = {ServerId("s9")}; }},
      {"server s1 is pinned and forbidden", [](Cluster&, Job& j) { j.pinned = j.forbidden = {ServerId("s1")}; }},
  };
  for (const Case& c : cases) {
    Cluster cluster = Servers(4);
    Job job = Named("llama2-7b");
    c.spoil(cluster, job);
    const Status status = Validate(cluster, job, Built());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << c.message;
    EXPECT_NE(status.message().find(c.message), std::string::npos) << "got: " << status.message();
  }
}

TEST(ValidateTest, AProfileIsCheckedLayerByLayer) {
  Job job;
  job.global_batch = 8;
  job.profile.assign(3, {0.1, 0.2, 1e6, 1e5, 1e5});
  EXPECT_TRUE(Validate(Servers(2), job, Built()).ok());
  job.profile[2].forward_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(Validate(Servers(2), job, Built()).message().find("job: layer 2: forward_seconds is nan"), std::string::npos);
  job.profile.assign(3, {});
  EXPECT_NE(Validate(Servers(2), job, Built()).message().find("no layer takes any time"), std::string::npos);
  job.profile.assign(3, {0.1, 0.2, 1e6, 1e5, 1e5});
  job.reference_device = "Z80";
  EXPECT_NE(Validate(Servers(2), job, Built()).message().find("reference device \"Z80\""), std::string::npos);
}

TEST(ValidateTest, AForbiddenServerMayBeOutOfReach) {
  Cluster cluster = Servers(3);
  Job job = Named("llama2-7b");
  for (const char* s : {"s0", "s1"}) cluster.links.push_back({ServerId(s), ServerId("s2"), 0});
  EXPECT_FALSE(Validate(cluster, job, Built()).ok());
  job.forbidden = {ServerId("s2")};
  EXPECT_TRUE(Validate(cluster, job, Built()).ok());
}

TEST(CalibrationTest, AveragesTowardsWhatIsMeasuredAndSurvivesItsText) {
  Calibration calibration;
  EXPECT_DOUBLE_EQ(calibration.Ratio("compute/T4"), 1);
  calibration.Observe("compute/T4", 1.2, 1.0);
  EXPECT_DOUBLE_EQ(calibration.Ratio("compute/T4"), 1.2);
  for (int i = 0; i < 60; ++i) calibration.Observe("compute/T4", 1.5, 1.0);
  EXPECT_NEAR(calibration.Ratio("compute/T4"), 1.5, 1e-3);
  calibration.Observe("compute/T4", 1000, 1.0);  // one outlier moves it a little only
  EXPECT_LT(calibration.Ratio("compute/T4"), 1.9);
  calibration.Observe("network", std::nan(""), 1);
  calibration.Observe("network", -1, 1);
  EXPECT_DOUBLE_EQ(calibration.Ratio("network"), 1);
  const auto parsed = Calibration::Parse(calibration.Serialize());
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed, calibration);
  for (const char* bad : {"network", "network 0 1\n", "network nan 1\n", "network 1 x\n", " 1 1\n", "a 1\n"}) {
    EXPECT_FALSE(Calibration::Parse(bad).ok()) << bad;
  }
}

TEST(SpeedWatchTest, ALastingSlowdownChangesTheSpeedOnceAndASpikeNever) {
  SpeedWatch watch({});
  EXPECT_TRUE(watch.Observe(1.0));
  int changes = 0;
  for (int i = 0; i < 200; ++i) changes += watch.Observe(i % 10 == 0 ? 3.0 : 1.0);  // spikes
  EXPECT_EQ(changes, 0);
  for (int i = 0; i < 200; ++i) changes += watch.Observe(2.0);
  EXPECT_EQ(changes, 1);
  EXPECT_NEAR(watch.Speed(), 0.5, 1e-9);
  for (int i = 0; i < 200; ++i) changes += watch.Observe(1.8);  // 11 % faster: inside the wider band
  EXPECT_EQ(changes, 1);
  for (int i = 0; i < 200; ++i) changes += watch.Observe(1.0);
  EXPECT_EQ(changes, 2);
}

TEST(SpeedWatchTest, ASpeedThatSwingsChangesAtMostOncePerDwell) {
  SpeedWatch watch({});
  watch.Observe(1.0);
  int changes = 0;
  for (int i = 0; i < 500; ++i) changes += watch.Observe(i / 10 % 2 == 0 ? 2.0 : 1.0);
  EXPECT_LE(changes, 10);
}

}  // namespace
}  // namespace everstep::planner
