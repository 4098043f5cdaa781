// Verdicts about one server, in tables of what was heard when.
#include "controller/core/detector/liveness.h"

#include <gtest/gtest.h>

namespace everstep {
namespace {

using Verdict = ServerLiveness::Verdict;

class LivenessTest : public ::testing::Test {
 protected:
  static Instant At(int64_t ms) { return Instant{Milliseconds(100000 + ms)}; }
  Verdict Judge(int64_t ms) const { return server_.Judge(At(ms), policy_); }
  Policy policy_;  // lease 1.5 s, probe 0.3 s, heartbeats each 0.25 s
  ServerLiveness server_{At(0), Incarnation(1)};
};

TEST_F(LivenessTest, IsLateAfterHalfALeaseAndSilentOnlyAfterAnUnansweredProbe) {
  EXPECT_EQ(Judge(0), Verdict::kAlive);
  EXPECT_EQ(Judge(750), Verdict::kAlive);
  EXPECT_EQ(Judge(751), Verdict::kLate);
  EXPECT_EQ(Judge(1499), Verdict::kLate);
  EXPECT_EQ(Judge(1500), Verdict::kProbeNow);
  server_.OnProbeStarted(At(1500), policy_);
  EXPECT_EQ(Judge(1799), Verdict::kLate);
  EXPECT_EQ(Judge(1800), Verdict::kSilent);
}

TEST_F(LivenessTest, AnswersOnTheStreamEndTheProbe) {
  server_.OnProbeStarted(At(1500), policy_);
  server_.OnStreamMessage(At(1600));
  EXPECT_EQ(Judge(1800), Verdict::kAlive);
  EXPECT_EQ(Judge(3100), Verdict::kProbeNow) << "the next silence asks anew";
}

TEST_F(LivenessTest, OnlyAHigherSequenceRenewsTheLease) {
  EXPECT_TRUE(server_.OnHeartbeat(5, At(1000)));
  EXPECT_FALSE(server_.OnHeartbeat(5, At(1400)));
  EXPECT_FALSE(server_.OnHeartbeat(4, At(1400)));
  EXPECT_EQ(Judge(1751), Verdict::kLate);
  EXPECT_TRUE(server_.OnHeartbeat(6, At(1800)));
  EXPECT_EQ(Judge(2500), Verdict::kAlive);
}

TEST_F(LivenessTest, AVoteExtendsTheLeaseButIsNoHeartbeat) {
  server_.OnVote(At(1400));
  EXPECT_EQ(Judge(1500), Verdict::kProbeNow);
  server_.OnProbeStarted(At(1500), policy_);
  EXPECT_EQ(Judge(2899), Verdict::kLate);
  EXPECT_EQ(Judge(2900), Verdict::kSilent);
}

TEST_F(LivenessTest, ALostStreamAsksThePortAtOnceAndDatagramsKeepTheServerAlive) {
  server_.OnStreamLost(At(100));
  EXPECT_EQ(Judge(100), Verdict::kProbeNow);
  server_.OnProbeStarted(At(100), policy_);
  EXPECT_EQ(Judge(101), Verdict::kAlive);
  for (int64_t ms = 250; ms <= 5000; ms += 250) {
    server_.OnHeartbeat(static_cast<uint64_t>(ms), At(ms));
    EXPECT_EQ(Judge(ms), Verdict::kAlive);
  }
  EXPECT_EQ(Judge(6500), Verdict::kSilent) << "no stream is left to ask over";
}

TEST_F(LivenessTest, APortThatAnswersWithoutAStreamIsAskedAgainSoon) {
  server_.OnStreamLost(At(100));
  server_.OnProbeStarted(At(100), policy_);
  server_.OnPortAnswered(At(110), policy_);
  EXPECT_EQ(Judge(120), Verdict::kAlive);
  EXPECT_EQ(server_.NextDeadline(At(120), policy_), At(135));
  EXPECT_EQ(Judge(135), Verdict::kProbeNow);
}

TEST_F(LivenessTest, AReconnectionForgetsTheProbes) {
  server_.OnStreamLost(At(100));
  server_.OnStreamConnected(At(200));
  EXPECT_EQ(Judge(300), Verdict::kAlive);
  EXPECT_TRUE(server_.connected());
}

TEST_F(LivenessTest, TheLoopsOwnLagIsNobodysSilence) {
  server_.OnLoopLag(Seconds(5));
  EXPECT_EQ(Judge(5700), Verdict::kAlive);
  server_.OnProbeStarted(At(6500), policy_);
  server_.OnLoopLag(Seconds(2));
  EXPECT_EQ(Judge(8600), Verdict::kLate) << "the answer may sit in the queue";
  EXPECT_EQ(Judge(8800), Verdict::kSilent);
}

// Whoever looks at the deadlines only must see each verdict when it comes true.
TEST_F(LivenessTest, NoVerdictChangesBetweenDeadlines) {
  server_.OnVote(At(400));
  Instant now = At(0);
  for (int i = 0; i < 20; ++i) {
    if (server_.Judge(now, policy_) == Verdict::kProbeNow) server_.OnProbeStarted(now, policy_);
    const Instant next = server_.NextDeadline(now, policy_);
    if (next == kNever) break;
    ASSERT_GT(next, now);
    EXPECT_EQ(server_.Judge(now, policy_), server_.Judge(next - Duration(1), policy_));
    now = next;
  }
  EXPECT_EQ(server_.Judge(now, policy_), Verdict::kSilent);
}

}  // namespace
}  // namespace everstep
