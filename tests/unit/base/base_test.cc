// Status, reasons and the generator of random numbers.
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "proto/base/prng.h"
#include "proto/base/reason.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep {
namespace {

TEST(StatusTest, CarriesItsCodeAndMessage) {
  EXPECT_TRUE(OkStatus().ok());
  EXPECT_EQ(OkStatus().ToString(), "OK");
  const Status aborted = Aborted("generation 3 is over");
  EXPECT_FALSE(aborted.ok());
  EXPECT_EQ(aborted.code(), StatusCode::kAborted);
  EXPECT_EQ(aborted.ToString(), "ABORTED: generation 3 is over");
}

TEST(StatusTest, EveryCodeHasItsCanonicalNumberAndName) {
  EXPECT_EQ(static_cast<int>(StatusCode::kUnavailable), 14);
  EXPECT_EQ(static_cast<int>(StatusCode::kDataLoss), 15);
  std::set<std::string> names;
  for (int code = 0; code <= 15; ++code) {
    EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(code)) == std::string("UNKNOWN"), code == 2) << code;
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), 16u);
}

Result<int> Half(int value) {
  if (value % 2 != 0) return InvalidArgument("odd");
  return value / 2;
}

Result<int> Quarter(int value) {
  EVERSTEP_ASSIGN_OR_RETURN(const int half, Half(value));
  return Half(half);
}

TEST(ResultTest, HoldsAValueOrTheReasonWhyThereIsNone) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_TRUE(Quarter(12).status().ok());
  EXPECT_EQ(Quarter(6).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Quarter(3).status().message(), "odd");
}

TEST(ResultDeathTest, AValueThatIsNotThereIsABrokenInvariant) {
  EXPECT_DEATH({ Result<int> none = Half(3); (void)none.value(); }, "CHECK failed");
}

TEST(ReasonTest, EveryReasonHasAUniqueNameThatReadsBackAndASentence) {
  std::set<std::string_view> names;
  for (uint16_t i = 0; i < static_cast<uint16_t>(Reason::kCount); ++i) {
    const auto reason = static_cast<Reason>(i);
    const std::string_view name = ReasonName(reason);
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(ReasonFromName(name), reason);
    EXPECT_FALSE(ReasonText(reason).empty()) << name;
    EXPECT_NE(ReasonText(reason).back(), '.') << name;
    for (char c : name) EXPECT_TRUE((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) << name;
  }
  EXPECT_EQ(ReasonFromName("NoSuchReason"), std::nullopt);
  EXPECT_EQ(ReasonName(Reason::kCount), "Unknown");
}

// The ledger holds reasons as numbers: their order must never change.
TEST(ReasonTest, NumbersStayWhatTheyAre) {
  EXPECT_EQ(static_cast<int>(Reason::kNone), 0);
  EXPECT_EQ(static_cast<int>(Reason::kProcessExited), 1);
  EXPECT_EQ(static_cast<int>(Reason::kServerSilent), 4);
  EXPECT_EQ(static_cast<int>(Reason::kJobStarted), 19);
  EXPECT_EQ(static_cast<int>(Reason::kMassSilence), 31);
}

TEST(PrngTest, ASeedMeansTheSameNumbersEverywhere) {
  Prng prng(1);
  EXPECT_EQ(prng.Next(), 0xb3f2af6d0fc710c5u);
  EXPECT_EQ(prng.Next(), 0x853b559647364ceau);
  Prng same(1), other(2);
  EXPECT_EQ(same.Next(), 0xb3f2af6d0fc710c5u);
  EXPECT_NE(other.Next(), 0xb3f2af6d0fc710c5u);
}

TEST(PrngTest, BoundsAreInclusiveAndReached) {
  Prng prng(7);
  std::set<uint64_t> up;
  std::set<int64_t> between;
  for (int i = 0; i < 500; ++i) {
    up.insert(prng.UpTo(4));
    between.insert(prng.Between(-2, 2));
  }
  EXPECT_EQ(up, (std::set<uint64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(between, (std::set<int64_t>{-2, -1, 0, 1, 2}));
  EXPECT_EQ(prng.UpTo(0), 0u);
  EXPECT_TRUE(prng.Chance(1, 1));
  EXPECT_FALSE(prng.Chance(0, 5));
  (void)prng.UpTo(UINT64_MAX);
}

TEST(PrngTest, ChanceIsAboutWhatItSays) {
  Prng prng(3);
  int hits = 0;
  for (int i = 0; i < 10000; ++i) hits += prng.Chance(1, 4) ? 1 : 0;
  EXPECT_NEAR(hits, 2500, 200);
}

TEST(PrngTest, AForkIsAStreamOfItsOwn) {
  Prng a(5), b(5);
  Prng fork_a = a.Fork(), fork_b = b.Fork();
  EXPECT_EQ(fork_a.Next(), fork_b.Next());
  EXPECT_NE(fork_a.Next(), a.Next());
}

TEST(TimeTest, ConvertsForPeople) {
  EXPECT_DOUBLE_EQ(ToMilliseconds(Microseconds(1500)), 1.5);
  EXPECT_DOUBLE_EQ(ToSeconds(Milliseconds(2500)), 2.5);
  EXPECT_GT(kNever, Instant{Seconds(1000000000)});
}

}  // namespace
}  // namespace everstep
