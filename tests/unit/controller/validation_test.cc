// Policies and job specs: every problem is named with its field.
#include <functional>

#include <gtest/gtest.h>

#include "controller/core/job_spec.h"
#include "controller/core/policy.h"

namespace everstep {
namespace {

template <typename T>
struct Broken {
  const char* field;
  std::function<void(T&)> damage;
};

void Names(const std::vector<std::string>& problems, const std::string& field) {
  ASSERT_FALSE(problems.empty()) << field;
  bool named = false;
  for (const std::string& p : problems) named |= p.starts_with(field + ":");
  EXPECT_TRUE(named) << field << " is not named in: " << problems[0];
}

TEST(PolicyTest, TheDefaultsAreLegalAndDescribed) {
  EXPECT_TRUE(ValidatePolicy({}).empty());
  const auto table = DescribePolicy({});
  EXPECT_EQ(table[1], (std::pair<std::string, std::string>("lease", "1500ms")));
  bool derived = false;
  for (const auto& [name, value] : table) derived |= name == "collect_timeout (derived)" && value == "1500ms";
  EXPECT_TRUE(derived);
}

TEST(PolicyTest, EveryFieldOutOfRangeIsNamed) {
  const std::vector<Broken<Policy>> cases = {
      {"heartbeat_interval", [](Policy& p) { p.heartbeat_interval = Milliseconds(1); }},
      {"lease", [](Policy& p) { p.lease = Milliseconds(10); }},
      {"lease", [](Policy& p) { p.heartbeat_interval = Seconds(1); }},
      {"probe_timeout", [](Policy& p) { p.probe_timeout = Seconds(60); }},
      {"recovery_budget", [](Policy& p) { p.recovery_budget = Milliseconds(10); }},
      {"process_start_timeout", [](Policy& p) { p.process_start_timeout = Duration(0); }},
      {"adoption_grace", [](Policy& p) { p.adoption_grace = Milliseconds(500); }},
      {"mass_silence_hold", [](Policy& p) { p.mass_silence_hold = Seconds(2); }},
      {"join_settle", [](Policy& p) { p.join_settle = Seconds(-1); }},
      {"regrow_delay", [](Policy& p) { p.regrow_delay = Seconds(4000); }},
      {"servers_max", [](Policy& p) { p.servers_max = 0; }},
      {"jobs_max", [](Policy& p) { p.jobs_max = -1; }},
      {"recoveries_kept", [](Policy& p) { p.recoveries_kept = 201; }},
      {"events_kept", [](Policy& p) { p.events_kept = 0; }},
  };
  for (const auto& c : cases) {
    Policy policy;
    c.damage(policy);
    Names(ValidatePolicy(policy), c.field);
  }
}

TEST(PolicyTest, AllProblemsAreReportedAtOnce) {
  Policy policy;
  policy.servers_max = 0;
  policy.jobs_max = 0;
  policy.events_kept = 0;
  EXPECT_EQ(ValidatePolicy(policy).size(), 3u);
}

JobSpec Legal() {
  JobSpec spec;
  spec.name = "train-7";
  spec.program = "/opt/train";
  spec.servers_wanted = 4;
  spec.servers_min = 2;
  return spec;
}

TEST(JobSpecTest, ALegalSpecHasNoProblem) { EXPECT_TRUE(ValidateJobSpec(Legal()).empty()); }

TEST(JobSpecTest, EveryFieldOutOfRangeIsNamed) {
  const std::vector<Broken<JobSpec>> cases = {
      {"name", [](JobSpec& s) { s.name = ""; }},
      {"name", [](JobSpec& s) { s.name = "Upper"; }},
      {"name", [](JobSpec& s) { s.name = "-x"; }},
      {"name", [](JobSpec& s) { s.name = "x-"; }},
      {"name", [](JobSpec& s) { s.name = std::string(64, 'a'); }},
      {"program", [](JobSpec& s) { s.program = ""; }},
      {"program", [](JobSpec& s) { s.program = "train"; }},
      {"working_directory", [](JobSpec& s) { s.working_directory = "here"; }},
      {"arguments", [](JobSpec& s) { s.arguments.assign(5000, "a"); }},
      {"arguments and environment", [](JobSpec& s) { s.environment["A"] = std::string(70000, 'x'); }},
      {"servers_min", [](JobSpec& s) { s.servers_min = 0; }},
      {"servers_min", [](JobSpec& s) { s.servers_min = 5; }},
      {"servers_wanted", [](JobSpec& s) { s.servers_wanted = 0; }},
      {"servers_max", [](JobSpec& s) { s.servers_max = 3; }},
      {"ranks_per_server", [](JobSpec& s) { s.ranks_per_server = 65; }},
      {"pipeline_stages", [](JobSpec& s) { s.pipeline_stages = 0; }},
      {"pipeline_stages", [](JobSpec& s) { s.pipeline_stages = 3; }},
      {"pipeline_stages", [](JobSpec& s) { s.pipeline_stages = 8; }},
      {"pipeline_stages", [](JobSpec& s) { s.pipeline_stages = 2; s.opaque = true; }},
      {"micro_batch_count", [](JobSpec& s) { s.micro_batch_count = -1; }},
      {"micro_batch_count", [](JobSpec& s) { s.micro_batch_count = 3; }},
      {"priority", [](JobSpec& s) { s.priority = 1001; }},
      {"spares_reserved", [](JobSpec& s) { s.spares_reserved = -1; }},
      {"standbys_wanted", [](JobSpec& s) { s.standbys_wanted = 65; }},
      {"restarts_max", [](JobSpec& s) { s.restarts_max = -1; }},
      {"snapshot_interval_steps", [](JobSpec& s) { s.snapshot_interval_steps = -1; }},
      {"persist_interval_steps", [](JobSpec& s) { s.persist_interval_steps = -1; }},
      {"checkpoints_kept", [](JobSpec& s) { s.checkpoints_kept = 0; }},
      {"termination_grace", [](JobSpec& s) { s.termination_grace = Seconds(-1); }},
  };
  for (const auto& c : cases) {
    JobSpec spec = Legal();
    c.damage(spec);
    Names(ValidateJobSpec(spec), c.field);
  }
}

}  // namespace
}  // namespace everstep
