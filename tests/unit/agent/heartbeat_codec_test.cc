#include "proto/model/heartbeat_codec.h"

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep {
namespace {

constexpr uint64_t kKeyId = 77;

HeartbeatKey Key(uint8_t first) {
  HeartbeatKey key{};
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(first + i);
  return key;
}

HeartbeatKeyLookup Knows(const HeartbeatKey& key) {
  return [&key](uint64_t id) { return id == kKeyId ? &key : nullptr; };
}

Heartbeat Example(size_t votes) {
  Heartbeat heartbeat;
  heartbeat.server = ServerId("s03");
  heartbeat.incarnation = Incarnation(5);
  heartbeat.sequence = 900;
  heartbeat.loop_counter = 123456789012345;
  heartbeat.acted = CommandSequence(42);
  for (size_t i = 0; i < votes; ++i) {
    heartbeat.votes.push_back({ProcessId(1000 + i), Generation(9), Step(static_cast<int64_t>(70000 + i)),
                               RankPhase::kApplying});
  }
  return heartbeat;
}

TEST(HeartbeatCodec, ReturnsWhatWasEncoded) {
  const HeartbeatKey key = Key(1);
  const std::string bytes = EncodeHeartbeat(Example(3), kKeyId, key);
  auto decoded = DecodeHeartbeat(bytes, Knows(key));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->key_id, kKeyId);
  EXPECT_EQ(decoded->heartbeat.server, ServerId("s03"));
  EXPECT_EQ(decoded->heartbeat.incarnation, Incarnation(5));
  EXPECT_EQ(decoded->heartbeat.sequence, 900u);
  EXPECT_EQ(decoded->heartbeat.loop_counter, 123456789012345u);
  EXPECT_EQ(decoded->heartbeat.acted, CommandSequence(42));
  ASSERT_EQ(decoded->heartbeat.votes.size(), 3u);
  EXPECT_EQ(decoded->heartbeat.votes[2].process, ProcessId(1002));
  EXPECT_EQ(decoded->heartbeat.votes[2].generation, Generation(9));
  EXPECT_EQ(decoded->heartbeat.votes[2].step, Step(70002));
  EXPECT_EQ(decoded->heartbeat.votes[2].phase, RankPhase::kApplying);
}

TEST(HeartbeatCodec, CarriesSixtyFourVotesOfOrdinarySize) {
  const HeartbeatKey key = Key(1);
  const std::string bytes = EncodeHeartbeat(Example(kHeartbeatVotesMax), kKeyId, key);
  EXPECT_LE(bytes.size(), kHeartbeatBytesMax);
  auto decoded = DecodeHeartbeat(bytes, Knows(key));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(decoded->heartbeat.votes.size(), kHeartbeatVotesMax);
}

TEST(HeartbeatCodec, LeavesOutVotesThatDoNotFit) {
  const HeartbeatKey key = Key(1);
  Heartbeat heartbeat = Example(0);
  heartbeat.server = ServerId(std::string(kHeartbeatNameBytesMax + 50, 'n'));
  for (int i = 0; i < 200; ++i) {
    heartbeat.votes.push_back({ProcessId(UINT64_MAX), Generation(UINT64_MAX), Step(INT64_MAX),
                               RankPhase::kVoting});
  }
  const std::string bytes = EncodeHeartbeat(heartbeat, kKeyId, key);
  EXPECT_LE(bytes.size(), kHeartbeatBytesMax);
  auto decoded = DecodeHeartbeat(bytes, Knows(key));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->heartbeat.server.value.size(), kHeartbeatNameBytesMax);
  EXPECT_GE(decoded->heartbeat.votes.size(), 30u);
  EXPECT_EQ(decoded->heartbeat.votes[0].process, ProcessId(UINT64_MAX));
  EXPECT_EQ(decoded->heartbeat.votes[0].step, Step(INT64_MAX));
}

TEST(HeartbeatCodec, TellsUnknownKeyFromWrongCode) {
  const HeartbeatKey key = Key(1), other = Key(2);
  EXPECT_EQ(DecodeHeartbeat(EncodeHeartbeat(Example(1), kKeyId + 1, key), Knows(key)).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(DecodeHeartbeat(EncodeHeartbeat(Example(1), kKeyId, other), Knows(key)).status().code(),
            StatusCode::kPermissionDenied);
}

TEST(HeartbeatCodec, RefusesEveryFlippedBit) {
  const HeartbeatKey key = Key(1);
  const std::string bytes = EncodeHeartbeat(Example(4), kKeyId, key);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string bad = bytes;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(DecodeHeartbeat(bad, Knows(key)).ok()) << "bit " << bit;
  }
}

TEST(HeartbeatCodec, RefusesEveryTruncation) {
  const HeartbeatKey key = Key(1);
  const std::string bytes = EncodeHeartbeat(Example(4), kKeyId, key);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeHeartbeat(std::string_view(bytes).substr(0, size), Knows(key)).ok()) << size;
  }
  EXPECT_FALSE(DecodeHeartbeat(bytes + "x", Knows(key)).ok());
}

TEST(HeartbeatCodec, SurvivesGarbage) {
  const HeartbeatKey key = Key(1);
  Prng prng(20261201);
  const std::string good = EncodeHeartbeat(Example(4), kKeyId, key);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(prng.UpTo(1300), '\0');
    for (char& c : bytes) c = static_cast<char>(prng.Next());
    // Half of them with a genuine header, so that parsing gets as far as the code.
    if (prng.Chance(1, 2)) bytes.replace(0, std::min(bytes.size(), good.size() / 2), good, 0, good.size() / 2);
    EXPECT_FALSE(DecodeHeartbeat(bytes, Knows(key)).ok()) << "seed 20261201, round " << round;
  }
}

}  // namespace
}  // namespace everstep
