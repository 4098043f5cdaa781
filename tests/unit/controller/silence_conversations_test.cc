// Mass silence: the controller doubts itself first, and still ends a true loss in a recovery.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "tests/unit/controller/fake_cluster.h"

namespace everstep::testing {
namespace {

std::string Name(int i) { return fmt::format("s{}", i); }

TEST(MassSilence, FreezesAndReleasesWhenServersAreHeardAgain) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 7));
  c.StepTo(job, 1);
  for (int i = 1; i <= 6; ++i) c.FreezeServer(Name(i));
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  EXPECT_EQ(c.Count("notice Most servers fell silent"), 1);
  EXPECT_TRUE(c.core().MakeView({c.now(), {}}).frozen);
  for (int i = 1; i <= 6; ++i) c.Wake(Name(i));
  c.Advance(Seconds(2));
  EXPECT_EQ(c.Count("notice Freeze ended"), 1);
  EXPECT_FALSE(c.core().MakeView({c.now(), {}}).frozen);
  EXPECT_EQ(c.Fenced(job), 1u) << "the job was never touched";
}

TEST(MassSilence, ATrueLossOfMostServersEndsInARecovery) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 7, 2));
  c.StepTo(job, 1);
  for (int i = 1; i <= 6; ++i) c.FreezeServer(Name(i));
  c.Advance(Seconds(12));
  EXPECT_EQ(c.Count("append ServerDied"), 6);
  EXPECT_EQ(c.Count("notice Freeze ended"), 1);
  EXPECT_EQ(c.State(job), JobState::kRunning);
  EXPECT_EQ(c.Places(job).size(), 2u);
}

TEST(MassSilence, HoldsAlthoughStreamsBreakAndDatagramsAreNotInStep) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 7));
  c.StepTo(job, 1);
  // Each falls silent at its own moment of the same quarter second, and the streams are reset, too.
  for (int i = 1; i <= 6; ++i) {
    c.Beat(Name(i));
    c.FreezeServer(Name(i));
    c.Disconnect(Name(i));
    c.Advance(Milliseconds(40));
  }
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  EXPECT_EQ(c.Fenced(job), 1u);
}

TEST(MassSilence, IsNeverReleasedWhileVotesAdvance) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 7));
  c.StepTo(job, 1);
  for (int i = 1; i <= 6; ++i) c.FreezeServer(Name(i));
  for (int64_t step = 2; step <= 40; ++step) {
    c.StepTo(job, step);  // the datagrams of s7 say that everybody voted
    c.Advance(Milliseconds(500));
  }
  EXPECT_EQ(c.Count("append ServerDied"), 0);
}

TEST(MassSilence, ProofOverridesTheBrake) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 7, 3));
  c.StepTo(job, 1);
  for (int i = 1; i <= 6; ++i) c.FreezeServer(Name(i));
  c.Advance(Seconds(3));
  ASSERT_EQ(c.Count("append ServerDied"), 0);
  c.Agent("s1").probe = ProbeOutcome::kRefused;
  c.Disconnect("s1");
  EXPECT_EQ(c.Count("append ServerDied s1 1 ServerRefused"), 1);
}

TEST(MassSilence, AFewSilentServersAreNoMass) {
  FakeCluster c;
  c.AddServers(8);
  const JobUid job = c.Run(Spec("train", 6, 2));
  c.StepTo(job, 1);
  c.FreezeServer("s1");
  c.FreezeServer("s2");
  c.Advance(Seconds(3));
  EXPECT_EQ(c.Count("append ServerDied"), 2);
  EXPECT_EQ(c.State(job), JobState::kRunning);
}

TEST(LoopLag, TheLoopsOwnDelayCostsNobodyTheLease) {
  FakeCluster c;
  c.AddServers(3);
  const JobUid job = c.Run(Spec("train", 2));
  c.StepTo(job, 1);
  c.Advance(Seconds(5));
  c.Feed(LoopLagged{Seconds(10)});
  c.FreezeServer("s1");
  c.Advance(Seconds(9));
  EXPECT_EQ(c.Count("append ServerDied"), 0);
  c.Advance(Seconds(4));
  EXPECT_EQ(c.Count("append ServerDied s1"), 1);
}

}  // namespace
}  // namespace everstep::testing
