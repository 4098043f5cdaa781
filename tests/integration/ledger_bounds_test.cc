// The ledger stays bounded over 100,000 steps: the real core, among hand-written agents, in the real loop, over the real
// store. The loop compacts as in production; what is on disk is measured while it runs, and read back at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "controller/io/loop/controller_loop.h"
#include "controller/io/loop/replay.h"
#include "controller/io/store/ledger_convert.h"
#include "controller/io/store/rocksdb_backend.h"
#include "controller/io/store/threaded_store.h"
#include "tests/unit/controller/fake_cluster.h"

namespace everstep {
namespace {

namespace fs = std::filesystem;
using testing::FakeCluster;

constexpr int64_t kSteps = 100'000;
constexpr int64_t kStepsPerTurn = 1'000;   // one group commit
constexpr int64_t kManifestEvery = 10;
constexpr int64_t kLossEvery = 200;       // a rank is killed
constexpr int64_t kRestartEvery = 25'000; // the controller is

// Each call of an operator, whatever it asks, makes the cluster train for a while; what its core appends, the loop gets.
class TrainingCore : public CoreInterface {
 public:
  // A ledger that is empty until then.
  Effects Start(Now) override {
    cluster_ = std::make_unique<FakeCluster>();
    cluster_->compare_every = 50;
    cluster_->AddServers(3);
    JobSpec spec = testing::Spec("train", 2);
    spec.persist_interval_steps = kManifestEvery;
    spec.checkpoints_kept = 3;
    job_ = cluster_->Run(spec);
    return NewRecords();
  }
  Effects Step(const Event& event, Now) override {
    const auto* call = std::get_if<OperatorCalled>(&event);
    if (call == nullptr) return {};
    for (int64_t i = 0; i < kStepsPerTurn; ++i) TrainOneStep();
    Effects effects = NewRecords();
    effects.push_back({ledger().applied, ReplyToOperator{call->call, OkStatus(), job_, ""}});
    cluster_->Forget();
    return effects;
  }
  Instant NextDeadline() const override { return kNever; }
  const LedgerState& ledger() const override { return cluster_ ? cluster_->ledger() : empty_; }
  ClusterView MakeView(Now) const override { return {}; }
  uint64_t bytes() const { return bytes_; }      // of all records so far; read when the loop has stopped

 private:
  void TrainOneStep() {
    ++step_;
    cluster_->StepTo(job_, step_);
    if (step_ % kManifestEvery == 0) {
      const FakeCluster::Located leader = cluster_->RankOf(job_, 0);
      cluster_->Hold(leader.server, job_, leader.process->applied, 0, SnapshotTier::kStaged);
    }
    if (step_ % kLossEvery == 0) cluster_->KillRank(job_, 1);
    if (step_ % kRestartEvery == 0) {
      cluster_->RestartController();
      cluster_->ConnectAll();
    }
  }

  Effects NewRecords() {
    Effects effects;
    for (; told_ < cluster_->log().size(); ++told_) {
      const Record& record = cluster_->log()[told_];
      bytes_ += EncodeRecord(record).size();
      effects.push_back({LedgerSequence(0), AppendRecord{LedgerSequence(told_ + 1), record}});
    }
    return effects;
  }

  const LedgerState empty_;
  std::unique_ptr<FakeCluster> cluster_;
  JobUid job_;
  int64_t step_ = 0;
  size_t told_ = 0;
  uint64_t bytes_ = 0;
};

// Tells the test when a turn is durable.
class Turns : public LoopOutputs {
 public:
  void Send(const SendCommand&) override {}
  void Close(const CloseSession&) override {}
  void Probe(const StartProbe&) override {}
  void Notify(const Notice&, WallTime) override {}
  void Forward(const ForwardLines&) override {}
  void Forward(const ForwardMetric&) override {}
  void Measure(const Measured&) override {}
  void Reply(const ReplyToOperator& reply) override {
    std::lock_guard lock(mutex_);
    done_ = reply.call.value;
    changed_.notify_all();
  }
  void WaitFor(uint64_t turn) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t done_ = 0;
};

uint64_t BytesIn(const std::string& folder) {
  uint64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    const uint64_t size = entry.is_regular_file(error) ? entry.file_size(error) : 0;
    if (!error) bytes += size;  // files go while we look
  }
  return bytes;
}

TEST(LedgerBounds, RecordsAndBytesStayBoundedOverAHundredThousandSteps) {
  std::string folder = (fs::temp_directory_path() / "everstep-ledger-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  auto backend = OpenRocksDbLedger(folder);
  ASSERT_TRUE(backend.ok()) << backend.status().ToString();
  auto store = std::make_unique<ThreadedLedgerStore>(std::move(*backend));
  Turns turns;
  auto owned = std::make_unique<TrainingCore>();
  const TrainingCore* core = owned.get();
  ControllerLoop::Parts parts;
  parts.core = std::move(owned);
  parts.store = store.get();
  parts.outputs = &turns;
  parts.on_ledger_failure = [](const Status& status) { ADD_FAILURE() << status.ToString(); };
  ControllerLoop loop(LoopOptions{}, std::move(parts));
  loop.Start();

  std::vector<uint64_t> peaks(10, 0);  // bytes on disk, in each tenth of the steps
  for (int64_t turn = 1; turn <= kSteps / kStepsPerTurn; ++turn) {
    ASSERT_TRUE(loop.Post(OperatorCalled{CallId(static_cast<uint64_t>(turn)), RequestId(), "test", false, CancelJob{}}));
    turns.WaitFor(static_cast<uint64_t>(turn));
    ASSERT_FALSE(HasFailure());
    uint64_t& peak = peaks[static_cast<size_t>((turn * kStepsPerTurn - 1) * 10 / kSteps)];
    peak = std::max(peak, BytesIn(folder));
  }
  loop.Stop(Seconds(10));
  store->Close();
  const LedgerState live = core->ledger();
  const uint64_t appended = live.applied.value;
  store.reset();

  auto again = OpenRocksDbLedger(folder);
  ASSERT_TRUE(again.ok());
  const auto stored = (*again)->Load();
  ASSERT_TRUE(stored.ok()) << stored.status().ToString();
  const auto replayed = ReplayLedger(*stored);
  ASSERT_TRUE(replayed.ok()) << replayed.status().ToString();
  EXPECT_TRUE(*replayed == live) << "what is left says everything";
  const JobEntry& job = live.jobs.begin()->second;
  std::printf("steps %lld: %llu records of %llu bytes appended, %zu left with a snapshot of %zu bytes; %zu recoveries and "
              "%zu manifests kept, %zu links of the chain; bytes on disk, peak of each tenth:",
              static_cast<long long>(kSteps), static_cast<unsigned long long>(appended),
              static_cast<unsigned long long>(core->bytes()), stored->records.size(), stored->snapshot.size(),
              live.recoveries.size(), job.manifests.size(), job.lineage.links().size());
  for (uint64_t peak : peaks) std::printf(" %llu", static_cast<unsigned long long>(peak));
  std::printf("\n");
  // Enough happened for the bounds to mean something.
  EXPECT_GT(appended, uint64_t{kSteps / kManifestEvery});
  EXPECT_GE(live.next_recovery, uint64_t{kSteps / kLossEvery});
  EXPECT_EQ(job.manifests.size(), 3u);
  EXPECT_LE(live.recoveries.size(), 200u);
  const LoopOptions defaults;
  EXPECT_LE(stored->records.size(), static_cast<size_t>(2 * defaults.snapshot_records));
  EXPECT_LE(stored->snapshot.size(), size_t{2} << 20);
  // On disk: what compaction makes obsolete comes and goes with the store's logs. No trend: the second half needs no more
  // than the first, give or take a log.
  const uint64_t first = *std::max_element(peaks.begin(), peaks.begin() + 5);
  const uint64_t second = *std::max_element(peaks.begin() + 5, peaks.end());
  EXPECT_LE(second, first + (uint64_t{1} << 20));
  EXPECT_LE(second, uint64_t{6} << 20);
  again->reset();
  fs::remove_all(folder);
}

}  // namespace
}  // namespace everstep
