#include "controller/io/store/ledger_convert.h"

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <set>

#include "everstep/storage/v1/ledger.pb.h"
#include "tests/unit/convert/fill_message.h"

namespace everstep {
namespace {

namespace disk = storage::v1;
using google::protobuf::util::MessageDifferencer;

TEST(LedgerConvert, KeepsEveryFieldOfEveryRecord) {
  std::set<size_t> seen;
  for (size_t choice = 0; choice < std::variant_size_v<Record>; ++choice) {
    testing::MessageFiller filler;
    disk::Record message;
    filler.Fill(&message, static_cast<int>(choice));
    const auto record = DecodeRecord(message.SerializeAsString());
    ASSERT_TRUE(record.ok()) << record.status().ToString() << message.DebugString();
    seen.insert(record->index());
    disk::Record again;
    ASSERT_TRUE(again.ParseFromString(EncodeRecord(*record)));
    EXPECT_TRUE(MessageDifferencer::Equals(message, again))
        << message.DebugString() << "\n---\n" << again.DebugString();
  }
  EXPECT_EQ(seen.size(), std::variant_size_v<Record>);  // each kind has a message of its own
}

TEST(LedgerConvert, KeepsEveryFieldOfTheState) {
  testing::MessageFiller filler;
  disk::LedgerSnapshot message;
  filler.Fill(&message, 0);
  const auto state = DecodeLedgerState(message.SerializeAsString());
  ASSERT_TRUE(state.ok()) << state.status().ToString();
  disk::LedgerSnapshot again;
  ASSERT_TRUE(again.ParseFromString(EncodeLedgerState(*state)));
  EXPECT_TRUE(MessageDifferencer::Equals(message, again))
      << message.DebugString() << "\n---\n" << again.DebugString();
}

TEST(LedgerConvert, KeepsTextsThatAreNotUtf8) {
  JobEnded ended;
  ended.job = JobUid("j");
  ended.outcome = JobState::kSucceeded;
  ended.message = std::string("\xff\x00\xfe", 3);
  ended.last_lines = {"\x80"};
  const auto record = DecodeRecord(EncodeRecord(ended));
  ASSERT_TRUE(record.ok());
  EXPECT_EQ(std::get<JobEnded>(*record).message, ended.message);
  EXPECT_EQ(std::get<JobEnded>(*record).last_lines, ended.last_lines);
}

TEST(LedgerConvert, SaysWhatIsWrongWithDamagedOrForeignBytes) {
  EXPECT_EQ(DecodeRecord("\xff\xff").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(DecodeLedgerState("\xff\xff").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(DecodeRecord("").status().code(), StatusCode::kDataLoss);  // no version
  disk::Record future;
  future.set_format_version(kLedgerFormatVersion + 1);
  EXPECT_EQ(DecodeRecord(future.SerializeAsString()).status().code(), StatusCode::kFailedPrecondition);
  disk::Record unknown;
  unknown.set_format_version(kLedgerFormatVersion);
  EXPECT_EQ(DecodeRecord(unknown.SerializeAsString()).status().code(), StatusCode::kDataLoss);
  disk::LedgerSnapshot unordered;
  unordered.set_format_version(kLedgerFormatVersion);
  for (int i : {2, 1}) unordered.add_jobs()->add_lineage()->set_generation(i);
  auto* job = unordered.mutable_jobs(0);
  job->set_fence_reason("");
  job->add_lineage()->set_generation(1);
  EXPECT_EQ(DecodeLedgerState(unordered.SerializeAsString()).status().code(), StatusCode::kDataLoss);
}

}  // namespace
}  // namespace everstep
