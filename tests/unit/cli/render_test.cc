// What the command line prints: tables, descriptions, ages, the reference page.
#include "controller/cli/render.h"

#include <gtest/gtest.h>

#include <chrono>

#include "controller/cli/command_line.h"
#include "controller/cli/output.h"

namespace everstep::cli {
namespace {

google::protobuf::Timestamp SecondsAgo(int64_t seconds) {
  google::protobuf::Timestamp time;
  time.set_seconds(std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count() -
                   seconds);
  return time;
}

TEST(Table, ColumnsAreAsWideAsTheirWidestCellAndAbsencesAreNamed) {
  Table table({"NAME", "STATE", "AGE"});
  table.AddRow({"s1", "Active", "2d"});
  table.AddRow({"server-10", "", "5h"});
  EXPECT_EQ(table.Text(),
            "NAME       STATE   AGE\n"
            "s1         Active  2d\n"
            "server-10  <none>  5h\n");
}

TEST(Names, EnumValuesReadLikeTheRestOfTheSystem) {
  EXPECT_EQ(StateName(v1::SERVER_STATE_SPARE), "Spare");
  EXPECT_EQ(StateName(v1::JOB_STATE_WAITING_FOR_CAPACITY), "WaitingForCapacity");
  EXPECT_EQ(PhaseName(v1::RECOVERY_PHASE_COLLECT), "collect");
}

TEST(Ranges, ConsecutiveNumbersBecomeOneRange) {
  EXPECT_EQ(Ranges({3, 0, 1, 2, 6}), "0-3,6");
  EXPECT_EQ(Ranges({7}), "7");
  EXPECT_EQ(Ranges({}), "");
}

TEST(Age, UsesOneUnitAndAdmitsWhatItDoesNotKnow) {
  EXPECT_EQ(Age(SecondsAgo(5)).back(), 's');
  EXPECT_EQ(Age(SecondsAgo(3 * 3600)), "3h");
  EXPECT_EQ(Age(SecondsAgo(3 * 86400)), "3d");
  EXPECT_EQ(Age(google::protobuf::Timestamp()), "<unknown>");
}

TEST(ServerTable, OneRowPerServerWithItsRanksAsRanges) {
  v1::Server server;
  server.set_name("s01");
  server.mutable_status()->set_state(v1::SERVER_STATE_ACTIVE);
  server.mutable_status()->set_incarnation(3);
  server.mutable_status()->set_reason("None");
  *server.mutable_status()->mutable_registered() = SecondsAgo(2 * 86400);
  for (int rank : {0, 1, 2}) {
    v1::RankPlace* place = server.mutable_status()->add_ranks();
    place->set_job("train");
    place->set_rank(rank);
    server.mutable_status()->mutable_inventory()->add_devices()->set_index(rank);
  }
  const std::string text = ServerTable({server}, false);
  EXPECT_EQ(text,
            "NAME  STATE   DEVICES  JOB    RANKS  INCARNATION  REASON  AGE\n"
            "s01   Active  3        train  0-2    3            <none>  2d\n");
}

v1::Recovery SomeRecovery() {
  v1::Recovery recovery;
  recovery.set_id(3);
  recovery.set_job("train");
  recovery.set_generation_from(1);
  recovery.set_generation_to(2);
  recovery.set_reason("ServerRefused");
  recovery.set_evidence("s2 refused the probe");
  recovery.set_decision("StandbyPromoted");
  recovery.set_decision_message("a standby on s5 replaces rank 1");
  recovery.add_alternatives("shrink to 3 replicas: keeps 75 % of the throughput");
  recovery.set_outcome("resumed");
  int64_t start = 0;
  for (v1::RecoveryPhase phase :
       {v1::RECOVERY_PHASE_DETECT, v1::RECOVERY_PHASE_FENCE, v1::RECOVERY_PHASE_RESUME}) {
    v1::PhaseTiming* timing = recovery.add_phases();
    timing->set_phase(phase);
    timing->mutable_start()->set_nanos(static_cast<int32_t>(start));
    timing->mutable_duration()->set_nanos(10000000);
    start += 10000000;
  }
  v1::RestoredRank* kept = recovery.add_ranks();
  kept->set_kept_process(true);
  kept->set_from("kept");
  v1::RestoredRank* replaced = recovery.add_ranks();
  replaced->set_rank(1);
  replaced->set_from("rank 0");
  replaced->set_bytes(16 << 20);
  return recovery;
}

TEST(Recovery, DescriptionHoldsTimelineEvidenceDecisionRivalsAndSources) {
  const std::string text = DescribeRecovery(SomeRecovery());
  for (const char* part :
       {"s2 refused the probe", "a standby on s5 replaces rank 1", "shrink to 3 replicas", "1 of 2",
        "Steps lost:", "fence", "20.0ms", "30.0ms", "rank-0", "16.0MiB"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  }
}

TEST(Recovery, ExplanationSaysTheReasonThatTheControllerActedOn) {
  const std::string text = ExplainRecovery(SomeRecovery());
  EXPECT_NE(text.find("s2 refused the probe (ServerRefused)"), std::string::npos) << text;
  EXPECT_NE(text.find("30.0 ms from the first evidence"), std::string::npos) << text;
}

TEST(Reference, EveryCommandHasAnExample) {
  CommandLine line;
  AddJobCommands(line);
  AddLocalCommands(line);
  AddReadCommands(line);
  AddServerCommands(line);
  AddToolCommands(line);
  const std::string page = ReferencePage(line.app);
  size_t commands = 0, examples = 0;
  for (size_t at = page.find("\n## "); at != std::string::npos; at = page.find("\n## ", at + 1)) {
    ++commands;
    const std::string name = page.substr(at + 4, page.find('\n', at + 1) - at - 4);
    if (page.find("\n  " + name, at) < page.find("\n## ", at + 1)) ++examples;
  }
  EXPECT_GT(commands, 20u);
  EXPECT_EQ(examples, commands);
}

TEST(CommandLine, UsageErrorsHaveCode64ForRunAnd2Elsewhere) {
  const auto parse = [](std::vector<const char*> arguments) {
    CommandLine line;
    AddJobCommands(line);
    AddReadCommands(line);
    arguments.insert(arguments.begin(), "everstep");
    return line.Parse(static_cast<int>(arguments.size()), const_cast<char**>(arguments.data()));
  };
  EXPECT_EQ(parse({"run", "--servers"}), 64);
  EXPECT_EQ(parse({"get", "nothing"}), 2);
  EXPECT_EQ(parse({}), 2);
  EXPECT_EQ(parse({"get", "servers", "-o", "yaml"}), 2);
  EXPECT_EQ(parse({"get", "servers", "-o", "json"}), 0);
}

TEST(ParseDuration, NamesTheFlag) {
  EXPECT_EQ(ParseDuration("1500ms", "--timeout").value(), Milliseconds(1500));
  const auto bad = ParseDuration("5", "--timeout");
  ASSERT_FALSE(bad.ok());
  EXPECT_NE(bad.status().message().find("--timeout"), std::string::npos);
}

}  // namespace
}  // namespace everstep::cli
