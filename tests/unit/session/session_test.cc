// Sessions over real sockets and a real mesh, against an agent played by the test: membership changes at every phase of
// a step, and the state afterwards is that of a run without failures.
#include "worker/client/session.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/unit/session/toy_job.h"

namespace everstep {
namespace {

using Clock = std::chrono::steady_clock;

StateId State(int64_t step, uint64_t generation) { return {Step(step), Generation(generation)}; }
Place Initialize(ToyRank& rank) { return {&rank, RestoreAction::kInitialize}; }
Place Keep(ToyRank& rank) { return {&rank, RestoreAction::kKeep}; }
Place RollForward(ToyRank& rank) { return {&rank, RestoreAction::kRollForward}; }
Place FetchFrom(ToyRank& rank, int source) { return {&rank, RestoreAction::kFetchFromRank, source}; }

void ExpectFinal(const ToyRank& rank, int64_t steps) {
  EXPECT_TRUE(rank.outcome.ok()) << rank.outcome.ToString();
  for (size_t i = 0; i < ToyRank::kElements; ++i) ASSERT_EQ(rank.state[i], ToyRank::Expected(steps, i)) << i;
}

TEST(SessionTest, RanksJoinStepAndFinish) {
  ToyRank a(1, {}), b(2, {});
  a.agent.Expect<RankJoin>();
  b.agent.Expect<RankJoin>();
  const auto ready = Form(1, {}, {Initialize(a), Initialize(b)});
  EXPECT_EQ(ready[0].shard_digest, ready[1].shard_digest);
  EXPECT_NE(ready[0].shard_digest, Digest128{});
  a.agent.Expect<RankFinished>();
  b.agent.Expect<RankFinished>();
  a.Wait();
  b.Wait();
  ExpectFinal(a, 10);
  ExpectFinal(b, 10);
  EXPECT_EQ(a.phase(), RankPhase::kFinished);
  EXPECT_EQ(a.memberships[0].next_step, Step(1));
  EXPECT_EQ(a.memberships[0].micro_batch_count, 2);
}

TEST(SessionTest, ALostRankIsReplacedFromALiveCopy) {
  ToyRank a(1, {}), b(2, {.at = [](Point point, int64_t step) { return point != Point::kBeforeReduce || step != 4; }});
  ToyRank standby(3, {});
  for (ToyRank* rank : {&a, &b, &standby}) rank->agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a), Initialize(b)});
  const RankFailed failed = a.agent.Expect<RankFailed>();  // b died at step 4
  EXPECT_EQ(failed.suspect, Rank(1));
  a.agent.Send(FenceRank{Generation(2)});
  const CollectAnswer answer = a.agent.Expect<CollectAnswer>();
  EXPECT_EQ(answer.report, (RankReport{true, State(3, 1), Generation(0)}));
  const auto ready = Form(2, State(3, 1), {Keep(a), FetchFrom(standby, 0)});
  EXPECT_EQ(ready[0].restored_from, "kept");
  EXPECT_EQ(ready[1].restored_from, "rank 0");
  EXPECT_EQ(ready[1].bytes_restored, ToyRank::kElements * sizeof(double));
  a.agent.Expect<RankFinished>();
  standby.agent.Expect<RankFinished>();
  a.Wait();
  standby.Wait();
  ExpectFinal(a, 10);
  ExpectFinal(standby, 10);
  EXPECT_EQ(a.applied, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(standby.applied, (std::vector<int64_t>{4, 5, 6, 7, 8, 9, 10}));
}

TEST(SessionTest, AFenceFreesARankThatIsBlockedInACollective) {
  Gate gate, a_came;
  a_came.Open();
  ToyRank a(1, {.at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeReduce && step == 3) a_came.Pass();
    return true;
  }});
  ToyRank b(2, {.at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeReduce && step == 3) gate.Pass();
    return true;
  }});
  a.agent.Expect<RankJoin>();
  b.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a), Initialize(b)});
  a_came.Await();
  gate.Await();  // b computes for long; a is in the all-reduce of step 3, or about to be
  EXPECT_FALSE(b.generation_over());
  const Clock::time_point fenced = Clock::now();
  a.agent.Send(FenceRank{Generation(2)});
  EXPECT_EQ(a.agent.Expect<CollectAnswer>().report, (RankReport{true, State(2, 1), Generation(0)}));
  b.agent.Send(FenceRank{Generation(2)});
  EXPECT_EQ(b.agent.Expect<CollectAnswer>().report, (RankReport{true, State(2, 1), Generation(0)}));
  EXPECT_TRUE(b.generation_over()) << "its program may stop computing";
  // b answered though its program still computes.
  EXPECT_LT(Clock::now() - fenced, std::chrono::seconds(2));
  SendAssignment(Assign(2, State(2, 1), {Keep(a), Keep(b)}), {Keep(a), Keep(b)});
  gate.Open();
  for (ToyRank* rank : {&a, &b}) {
    rank->agent.Expect<RankConnected>();
    rank->agent.Expect<RankReady>();
  }
  for (ToyRank* rank : {&a, &b}) rank->agent.Send(ResumeRank{Generation(2), Step(0)});
  a.agent.Expect<RankFinished>();
  b.agent.Expect<RankFinished>();
  a.Wait();
  b.Wait();
  ExpectFinal(a, 10);
  ExpectFinal(b, 10);
}

TEST(SessionTest, AStepWhoseVotePassedIsRolledForwardByWhoHoldsItsGradients) {
  Gate a_computed, before_commit;
  ToyRank a(1, {.at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeCommit && step == 5) a_computed.Pass();
    return true;
  }});
  ToyRank b(2, {.at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeCommit && step == 5) before_commit.Pass();
    return true;
  }});
  a.agent.Expect<RankJoin>();
  b.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a), Initialize(b)});
  before_commit.Await();
  a_computed.Await();
  a_computed.Open();
  // b is fenced while it holds step 5's gradients and has not voted; a waits for its vote and is fenced later.
  b.agent.Send(FenceRank{Generation(2)});
  EXPECT_EQ(b.agent.Expect<CollectAnswer>().report, (RankReport{true, State(4, 1), Generation(1)}));
  a.agent.Expect<RankFailed>();  // b's connections closed under its vote
  a.agent.Send(FenceRank{Generation(2)});
  EXPECT_EQ(a.agent.Expect<CollectAnswer>().report, (RankReport{true, State(4, 1), Generation(1)}));
  before_commit.Open();
  // The controller has proof (a third rank's page, say) that the vote passed: both roll forward.
  const auto ready = Form(2, State(5, 1), {RollForward(a), RollForward(b)});
  EXPECT_EQ(ready[0].restored_from, "rolled-forward");
  a.agent.Expect<RankFinished>();
  b.agent.Expect<RankFinished>();
  a.Wait();
  b.Wait();
  ExpectFinal(a, 10);
  ExpectFinal(b, 10);
  EXPECT_EQ(a.rolled, (std::vector<int64_t>{5}));
  EXPECT_EQ(b.rolled, (std::vector<int64_t>{5}));
}

TEST(SessionTest, AnUndecidedStepIsDiscardedAndComputedAgain) {
  Gate before_commit;
  std::atomic<int> passes{0};
  const auto hold = [&](Point point, int64_t step) {
    if (point == Point::kBeforeCommit && step == 5 && passes.fetch_add(1) < 2) before_commit.Pass();
    return true;
  };
  ToyRank a(1, {.at = hold}), b(2, {.at = hold});
  a.agent.Expect<RankJoin>();
  b.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a), Initialize(b)});
  before_commit.Await(2);
  for (ToyRank* rank : {&a, &b}) {
    rank->agent.Send(FenceRank{Generation(2)});
    EXPECT_EQ(rank->agent.Expect<CollectAnswer>().report, (RankReport{true, State(4, 1), Generation(1)}));
  }
  before_commit.Open();
  Form(2, State(4, 1), {Keep(a), Keep(b)});
  a.agent.Expect<RankFinished>();
  b.agent.Expect<RankFinished>();
  a.Wait();
  b.Wait();
  ExpectFinal(a, 10);
  ExpectFinal(b, 10);
  EXPECT_TRUE(a.rolled.empty());
}

TEST(SessionTest, AFenceDuringApplyIsAnsweredAfterIt) {
  Gate in_apply;
  ToyRank a(1, {.at = [&](Point point, int64_t step) {
    if (point == Point::kInApply && step == 2) in_apply.Pass();
    return true;
  }});
  a.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a)});
  in_apply.Await();
  EXPECT_EQ(a.phase(), RankPhase::kApplying);
  a.agent.Send(FenceRank{Generation(2)});
  a.agent.Send(FenceRank{Generation(1)});  // stale, and counted once both were read
  a.AwaitStaleRefused(1);
  in_apply.Open();
  EXPECT_EQ(a.agent.Expect<CollectAnswer>().report, (RankReport{true, State(2, 1), Generation(0)}));
  Form(2, State(2, 1), {Keep(a)});
  a.agent.Expect<RankFinished>();
  a.Wait();
  ExpectFinal(a, 10);
}

TEST(SessionTest, APlannedSwitchLosesNoStepAndGrowsTheJob) {
  Gate gate;
  ToyRank a(1, {.at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeReduce && step == 4) gate.Pass();
    return true;
  }});
  ToyRank b(2, {}), c(3, {});
  for (ToyRank* rank : {&a, &b, &c}) rank->agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a), Initialize(b)});
  gate.Await();
  b.agent.Send(PrepareSwitch{Generation(2)});  // one rank's word is enough
  // A second copy of the assignment is answered at once, so the message before it was read.
  b.agent.Send(AssignRank{Assign(1, {}, {Initialize(a), Initialize(b)}), Rank(1)});
  b.agent.Expect<RankConnected>();
  b.agent.Expect<RankReady>();
  gate.Open();
  const CollectAnswer left_a = a.agent.Expect<CollectAnswer>(), left_b = b.agent.Expect<CollectAnswer>();
  EXPECT_TRUE(left_a.planned);
  EXPECT_TRUE(left_b.planned);
  EXPECT_EQ(left_a.generation, Generation(2));
  EXPECT_EQ(left_a.report, left_b.report);
  EXPECT_EQ(left_a.report, (RankReport{true, State(4, 1), Generation(0)}));
  const auto ready = Form(2, State(4, 1), {Keep(a), Keep(b), FetchFrom(c, 1)});
  EXPECT_EQ(ready[2].restored_from, "rank 1");
  for (ToyRank* rank : {&a, &b, &c}) rank->agent.Expect<RankFinished>();
  for (ToyRank* rank : {&a, &b, &c}) rank->Wait();
  for (ToyRank* rank : {&a, &b, &c}) ExpectFinal(*rank, 10);
  EXPECT_EQ(a.applied, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(a.memberships[1].world_size, 3);
  EXPECT_EQ(a.memberships[1].micro_batch_count, 2);
}

TEST(SessionTest, SeveralReceiversOfOneSourceShareAChain) {
  ToyRank a(1, {.steps = 6}), b(2, {.steps = 6}), c(3, {.steps = 6}), d(4, {.steps = 6});
  const std::vector<ToyRank*> all = {&a, &b, &c, &d};
  for (ToyRank* rank : all) rank->agent.Expect<RankJoin>();
  // Only a initializes; the others copy from it before the first step.
  const auto ready = Form(1, {}, {Initialize(a), FetchFrom(b, 0), FetchFrom(c, 0), FetchFrom(d, 0)});
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(ready[i].shard_digest, ready[0].shard_digest);
  for (ToyRank* rank : all) rank->agent.Expect<RankFinished>();
  for (ToyRank* rank : all) rank->Wait();
  for (ToyRank* rank : all) ExpectFinal(*rank, 6);
}

TEST(SessionTest, ReplicasThatDifferDoNotResume) {
  ToyRank a(1, {}), b(2, {}), c(3, {.initial_error = 1});
  for (ToyRank* rank : {&a, &b, &c}) rank->agent.Expect<RankJoin>();
  const std::vector<Place> places = {Initialize(a), Initialize(b), Initialize(c)};
  SendAssignment(Assign(1, {}, places), places);
  for (ToyRank* rank : {&a, &b, &c}) {
    rank->agent.Expect<RankConnected>();
    const RankFailed failed = rank->agent.Expect<RankFailed>();
    EXPECT_EQ(failed.code, StatusCode::kDataLoss);
    EXPECT_NE(failed.message.find("ranks 0 and 2 hold different bytes of shard 0"), std::string::npos) << failed.message;
  }
  // The next generation copies instead.
  for (ToyRank* rank : {&a, &b, &c}) {
    rank->agent.Send(FenceRank{Generation(2)});
    rank->agent.Expect<CollectAnswer>();
  }
  Form(2, {}, {Keep(a), FetchFrom(b, 0), FetchFrom(c, 0)});
  for (ToyRank* rank : {&a, &b, &c}) rank->agent.Expect<RankFinished>();
  for (ToyRank* rank : {&a, &b, &c}) rank->Wait();
  for (ToyRank* rank : {&a, &b, &c}) ExpectFinal(*rank, 10);
}

// ---- snapshots

struct StagedBytes {
  SnapshotStaged message;
  int fd = -1;
  Digest128 digest{};
  uint64_t offset = 0;
};

// Reads a slot as an agent does, and makes a file of its own of the buffer.
StagedBytes CopyOut(const ToyRank& rank, const SnapshotStaged& staged) {
  StagedBytes bytes{staged};
  StagingSuperblock block;
  EXPECT_EQ(pread(rank.staging_fd(), static_cast<void*>(&block), sizeof block, 0), static_cast<ssize_t>(sizeof block));
  EXPECT_EQ(block.magic, kStagingMagic);
  EXPECT_EQ(block.process, rank.process().value);
  const StagingSlot& slot = block.slots[staged.slot];
  EXPECT_EQ(slot.sequence.load() % 2, 0u);
  EXPECT_EQ(slot.state_step, staged.state.step.value);
  EXPECT_EQ(slot.byte_count, staged.bytes);
  std::string table(slot.table_bytes, '\0');
  EXPECT_EQ(pread(rank.staging_fd(), table.data(), table.size(), static_cast<off_t>(slot.table_offset)),
            static_cast<ssize_t>(table.size()));
  FrameReader reader;
  reader.Append(table);
  const auto frame = reader.Next();
  EXPECT_TRUE(frame.ok() && frame->has_value());
  const auto decoded = DecodeRankToAgent(**frame);
  EXPECT_TRUE(decoded.ok());
  EXPECT_EQ(std::get<SnapshotStaged>(*decoded).tensors, staged.tensors);
  std::string buffer(slot.byte_count, '\0');
  EXPECT_EQ(pread(rank.staging_fd(), buffer.data(), buffer.size(), static_cast<off_t>(slot.byte_offset)),
            static_cast<ssize_t>(buffer.size()));
  bytes.fd = memfd_create("copy", MFD_CLOEXEC);
  EXPECT_EQ(write(bytes.fd, buffer.data(), buffer.size()), static_cast<ssize_t>(buffer.size()));
  bytes.digest = {slot.digest[0], slot.digest[1]};
  return bytes;
}

TEST(SessionTest, AStagedSnapshotRestoresAnotherProcessAndABadCopyFallsToTheNext) {
  StagedBytes staged;
  {
    ToyRank a(1, {.steps = 4, .staging = true, .snapshot_every = 4});
    a.agent.Expect<RankJoin>();
    Form(1, {}, {Initialize(a)});
    const SnapshotStaged message = a.agent.Expect<SnapshotStaged>();
    EXPECT_EQ(message.state, State(4, 1));
    ASSERT_EQ(message.tensors.size(), 1u);
    EXPECT_EQ(message.tensors[0].name, "x");
    a.agent.Expect<RankFinished>();
    a.Wait();
    staged = CopyOut(a, message);
    EXPECT_EQ(a.counters.snapshots_taken, 1u);
  }
  ToyRank b(2, {});
  b.agent.Expect<RankJoin>();
  const SnapshotSource near{ServerId("s1"), SnapshotTier::kStaged, "", State(4, 1), ShardIndex(0)};
  const SnapshotSource far{ServerId("s2"), SnapshotTier::kPeer, "", State(4, 1), ShardIndex(0)};
  const Place place{&b, RestoreAction::kFetchFromSnapshot, -1, {near, far}};
  SendAssignment(Assign(2, State(4, 1), {place}), {place});
  b.agent.Expect<RankConnected>();
  EXPECT_EQ(b.agent.Expect<SnapshotWanted>().source, near);
  SnapshotProvided provided{Generation(2), State(4, 1), staged.message.bytes, staged.digest, staged.message.tensors, "s1 staged"};
  provided.digest[0] ^= 1;
  b.agent.Send(provided, staged.fd);
  EXPECT_EQ(b.agent.Expect<SnapshotWanted>().source, far);
  provided.digest[0] ^= 1;
  provided.from = "s2 peer";
  b.agent.Send(provided, staged.fd);
  EXPECT_EQ(b.agent.Expect<RankReady>().restored_from, "s2 peer");
  b.agent.Send(ResumeRank{Generation(2), Step(4)});
  b.agent.Expect<RankFinished>();
  b.Wait();
  ExpectFinal(b, 10);
  EXPECT_EQ(b.applied, (std::vector<int64_t>{5, 6, 7, 8, 9, 10}));
  close(staged.fd);
}

TEST(SessionTest, SnapshotsAboveTheWatermarkStayAndWithoutAFreeSlotOneIsSkipped) {
  Gate gate;
  ToyRank a(1, {.steps = 8, .staging = true, .snapshot_every = 1, .at = [&](Point point, int64_t step) {
    if (point == Point::kBeforeReduce && step == 7) gate.Pass();
    return true;
  }});
  a.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a)});
  for (int64_t step = 1; step <= static_cast<int64_t>(kStagingSlots); ++step) {
    EXPECT_EQ(a.agent.Expect<SnapshotStaged>().state, State(step, 1));
  }
  gate.Await();  // 5 and 6 found no slot
  a.agent.Send(SnapshotProtected{Step(4)});
  a.agent.Send(FenceRank{Generation(2)});  // its answer says that the message before it was read
  a.agent.Expect<CollectAnswer>();
  gate.Open();
  Form(2, State(6, 1), {Keep(a)}, 4);
  EXPECT_EQ(a.agent.Expect<SnapshotStaged>().state, State(7, 2));
  EXPECT_EQ(a.agent.Expect<SnapshotStaged>().state, State(8, 2));
  a.agent.Expect<RankFinished>();
  a.Wait();
  EXPECT_EQ(a.counters.snapshots_taken, 6u);
  EXPECT_EQ(a.counters.snapshots_skipped, 2u);
}

// ---- ends

TEST(SessionTest, StopEndsARankThatWaitsInJoin) {
  ToyRank a(1, {});
  a.agent.Expect<RankJoin>();
  a.agent.Send(StopRank{"the job was cancelled"});
  a.Wait();
  EXPECT_EQ(a.outcome, FailedPrecondition("the job was cancelled"));
}

TEST(SessionTest, MetricsReachTheAgent) {
  ToyRank a(1, {.steps = 3});
  a.agent.Expect<RankJoin>();
  Form(1, {}, {Initialize(a)});
  a.agent.Expect<RankFinished>();
  a.Wait();
  ASSERT_EQ(a.agent.metrics.size(), 3u);
  EXPECT_EQ(a.agent.metrics[2].step, Step(3));
  EXPECT_EQ(a.agent.metrics[2].name, "x");
  EXPECT_EQ(a.agent.metrics[2].value, ToyRank::Expected(3, 0));
}

TEST(SessionDeathTest, ARankEndsWithItsAgent) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        ToyRank a(1, {});
        a.agent.Expect<RankJoin>();
        a.agent.Close();
        a.Wait();
      },
      testing::ExitedWithCode(75), "the agent is gone");
}

TEST(SessionEnvironmentTest, WrongVariablesAreNamed) {
  static std::map<std::string, std::string> variables;
  const auto read = [](std::map<std::string, std::string> set) {
    variables = std::move(set);
    return client::ReadEnvironment([](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_TRUE(read({}).ok());
  EXPECT_EQ(read({}).value().static_world.size(), 1u);
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"EVERSTEP_STATIC_RANK", "1"}, {"EVERSTEP_STATIC_RANK", "x"}, {"EVERSTEP_STATIC_WORLD", "host"},
           {"EVERSTEP_STATIC_WORLD", "host:0"}, {"EVERSTEP_STATIC_WORLD", "a:1,,b:2"}, {"EVERSTEP_STATIC_PP", "2"},
           {"EVERSTEP_PAGE_FD", "-2"}, {"EVERSTEP_STAGING_FD", "three"}}) {
    const auto environment = read({{name, value}});
    ASSERT_FALSE(environment.ok()) << name << "=" << value;
    EXPECT_EQ(environment.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(environment.status().message().find(name), std::string::npos) << environment.status().message();
  }
  EXPECT_FALSE(read({{"EVERSTEP_AGENT_SOCKET", "/s"}}).ok());  // without a process id
  EXPECT_TRUE(read({{"EVERSTEP_AGENT_SOCKET", "/s"}, {"EVERSTEP_PROCESS_ID", "4"}}).ok());
}

TEST(SessionEnvironmentTest, StaticSharesCoverTheGlobalBatchOnce) {
  client::RankEnvironment environment;
  environment.static_world = {"a:1", "a:2", "a:3", "a:4", "a:5", "a:6"};
  environment.static_stages = 2;
  const Assignment a = client::StaticAssignment(environment, 8);
  EXPECT_EQ(a.dp_size, 3);
  EXPECT_EQ(a.pp_size, 2);
  for (int stage = 0; stage < 2; ++stage) {
    int next = 0;
    for (const RankAssignment& r : a.ranks) {
      if (r.pp != stage) continue;
      EXPECT_EQ(r.micro_batch_first, next);
      next += r.micro_batch_count;
    }
    EXPECT_EQ(next, 8);
  }
}

}  // namespace
}  // namespace everstep
