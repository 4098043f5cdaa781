// The codec of the socket between rank and agent: random messages survive the round trip, random and mutated bytes
// are refused or decode to exactly what they encode to, and limits hold.
#include "worker/wire/rank_codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>

#include "proto/base/prng.h"

namespace everstep {
namespace {

std::string RandomText(Prng& random, uint64_t length_max) {
  std::string text(random.UpTo(length_max), '\0');
  for (char& c : text) c = static_cast<char>(random.UpTo(255));
  return text;
}
std::vector<int64_t> RandomShape(Prng& random) {
  std::vector<int64_t> shape(random.UpTo(kWireDimensionsMax));
  for (int64_t& n : shape) n = static_cast<int64_t>(random.Next());
  return shape;
}
StateId RandomState(Prng& random) {
  return {Step(static_cast<int64_t>(random.Next())), Generation(random.Next())};
}
int32_t RandomInt(Prng& random) { return static_cast<int32_t>(random.Next()); }
std::vector<TensorInfo> RandomTensors(Prng& random) {
  std::vector<TensorInfo> tensors(random.UpTo(5));
  for (TensorInfo& t : tensors) {
    t = {RandomText(random, 30), RandomText(random, 4), RandomShape(random), RandomShape(random),
         RandomShape(random),    random.Next(),         random.Next()};
  }
  return tensors;
}
SnapshotSource RandomSource(Prng& random) {
  return {ServerId(RandomText(random, 10)), static_cast<SnapshotTier>(random.UpTo(2)), RandomText(random, 20),
          RandomState(random), ShardIndex(RandomInt(random))};
}
Assignment RandomAssignment(Prng& random) {
  Assignment a;
  a.job = JobUid(RandomText(random, 40));
  a.job_name = RandomText(random, 40);
  a.generation = Generation(random.Next());
  a.recovery_point = RandomState(random);
  for (uint8_t& byte : a.token) byte = static_cast<uint8_t>(random.UpTo(255));
  a.dp_size = RandomInt(random);
  a.tp_size = RandomInt(random);
  a.pp_size = RandomInt(random);
  a.micro_batch_count = RandomInt(random);
  a.ranks.resize(random.UpTo(6));
  for (RankAssignment& r : a.ranks) {
    r.rank = Rank(RandomInt(random));
    r.server = ServerId(RandomText(random, 10));
    r.device = DeviceIndex(RandomInt(random));
    r.process = ProcessId(random.Next());
    r.dp = RandomInt(random);
    r.tp = RandomInt(random);
    r.pp = RandomInt(random);
    r.local_rank = RandomInt(random);
    r.micro_batch_first = RandomInt(random);
    r.micro_batch_count = RandomInt(random);
    r.mesh_address = RandomText(random, 30);
    r.action = static_cast<RestoreAction>(random.UpTo(4));
    r.source_rank = Rank(RandomInt(random));
    r.sources.resize(random.UpTo(3));
    for (SnapshotSource& source : r.sources) source = RandomSource(random);
  }
  return a;
}
Digest128 RandomDigest(Prng& random) { return {random.Next(), random.Next()}; }
StatusCode RandomCode(Prng& random) { return static_cast<StatusCode>(random.UpTo(15)); }

RankToAgent RandomFromRank(Prng& random, size_t index) {
  switch (index) {
    case 0: return RankHello{static_cast<uint32_t>(random.Next()), ProcessId(random.Next()),
                             static_cast<int64_t>(random.Next()), RandomText(random, 30)};
    case 1: return RankJoin{};
    case 2: return CollectAnswer{Generation(random.Next()),
                                 {random.Chance(1, 2), RandomState(random), Generation(random.Next())},
                                 random.Chance(1, 2)};
    case 3: return RankConnected{Generation(random.Next())};
    case 4: return RankReady{Generation(random.Next()), RandomDigest(random), random.Next(), RandomText(random, 9)};
    case 5: return RankFailed{Generation(random.Next()), Rank(RandomInt(random)), RandomCode(random),
                              RandomText(random, 200)};
    case 6: return SnapshotStaged{RandomState(random), ShardIndex(RandomInt(random)),
                                  static_cast<uint32_t>(random.Next()), random.Next(), RandomTensors(random)};
    case 7: return SnapshotWanted{Generation(random.Next()), RandomSource(random)};
    case 8: return MetricReported{Step(RandomInt(random)), RandomText(random, 20),
                                  static_cast<double>(RandomInt(random)) / 7};
    default: return RankFinished{};
  }
}

AgentToRank RandomFromAgent(Prng& random, size_t index) {
  switch (index) {
    case 0: return HelloAccepted{random.Next()};
    case 1: return HelloRefused{RandomText(random, 90)};
    case 2: return FenceRank{Generation(random.Next())};
    case 3: return PrepareSwitch{Generation(random.Next())};
    case 4: return AssignRank{RandomAssignment(random), Rank(RandomInt(random))};
    case 5: return ResumeRank{Generation(random.Next()), Step(RandomInt(random))};
    case 6: return SnapshotProtected{Step(RandomInt(random))};
    case 7: return SnapshotProvided{Generation(random.Next()), RandomState(random),   random.Next(),
                                    RandomDigest(random),      RandomTensors(random), RandomText(random, 20)};
    case 8: return SnapshotUnavailable{Generation(random.Next()), RandomCode(random), RandomText(random, 90)};
    default: return StopRank{RandomText(random, 90)};
  }
}

std::string_view Body(const std::string& frame) { return std::string_view(frame).substr(kFrameHeaderBytes); }

TEST(RankCodecTest, EveryMessageOfARankSurvivesTheRoundTrip) {
  Prng random(1);
  for (int round = 0; round < 200; ++round) {
    for (size_t index = 0; index < std::variant_size_v<RankToAgent>; ++index) {
      const RankToAgent message = RandomFromRank(random, index);
      ASSERT_EQ(message.index(), index);
      const std::string frame = EncodeFrame(message);
      const Result<RankToAgent> decoded = DecodeRankToAgent(Body(frame));
      ASSERT_TRUE(decoded.ok()) << index << decoded.status().ToString();
      ASSERT_EQ(decoded->index(), index);
      ASSERT_EQ(EncodeFrame(*decoded), frame);
    }
  }
}

TEST(RankCodecTest, EveryMessageOfAnAgentSurvivesTheRoundTrip) {
  Prng random(2);
  for (int round = 0; round < 200; ++round) {
    for (size_t index = 0; index < std::variant_size_v<AgentToRank>; ++index) {
      const AgentToRank message = RandomFromAgent(random, index);
      ASSERT_EQ(message.index(), index);
      const std::string frame = EncodeFrame(message);
      const Result<AgentToRank> decoded = DecodeAgentToRank(Body(frame));
      ASSERT_TRUE(decoded.ok()) << index << decoded.status().ToString();
      ASSERT_EQ(decoded->index(), index);
      ASSERT_EQ(EncodeFrame(*decoded), frame);
    }
  }
}

TEST(RankCodecTest, FieldsArriveWhereTheyWereSent) {
  Prng random(3);
  const Assignment assignment = RandomAssignment(random);
  const auto decoded = DecodeAgentToRank(Body(EncodeFrame(AgentToRank(AssignRank{assignment, Rank(3)}))));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(std::get<AssignRank>(*decoded).assignment, assignment);
  EXPECT_EQ(std::get<AssignRank>(*decoded).rank, Rank(3));

  const RankReport report{true, {Step(7), Generation(2)}, Generation(3)};
  const auto answer = DecodeRankToAgent(Body(EncodeFrame(RankToAgent(CollectAnswer{Generation(4), report, true}))));
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(std::get<CollectAnswer>(*answer).report, report);
  EXPECT_TRUE(std::get<CollectAnswer>(*answer).planned);

  const std::vector<TensorInfo> tensors = RandomTensors(random);
  const auto staged = DecodeRankToAgent(Body(EncodeFrame(RankToAgent(SnapshotStaged{{}, {}, 2, 9, tensors}))));
  ASSERT_TRUE(staged.ok());
  EXPECT_EQ(std::get<SnapshotStaged>(*staged).tensors, tensors);
}

TEST(RankCodecTest, TheBytesOfAFrameAreThoseOfTheTable) {
  const std::string frame = EncodeFrame(AgentToRank(FenceRank{Generation(0x0102)}));
  EXPECT_EQ(frame, std::string("\x0a\0\0\0" "\x67\0" "\x02\x01\0\0\0\0\0\0", 14));
  EXPECT_EQ(EncodeFrame(RankToAgent(RankJoin{})), std::string("\x02\0\0\0" "\x02\0", 6));
}

TEST(RankCodecTest, EveryTruncationAndEveryExtraByteIsRefused) {
  Prng random(4);
  for (size_t index = 0; index < std::variant_size_v<AgentToRank>; ++index) {
    const std::string frame = EncodeFrame(RandomFromAgent(random, index));
    const std::string_view body = Body(frame);
    for (size_t length = 0; length < body.size(); ++length) {
      ASSERT_FALSE(DecodeAgentToRank(body.substr(0, length)).ok()) << index << " cut to " << length;
    }
    ASSERT_FALSE(DecodeAgentToRank(std::string(body) + 'x').ok());
  }
}

TEST(RankCodecTest, MutatedBytesAreRefusedOrCanonical) {
  Prng random(5);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const bool from_rank = random.Chance(1, 2);
    std::string frame = from_rank ? EncodeFrame(RandomFromRank(random, random.UpTo(9)))
                                  : EncodeFrame(RandomFromAgent(random, random.UpTo(9)));
    for (uint64_t flips = 1 + random.UpTo(3); flips > 0; --flips) {
      const size_t at = kFrameHeaderBytes + random.UpTo(frame.size() - kFrameHeaderBytes - 1);
      frame[at] = static_cast<char>(random.Chance(1, 2) ? random.UpTo(255) : frame[at] ^ (1 << random.UpTo(7)));
    }
    const Result<RankToAgent> as_rank = DecodeRankToAgent(Body(frame));
    const Result<AgentToRank> as_agent = DecodeAgentToRank(Body(frame));
    if (as_rank.ok()) {
      ASSERT_EQ(EncodeFrame(*as_rank), frame);
    }
    if (as_agent.ok()) {
      ASSERT_EQ(EncodeFrame(*as_agent), frame);
    }
    accepted += as_rank.ok() || as_agent.ok();
  }
  EXPECT_GT(accepted, 0);  // flips inside plain numbers stay valid
}

TEST(RankCodecTest, RandomBytesNeverCrash) {
  Prng random(6);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = RandomText(random, 100);
    if (bytes.size() >= 2) {  // a known type, so that bodies are reached
      bytes[0] = static_cast<char>(random.UpTo(9) + (random.Chance(1, 2) ? 1 : 101));
      bytes[1] = 0;
    }
    if (const auto m = DecodeRankToAgent(bytes); m.ok()) {
      ASSERT_EQ(Body(EncodeFrame(*m)), bytes);
    }
    if (const auto m = DecodeAgentToRank(bytes); m.ok()) {
      ASSERT_EQ(Body(EncodeFrame(*m)), bytes);
    }
  }
}

TEST(RankCodecTest, CountsBeyondTheBytesPresentAreRefusedBeforeAllocation) {
  // SnapshotStaged: state 16, shard 4, slot 4, bytes 8, then a count of tensors with none behind it.
  std::string bytes("\x07\0", 2);
  bytes.append(32, '\0');
  const uint32_t count = kWireTensorsMax;
  bytes.append(reinterpret_cast<const char*>(&count), 4);
  EXPECT_EQ(DecodeRankToAgent(bytes).status().code(), StatusCode::kInvalidArgument);
}

TEST(RankCodecTest, MessagesOverALimitEncodeToNothing) {
  EXPECT_TRUE(EncodeFrame(AgentToRank(StopRank{std::string(kWireStringBytesMax + 1, 'x')})).empty());
  EXPECT_FALSE(EncodeFrame(AgentToRank(StopRank{std::string(kWireStringBytesMax, 'x')})).empty());
  SnapshotStaged staged;
  staged.tensors.resize(kWireTensorsMax + 1);
  EXPECT_TRUE(EncodeFrame(RankToAgent(staged)).empty());
  staged.tensors.resize(1);
  staged.tensors[0].shape.resize(kWireDimensionsMax + 1);
  EXPECT_TRUE(EncodeFrame(RankToAgent(staged)).empty());
}

TEST(FrameReaderTest, FramesCutAnywhereComeOutWhole) {
  Prng random(7);
  std::string stream;
  std::vector<std::string> bodies;
  for (int i = 0; i < 200; ++i) {
    const std::string frame = EncodeFrame(RandomFromAgent(random, random.UpTo(9)));
    stream += frame;
    bodies.emplace_back(Body(frame));
  }
  FrameReader reader;
  size_t next = 0;
  for (size_t at = 0; at < stream.size();) {
    const size_t count = std::min<size_t>(1 + random.UpTo(300), stream.size() - at);
    reader.Append(std::string_view(stream).substr(at, count));
    at += count;
    while (true) {
      const auto frame = reader.Next();
      ASSERT_TRUE(frame.ok());
      if (!frame->has_value()) break;
      ASSERT_LT(next, bodies.size());
      ASSERT_EQ(**frame, bodies[next++]);
    }
  }
  EXPECT_EQ(next, bodies.size());
  EXPECT_EQ(reader.buffered_bytes(), 0u);
}

TEST(FrameReaderTest, ALengthOutOfRangeEndsTheStream) {
  for (const uint32_t length : {0u, 1u, static_cast<uint32_t>(kFrameBytesMax + 1), 0xffffffffu}) {
    FrameReader reader;
    reader.Append(std::string_view(reinterpret_cast<const char*>(&length), 4));
    EXPECT_EQ(reader.Next().status().code(), StatusCode::kInvalidArgument) << length;
    reader.Append(EncodeFrame(RankToAgent(RankJoin{})));
    EXPECT_FALSE(reader.Next().ok());
    EXPECT_EQ(reader.buffered_bytes(), 0u);
  }
}

}  // namespace
}  // namespace everstep
