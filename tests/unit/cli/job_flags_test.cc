// A job from flags and files.
#include "controller/cli/job_flags.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "controller/cli/command_line.h"

namespace everstep::cli {
namespace {

Result<v1::JobSpec> Parse(std::vector<std::string> arguments, std::vector<std::string> program) {
  CLI::App app;
  JobFlags flags;
  CLI::App* run = app.add_subcommand("run", "");
  AddJobFlags(run, flags, true);
  arguments.insert(arguments.begin(), "run");
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  return MakeJobSpec(flags, run, std::move(program));
}

class JobFile : public testing::Test {
 protected:
  JobFile() {
    char pattern[] = "/tmp/job-file-XXXXXX";
    folder_ = mkdtemp(pattern);
  }
  ~JobFile() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& text) {
    std::ofstream(folder_ + "/job.yaml") << text;
    return folder_ + "/job.yaml";
  }
  std::string folder_;
};

TEST(JobFlags, ProgramIsFoundOnThePathAndNamesTheJob) {
  const auto spec = Parse({"--servers", "4"}, {"sleep", "--version", "1"});
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->program().front(), '/');
  EXPECT_EQ(spec->name(), "sleep");
  ASSERT_EQ(spec->arguments_size(), 2);
  EXPECT_EQ(spec->arguments(0), "--version");
  EXPECT_EQ(spec->servers_wanted(), 4);
  EXPECT_EQ(spec->servers_min(), 4);
}

TEST(JobFlags, WithoutDashesTheFirstWordBeginsTheProgram) {
  const auto spec = Parse({"--name", "nap", "sleep", "--servers", "9"}, {});
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->name(), "nap");
  ASSERT_EQ(spec->arguments_size(), 2);
  EXPECT_EQ(spec->arguments(0), "--servers");
  EXPECT_EQ(spec->servers_wanted(), 1);
}

TEST(JobFlags, TorchrunsRangeIsMinimumAndWanted) {
  const auto spec = Parse({"--nnodes", "2:4", "--nproc-per-node", "2"}, {"sleep"});
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->servers_min(), 2);
  EXPECT_EQ(spec->servers_wanted(), 4);
  EXPECT_EQ(spec->ranks_per_server(), 2);
}

TEST(JobFlags, MistakesNameTheFlagAndTheValue) {
  for (const auto& [arguments, word] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--servers", "none"}, "none"},
           {{"--env", "novalue"}, "novalue"},
           {{"--grace", "5"}, "--grace"},
           {{"--nmae"}, "--nmae"}}) {
    const auto spec = Parse(arguments, {"sleep"});
    ASSERT_FALSE(spec.ok()) << word;
    EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(spec.status().message().find(word), std::string::npos) << spec.status().message();
  }
  EXPECT_FALSE(Parse({}, {}).ok()) << "no program at all";
  EXPECT_FALSE(Parse({}, {"/no/such/program"}).ok());
}

TEST_F(JobFile, FlagsOverrideItsFields) {
  const std::string file = Write(
      "name: a\nprogram: /bin/sleep\narguments: ['5']\nservers_wanted: 3\npriority: "
      "7\ntermination_grace: 2s\n");
  const auto spec = Parse({"-f", file, "--name", "b"}, {});
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->name(), "b");
  EXPECT_EQ(spec->priority(), 7);
  EXPECT_EQ(spec->servers_wanted(), 3);
  EXPECT_EQ(spec->termination_grace().seconds(), 2);
}

TEST_F(JobFile, UnknownFieldNamesFileAndLine) {
  const auto spec = Parse({"-f", Write("name: a\nservers_wantd: 3\n")}, {"sleep"});
  ASSERT_FALSE(spec.ok());
  EXPECT_NE(spec.status().message().find("job.yaml:2"), std::string::npos)
      << spec.status().message();
}

}  // namespace
}  // namespace everstep::cli
