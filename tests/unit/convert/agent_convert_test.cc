#include "proto/convert/agent_convert.h"

#include <gtest/gtest.h>
#include <google/protobuf/util/message_differencer.h>

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include <limits>

#include "proto/convert/job_convert.h"
#include "proto/convert/reader.h"
#include "tests/unit/convert/fill_message.h"

namespace everstep {
namespace {

using google::protobuf::util::MessageDifferencer;

v1::AgentMessage Remade(const FromAgent& body) {
  struct Visitor {
    v1::AgentMessage operator()(const AgentHello& hello) { return ToMessage(hello); }
    v1::AgentMessage operator()(const SequencedFact& fact) { return ToMessage(fact.sequence, fact.fact); }
    v1::AgentMessage operator()(const Heartbeat& heartbeat) { return ToMessage(heartbeat); }
  };
  return std::visit(Visitor{}, body);
}

TEST(AgentConvert, KeepsEveryFieldOfEveryFact) {
  for (size_t choice = 0; choice < std::variant_size_v<Fact>; ++choice) {
    testing::MessageFiller filler;
    v1::AgentMessage message;
    filler.Fill(message.mutable_fact(), static_cast<int>(choice));
    const auto read = FromMessage(message);
    ASSERT_TRUE(read.ok()) << read.status().ToString() << "\n" << message.DebugString();
    EXPECT_EQ(std::get<SequencedFact>(*read).fact.index(), choice) << message.DebugString();
    const v1::AgentMessage again = Remade(*read);
    EXPECT_TRUE(MessageDifferencer::Equals(message, again))
        << message.DebugString() << "\n---\n" << again.DebugString();
  }
}

TEST(AgentConvert, KeepsEveryFieldOfHelloAndHeartbeat) {
  testing::MessageFiller filler;
  for (int part : {0, 1}) {
    v1::AgentMessage message;
    if (part == 0) filler.Fill(message.mutable_hello(), 0);
    if (part == 1) filler.Fill(message.mutable_heartbeat(), 0);
    const auto read = FromMessage(message);
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    const v1::AgentMessage again = Remade(*read);
    EXPECT_TRUE(MessageDifferencer::Equals(message, again)) << again.DebugString();
  }
}

TEST(AgentConvert, KeepsEveryFieldOfEveryCommand) {
  for (size_t choice = 0; choice < std::variant_size_v<Command>; ++choice) {
    testing::MessageFiller filler;
    v1::ControllerMessage message;
    filler.Fill(&message, static_cast<int>(choice));
    const auto read = FromMessage(message);
    ASSERT_TRUE(read.ok()) << read.status().ToString() << "\n" << message.DebugString();
    EXPECT_EQ(read->command.index(), choice) << message.DebugString();
    const v1::ControllerMessage again = ToMessage(read->header, read->command);
    EXPECT_TRUE(MessageDifferencer::Equals(message, again))
        << message.DebugString() << "\n---\n" << again.DebugString();
  }
}

TEST(AgentConvert, KeepsAnAssignmentWithAllItsRanks) {
  Assignment assignment;
  assignment.job = JobUid("train-7");
  assignment.job_name = "train";
  assignment.generation = Generation(9);
  assignment.recovery_point = {Step(120), Generation(8)};
  for (size_t i = 0; i < assignment.token.size(); ++i) assignment.token[i] = static_cast<uint8_t>(250 + i);
  assignment.dp_size = 2;
  assignment.pp_size = 2;
  assignment.micro_batch_count = 8;
  for (int i = 0; i < 4; ++i) {
    RankAssignment rank;
    rank.rank = Rank(i);
    rank.server = ServerId("s0" + std::to_string(i));
    rank.process = ProcessId(100 + i);
    rank.dp = i / 2;
    rank.pp = i % 2;
    rank.mesh_address = "10.0.0.1:500" + std::to_string(i);
    rank.action = i == 3 ? RestoreAction::kFetchFromSnapshot : RestoreAction::kKeep;
    if (i == 3) {
      rank.sources.push_back({ServerId("s01"), SnapshotTier::kPeer, "10.0.0.2:900",
                              {Step(120), Generation(8)}, ShardIndex(1)});
    }
    assignment.ranks.push_back(rank);
  }
  const auto read = FromMessage(ToMessage(CommandHeader{Term(3), CommandSequence(4)}, AssignProcesses{assignment}));
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(std::get<AssignProcesses>(read->command).assignment, assignment);
  EXPECT_EQ(read->header.term, Term(3));
  EXPECT_EQ(read->header.sequence, CommandSequence(4));
}

TEST(AgentConvert, NamesTheFieldThatIsOutOfBounds) {
  testing::MessageFiller filler;
  v1::AgentMessage message;
  filler.Fill(message.mutable_hello(), 0);
  message.mutable_hello()->mutable_inventory()->mutable_devices(0)->set_index(-4);
  const auto read = FromMessage(message);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(read.status().message().rfind("hello.inventory.devices[0].index: -4 is out of range", 0), 0u)
      << read.status().message();
}

TEST(AgentConvert, RefusesWhatIsEmptyUnknownOrTooLong) {
  EXPECT_FALSE(FromMessage(v1::AgentMessage()).ok());
  EXPECT_FALSE(FromMessage(v1::ControllerMessage()).ok());

  testing::MessageFiller filler;
  v1::AgentMessage good;
  filler.Fill(good.mutable_hello(), 0);
  ASSERT_TRUE(FromMessage(good).ok());
  const auto refused = [&](auto change) {
    v1::AgentMessage message = good;
    change(message.mutable_hello());
    return !FromMessage(message).ok();
  };
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_server(""); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_server("../s01"); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_server(std::string(201, 'a')); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_probe_address("nowhere"); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_probe_address("host:99999"); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_inventory()->set_version(std::string(300, 'v')); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) {
    h->mutable_inventory()->mutable_devices(0)->set_kind(v1::DEVICE_KIND_UNSPECIFIED);
  }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) {
    h->mutable_inventory()->mutable_devices(0)->set_kind(static_cast<v1::DeviceKind>(77));
  }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) {
    h->mutable_inventory()->mutable_devices(0)->set_speed(std::numeric_limits<double>::quiet_NaN());
  }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) {
    for (size_t i = 0; i <= kDevicesMax; ++i) *h->mutable_inventory()->add_devices() = h->inventory().devices(0);
  }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) { h->mutable_processes(0)->set_process(0); }));
  EXPECT_TRUE(refused([](v1::AgentHello* h) {
    h->mutable_processes(0)->mutable_progress()->mutable_applied()->set_step(-1);
  }));
}

TEST(AgentConvert, WritesNothingThatItsReaderRefuses) {
  ProcessExited exited;
  exited.job = JobUid("j");
  exited.process = ProcessId(1);
  exited.last_lines = std::vector<std::string>(5000, std::string(100'000, '\xff'));
  const auto read = FromMessage(ToMessage(FactSequence(1), exited));
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  const auto& lines = std::get<ProcessExited>(std::get<SequencedFact>(*read).fact).last_lines;
  ASSERT_EQ(lines.size(), kLinesMax);
  EXPECT_EQ(lines.back(), std::string(kLineBytesMax, '\xff'));

  ProcessFailed failed{JobUid("j"), ProcessId(1), {}};
  failed.failed.message = std::string("torn \xc3 text \0 end", 16) + std::string(100'000, 'x');
  const v1::AgentMessage message = ToMessage(FactSequence(2), failed);
  v1::AgentMessage parsed;  // the parser of proto3 refuses strings that are not UTF-8
  ASSERT_TRUE(parsed.ParseFromString(message.SerializeAsString()));
  const auto again = FromMessage(parsed);
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ(std::get<ProcessFailed>(std::get<SequencedFact>(*again).fact).failed.message.substr(0, 16),
            "torn ? text ? en");
}

TEST(JobConvert, AbsentFieldsTakeTheDefaults) {
  v1::JobSpec message;
  message.set_name("train");
  message.set_program("/bin/true");
  const auto spec = FromMessage(message);
  ASSERT_TRUE(spec.ok());
  JobSpec expected;
  expected.name = "train";
  expected.program = "/bin/true";
  EXPECT_EQ(*spec, expected);
}

TEST(JobConvert, KeepsEveryField) {
  testing::MessageFiller filler;
  v1::JobSpec message;
  filler.Fill(&message, 0);
  const auto spec = FromMessage(message);
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_TRUE(MessageDifferencer::Equals(message, ToMessage(*spec))) << ToMessage(*spec).DebugString();
}

TEST(JobConvert, RefusesNegativeNumbersAndNamesTheField) {
  v1::JobSpec message;
  message.set_name("train");
  message.set_servers_wanted(-1);
  EXPECT_EQ(FromMessage(message).status().message(),
            "servers_wanted: -1 is out of range: 0 to 2147483647 is allowed");
}

TEST(Reader, TimesSurviveTheirMessages) {
  for (int64_t microseconds : {int64_t{0}, int64_t{1'764'582'000'123'456}, int64_t{-1}}) {
    google::protobuf::Timestamp stamp;
    WriteTime(WallTime{microseconds}, &stamp);
    EXPECT_EQ(ReadTime(stamp).unix_microseconds, microseconds);
    EXPECT_GE(stamp.nanos(), 0);
  }
  google::protobuf::Duration duration;
  WriteDuration(Milliseconds(-1500), &duration);
  EXPECT_EQ(ReadDurationClamped(duration), Milliseconds(-1500));
  duration.set_seconds(INT64_MAX);
  EXPECT_GT(ReadDurationClamped(duration), Seconds(1'000'000'000));
}

}  // namespace
}  // namespace everstep
