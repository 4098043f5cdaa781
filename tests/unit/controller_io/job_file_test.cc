#include "controller/io/config/job_file.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "controller/io/config/yaml_message.h"

namespace everstep {
namespace {

using Problems = std::vector<std::string>;

Problems ProblemsOf(const std::string& text) { return ParseJobFile(text, "job.yaml").problems; }

TEST(JobFile, ReadsAllKindsOfFields) {
  const LoadedJob job = ParseJobFile(R"(
name: train
program: /opt/train
arguments: [--steps, "300", '--name=a b']
environment: {OMP_NUM_THREADS: 1, MODE: fast}
secret_files:
  TOKEN: /etc/token
servers_min: 2
servers_wanted: 4
opaque: true
termination_grace: 1m30s
persist_interval_steps: 100
)", "job.yaml");
  ASSERT_EQ(job.problems, Problems{});
  JobSpec expected;
  expected.name = "train";
  expected.program = "/opt/train";
  expected.arguments = {"--steps", "300", "--name=a b"};
  expected.environment = {{"OMP_NUM_THREADS", "1"}, {"MODE", "fast"}};
  expected.secret_files = {{"TOKEN", "/etc/token"}};
  expected.servers_min = 2;
  expected.servers_wanted = 4;
  expected.opaque = true;
  expected.termination_grace = Seconds(90);
  expected.persist_interval_steps = 100;
  EXPECT_EQ(*job.spec, expected);
}

TEST(JobFile, AcceptsJsonWithJsonNames) {
  const LoadedJob job = ParseJobFile(
      R"({"name": "train", "program": "/bin/true", "serversWanted": 3, "terminationGrace": "250ms"})", "job.json");
  ASSERT_EQ(job.problems, Problems{});
  EXPECT_EQ(job.spec->servers_wanted, 3);
  EXPECT_EQ(job.spec->termination_grace, Milliseconds(250));
}

TEST(JobFile, NamesLineAndNearestFieldOfAMisspeltOne) {
  EXPECT_EQ(ProblemsOf("name: a\nprogram: /bin/true\nserver_min: 2\n"),
            Problems{"job.yaml:3: unknown field \"server_min\"; did you mean \"servers_min\"?"});
}

TEST(JobFile, ReportsAllProblemsAtOnce) {
  EXPECT_EQ(ProblemsOf("name: a\nprogram: /bin/true\nservers_min: two\nopaque: maybe\n"
                       "termination_grace: 5\narguments: x\nservers_min: 3\nenvironment: [a]\n"),
            (Problems{
                "job.yaml:3: servers_min: \"two\" is not a whole number from -2147483648 to 2147483647",
                "job.yaml:4: opaque: \"maybe\" is neither true nor false",
                "job.yaml:5: termination_grace: \"5\" has no unit; write a duration like \"5s\", \"250ms\" or "
                "\"1m30s\"",
                "job.yaml:6: arguments: needs a list, not \"x\"",
                "job.yaml:7: servers_min: is given twice; keep one",
                "job.yaml:8: environment: needs a map of texts, not a list",
            }));
}

TEST(JobFile, NamesTheLineOfANumberOutOfRange) {
  EXPECT_EQ(ProblemsOf("name: a\nprogram: /bin/true\nservers_wanted: -1\nranks_per_server: -2\n"),
            (Problems{"job.yaml:3: servers_wanted: -1 is out of range: 0 to 2147483647 is allowed",
                      "job.yaml:4: ranks_per_server: -2 is out of range: 0 to 2147483647 is allowed"}));
}

TEST(JobFile, SaysWhatIsMissing) {
  EXPECT_EQ(ProblemsOf(""), (Problems{"job.yaml: name: is missing; give the job a name",
                                      "job.yaml: program: is missing; give the absolute path of the program"}));
  EXPECT_EQ(ProblemsOf("name: 'a/b'\nprogram: /x").size(), 1u);
}

TEST(JobFile, RefusesWhatIsNotYaml) {
  EXPECT_EQ(ProblemsOf("name: [a\n").size(), 1u);
  EXPECT_NE(ProblemsOf("name: [a\n")[0].find("is not YAML"), std::string::npos);
  EXPECT_EQ(ProblemsOf("- a\n- b\n"), Problems{"job.yaml:1: needs a map of fields, not a list"});
  EXPECT_EQ(ProblemsOf("name: a\n---\nname: b\n"), Problems{"job.yaml: holds 2 documents; keep one"});
  EXPECT_NE(ProblemsOf("name: \"\\xff\"\nprogram: \xff\xfe\n"), Problems{});
}

TEST(JobFile, ABombOfAliasesIsCutOff) {
  std::string text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 9; ++i) {
    std::string list;
    for (int j = 0; j < 10; ++j) list += (j ? ", *a" : "*a") + std::to_string(i - 1);
    text += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + list + "]\n";
  }
  EXPECT_FALSE(ProblemsOf(text + "arguments: *a8\n").empty());
}

TEST(JobFile, FileErrorsNameThePath) {
  EXPECT_EQ(LoadJobFile("/nonexistent/job.yaml").problems,
            Problems{"/nonexistent/job.yaml: No such file or directory"});
  const std::string folder = ::testing::TempDir();
  EXPECT_EQ(LoadJobFile(folder).problems, Problems{folder + ": is a folder; name a file"});
}

TEST(Durations, AreReadWithTheirUnits) {
  EXPECT_EQ(*ParseDuration("5s"), Seconds(5));
  EXPECT_EQ(*ParseDuration("1.5s"), Milliseconds(1500));
  EXPECT_EQ(*ParseDuration("2h"), Seconds(7200));
  EXPECT_EQ(*ParseDuration("1m30s"), Seconds(90));
  EXPECT_EQ(*ParseDuration("7us"), Microseconds(7));
  for (const char* bad : {"", "5", "s", "5 s", "-5s", "5x", "1e3s", "99999999999h", "5s ", "nan"}) {
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace everstep
