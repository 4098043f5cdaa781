#include "checkpoint/store/record_codec.h"

#include <gtest/gtest.h>

#include "proto/base/prng.h"
#include "tests/unit/checkpoint/snapshot_samples.h"

namespace everstep::checkpoint {
namespace {

ShardManifest SampleManifest() {
  Sample sample = SampleOf(7, RandomBytes(1, kChunkBytes + 5));
  sample.tensors[0].offsets = {0};
  sample.tensors[0].shape = {100};
  sample.tensors[0].bytes = 100;
  sample.tensors[0].buffer_offset = 64;
  return {sample.info, sample.tensors,
          {{Epoch(3), {1, 2}, kChunkBytes}, {Epoch(4), {3, 4}, 5}}};
}

TEST(RecordCodec, ReadsBackWhatItWrote) {
  const ShardManifest manifest = SampleManifest();
  const auto back = DecodeManifest(EncodeManifest(manifest));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(*back, manifest);
}

TEST(RecordCodec, NoticesEveryFlippedBit) {
  const std::string record = EncodeManifest(SampleManifest());
  for (size_t bit = 0; bit < record.size() * 8; ++bit) {
    std::string bad = record;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_EQ(DecodeManifest(bad).status().code(), StatusCode::kDataLoss) << "bit " << bit;
  }
}

TEST(RecordCodec, NoticesEveryTruncation) {
  const std::string record = EncodeManifest(SampleManifest());
  for (size_t size = 0; size < record.size(); ++size) {
    EXPECT_EQ(DecodeManifest(record.substr(0, size)).status().code(), StatusCode::kDataLoss) << "size " << size;
  }
}

// Noise with a valid checksum reaches the reader itself: it must refuse without reading past the end or allocating
// what a count promises.
TEST(RecordCodec, RefusesNoiseBehindAValidChecksum) {
  const std::string good = EncodeManifest(SampleManifest());
  int accepted = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Prng random(seed);
    std::string body = good.substr(0, good.size() - 8);
    for (uint64_t flips = 1 + random.UpTo(4); flips-- > 0;) {
      body[random.UpTo(body.size() - 1)] = static_cast<char>(random.Next());
    }
    if (random.Chance(1, 3)) body.resize(random.UpTo(body.size()));
    RecordWriter record;
    for (const char byte : body) record.Put(static_cast<uint8_t>(byte));
    record.PutChecksum();
    const auto decoded = DecodeManifest(record.bytes());
    if (!decoded.ok()) continue;
    ++accepted;  // a change of a number that means something else is not noise to a codec
    EXPECT_EQ(EncodeManifest(*decoded), record.bytes());
  }
  EXPECT_LT(accepted, 3000);
}

TEST(RecordCodec, ATensorOutsideItsBufferIsInvalid) {
  Sample sample = SampleOf(1, RandomBytes(1, 100));
  sample.tensors[0].buffer_offset = 1;
  EXPECT_EQ(ValidateTensors(sample.tensors, 100).code(), StatusCode::kInvalidArgument);
  sample.tensors[0].buffer_offset = UINT64_MAX;
  EXPECT_EQ(ValidateTensors(sample.tensors, 100).code(), StatusCode::kInvalidArgument);
}

TEST(Digest, PiecesGiveTheDigestOfTheWhole) {
  const std::vector<std::byte> bytes = RandomBytes(5, 100000);
  Digester digester;
  for (size_t at = 0; at < bytes.size(); at += 777) {
    digester.Add(std::span(bytes).subspan(at, std::min<size_t>(777, bytes.size() - at)));
  }
  EXPECT_EQ(digester.Finish(), DigestOf(bytes));
  EXPECT_EQ(DigestText({0x1, 0xab}), "00000000000000ab0000000000000001");
}

}  // namespace
}  // namespace everstep::checkpoint
