#include "checkpoint/io/staging_reader.h"

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include <gtest/gtest.h>

#include "tests/unit/checkpoint/snapshot_samples.h"
#include "tests/unit/checkpoint/staging_writer.h"

namespace everstep::checkpoint {
namespace {

const ProcessId kProcess(7);
const StateId kState{Step(10), Generation(1)};
const ShardIndex kShard(0);

std::shared_ptr<StagingReader> MustOpen(const StagingWriter& writer) {
  auto reader = StagingReader::Open(writer.Descriptor(), kProcess);
  EXPECT_TRUE(reader.ok()) << reader.status().ToString();
  return reader.ok() ? *reader : nullptr;
}

TEST(StagingReader, VerifiesAWholeSnapshot) {
  StagingWriter writer(kProcess);
  const std::vector<std::byte> bytes = RandomBytes(1, 100000);
  (void)writer.Stage(2, kState, kShard, bytes);
  const auto reader = MustOpen(writer);
  const auto slot = reader->Verify(2, kState, kShard);
  ASSERT_TRUE(slot.ok()) << slot.status().ToString();
  EXPECT_EQ(slot->digest, DigestOf(bytes));
  const auto view = reader->View(*slot);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(std::memcmp((*view)->bytes().data(), bytes.data(), bytes.size()), 0);
  EXPECT_TRUE(reader->Unchanged(*slot));
}

TEST(StagingReader, BelievesNoHeaderWhoseBytesDiffer) {
  StagingWriter writer(kProcess);
  (void)writer.Stage(0, kState, kShard, RandomBytes(1, 100000));
  writer.region(0)[50000] ^= std::byte{1};
  EXPECT_EQ(MustOpen(writer)->Verify(0, kState, kShard).status().code(), StatusCode::kDataLoss);
}

TEST(StagingReader, ATornSlotIsNotASnapshot) {
  StagingWriter writer(kProcess);
  const auto reader = MustOpen(writer);
  EXPECT_EQ(reader->Verify(0, kState, kShard).status().code(), StatusCode::kAborted);  // empty
  (void)writer.Stage(0, kState, kShard, RandomBytes(1, 1000));
  writer.Begin(0);
  EXPECT_EQ(reader->Verify(0, kState, kShard).status().code(), StatusCode::kAborted);  // being written
}

TEST(StagingReader, NoticesThatASlotMovedOn) {
  StagingWriter writer(kProcess);
  (void)writer.Stage(0, kState, kShard, RandomBytes(1, 1000));
  const auto reader = MustOpen(writer);
  const auto slot = reader->Verify(0, kState, kShard);
  ASSERT_TRUE(slot.ok());
  (void)writer.Stage(0, {Step(12), Generation(1)}, kShard, RandomBytes(2, 1000));
  EXPECT_FALSE(reader->Unchanged(*slot));
  EXPECT_EQ(reader->Verify(0, kState, kShard).status().code(), StatusCode::kAborted);
  EXPECT_TRUE(reader->Verify(0, {Step(12), Generation(1)}, kShard).ok());
}

TEST(StagingReader, FollowsNoPointerOutOfTheFile) {
  StagingWriter writer(kProcess);
  (void)writer.Stage(0, kState, kShard, RandomBytes(1, 1000));
  const auto reader = MustOpen(writer);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {uint64_t{1} << 40, 10}, {UINT64_MAX, 10}, {kStagingHeaderBytes, UINT64_MAX}, {0, 100}}) {
    writer.slot(0).byte_offset = offset;
    writer.slot(0).byte_count = bytes;
    EXPECT_EQ(reader->Verify(0, kState, kShard).status().code(), StatusCode::kDataLoss) << offset;
  }
  EXPECT_EQ(reader->ReadSlot(kStagingSlots).status().code(), StatusCode::kInvalidArgument);
}

TEST(StagingReader, ARankCanNotShrinkTheFileUnderItsReader) {
  StagingWriter writer(kProcess);
  (void)writer.Stage(0, kState, kShard, RandomBytes(1, 1000));
  const auto reader = MustOpen(writer);
  EXPECT_NE(ftruncate(writer.fd().get(), 0), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_TRUE(reader->Verify(0, kState, kShard).ok());
}

TEST(StagingReader, RefusesOtherMemory) {
  StagingWriter other_process(ProcessId(8));
  EXPECT_EQ(StagingReader::Open(other_process.Descriptor(), kProcess).status().code(),
            StatusCode::kFailedPrecondition);
  StagingWriter other_layout(kProcess);
  other_layout.block().version = 99;
  EXPECT_EQ(StagingReader::Open(other_layout.Descriptor(), kProcess).status().code(),
            StatusCode::kFailedPrecondition);
  StagingWriter unsealable(kProcess, MFD_CLOEXEC);
  EXPECT_EQ(StagingReader::Open(unsealable.Descriptor(), kProcess).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(StagingReader::Open(UniqueFd(), kProcess).status().code(), StatusCode::kFailedPrecondition);
  UniqueFd pipe_end(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(StagingReader::Open(std::move(pipe_end), kProcess).status().code(), StatusCode::kFailedPrecondition);
}

// A rank that overwrites its slot again and again, with pauses of random length: whatever verifies is a whole
// snapshot, and what was overwritten meanwhile is told from what is damaged.
TEST(StagingReader, NeverVerifiesAMixtureOfTwoSnapshots) {
  StagingWriter writer(kProcess);
  std::vector<std::vector<std::byte>> contents;
  for (uint64_t i = 0; i < 2; ++i) contents.push_back(RandomBytes(i, 1u << 18));
  const Digest128 digests[2] = {DigestOf(contents[0]), DigestOf(contents[1])};
  std::atomic<bool> stop{false};
  std::thread rank([&] {
    Prng random(1);
    for (int64_t step = 1; !stop; ++step) {
      (void)writer.Stage(0, {Step(step), Generation(1)}, kShard, contents[static_cast<size_t>(step % 2)]);
      for (uint64_t pause = random.UpTo(200); pause-- > 0;) std::this_thread::yield();
    }
  });
  const auto reader = MustOpen(writer);
  int verified = 0;
  int overwritten = 0;
  while (verified < 3 || overwritten < 3) {  // the test's own timeout bounds it
    const auto slot = reader->ReadSlot(0);
    if (!slot.ok()) {
      EXPECT_EQ(slot.status().code(), StatusCode::kAborted);
      ++overwritten;
      std::this_thread::yield();
      continue;
    }
    const auto checked = reader->Verify(0, slot->state, kShard);
    if (checked.ok()) {
      EXPECT_EQ(checked->digest, digests[checked->state.step.value % 2]);
      ++verified;
    } else {
      EXPECT_EQ(checked.status().code(), StatusCode::kAborted) << checked.status().ToString();
      ++overwritten;
    }
  }
  stop = true;
  rank.join();
}

}  // namespace
}  // namespace everstep::checkpoint
