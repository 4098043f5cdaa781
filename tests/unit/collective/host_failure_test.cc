// What the host backend does when ranks die, stop, abort or leave. Ranks are threads where that is
// enough and forked processes where a real death is the point.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>

#include "tests/unit/collective/world.h"
#include "worker/collective/host/socket_util.h"

namespace everstep::collective {
namespace {

using Clock = std::chrono::steady_clock;

TEST(HostFailure, AbortFreesARankThatWaitsForASilentPeer) {
  HostWorld world(2);
  auto ranks = world.Connect();
  Status status;
  Clock::time_point left;
  std::atomic<bool> entered{false};
  std::thread waiting([&] {
    int32_t value = 0;
    entered = true;
    status = ranks[0]->Receive(&value, 4, DataType::kU8, Rank(1));
    left = Clock::now();
  });
  while (!entered) std::this_thread::yield();
  const auto aborted = Clock::now();
  EXPECT_EQ(ranks[0]->AbortAndWait(Aborted("generation 2"), Seconds(5)), OkStatus());
  const auto confirmed = Clock::now();
  waiting.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_NE(status.message().find("generation 2"), std::string::npos) << status.ToString();
  std::printf("abort: confirmed after %.3f ms\n", ToMilliseconds(confirmed - aborted));
  EXPECT_LT(confirmed - aborted, Seconds(1));
  EXPECT_LT(left - aborted, Seconds(1));
  // For good, and the first reason stays.
  ranks[0]->Abort(Aborted("another"));
  EXPECT_NE(ranks[0]->abort_reason().message().find("generation 2"), std::string::npos);
  EXPECT_EQ(ranks[0]->Barrier().code(), StatusCode::kAborted);
  EXPECT_EQ(ranks[0]->BarrierAsync()->Wait().code(), StatusCode::kAborted);
  EXPECT_EQ(ranks[0]->Split(0, 0).status().code(), StatusCode::kAborted);
  EXPECT_FALSE(ranks[0]->failed_peer().has_value());
}

TEST(HostFailure, AbortOfOneRankFreesAllOthersInALargeTransfer) {
  constexpr int32_t kSize = 5;
  HostWorld world(kSize);
  auto ranks = world.Connect();
  std::atomic<int> rounds{0};
  std::thread aborter([&] {
    while (rounds.load() < kSize * 2) std::this_thread::yield();
    EXPECT_EQ(ranks[2]->AbortAndWait(Aborted("enough"), Seconds(5)), OkStatus());
  });
  OnRanks(kSize, [&](int32_t rank) {
    std::vector<float> data(1 << 20, 1.0f);
    Status status;
    while (status.ok()) {
      status = ranks[static_cast<size_t>(rank)]->AllReduce(data.data(), data.data(), data.size(),
                                                           DataType::kF32, ReduceOp::kMax);
      ++rounds;
    }
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    EXPECT_TRUE(ranks[static_cast<size_t>(rank)]->aborted());
  });
  aborter.join();
}

TEST(HostFailure, PendingAsynchronousOperationsEndWithTheAbort) {
  HostWorld world(2);
  auto ranks = world.Connect();
  std::vector<int64_t> data(100);
  std::vector<std::shared_ptr<Work>> works;
  std::atomic<int> called{0};
  for (int i = 0; i < 50; ++i) {
    works.push_back(ranks[0]->ReceiveAsync(data.data(), data.size(), DataType::kI64, Rank(1)));
    works.back()->OnComplete(
        [&](const Status& status) { called += status.code() == StatusCode::kAborted ? 1 : 1000; });
  }
  EXPECT_FALSE(works.front()->Done());
  ranks[0]->Abort(Aborted("stop"));
  for (const auto& work : works) EXPECT_EQ(work->Wait().code(), StatusCode::kAborted);
  ranks[0].reset();  // joins the worker, so every callback has run
  EXPECT_EQ(called.load(), 50);
}

TEST(HostFailure, DestroyingWithPendingOperationsEndsThem) {
  HostWorld world(2);
  auto ranks = world.Connect();
  int32_t value = 0;
  auto work = ranks[0]->ReceiveAsync(&value, 4, DataType::kU8, Rank(1));
  ranks[0].reset();
  EXPECT_EQ(work->Wait().code(), StatusCode::kAborted);
}

TEST(HostFailure, LeavingInGoodOrderDisturbsNobodyWhoNeedsNothingMore) {
  HostWorld world(4);
  auto ranks = world.Connect();
  std::latch left(1);
  OnRanks(4, [&](int32_t rank) {
    const auto at = static_cast<size_t>(rank);
    int64_t value = rank;
    ASSERT_EQ(ranks[at]->AllReduce(&value, &value, 1, DataType::kI64, ReduceOp::kSum), OkStatus());
    if (rank == 0) {
      // The last word of rank 0 must still arrive after it has gone.
      ASSERT_EQ(ranks[0]->Send(&value, 1, DataType::kI64, Rank(1)), OkStatus());
      ranks[0].reset();
      left.count_down();
      return;
    }
    left.wait();
    if (rank == 1) {
      ASSERT_EQ(ranks[1]->Receive(&value, 1, DataType::kI64, Rank(0)), OkStatus());
      ASSERT_EQ(ranks[1]->Send(&value, 1, DataType::kI64, Rank(2)), OkStatus());
    } else if (rank == 2) {
      ASSERT_EQ(ranks[2]->Receive(&value, 1, DataType::kI64, Rank(1)), OkStatus());
      ASSERT_EQ(ranks[2]->Send(&value, 1, DataType::kI64, Rank(3)), OkStatus());
    } else {
      ASSERT_EQ(ranks[3]->Receive(&value, 1, DataType::kI64, Rank(2)), OkStatus());
    }
    EXPECT_EQ(value, 6);
    EXPECT_EQ(ranks[at]->CheckHealth(), OkStatus());
  });
  int64_t value = 0;
  EXPECT_EQ(ranks[1]->Receive(&value, 1, DataType::kI64, Rank(0)).code(), StatusCode::kAborted);
  EXPECT_EQ(ranks[1]->failed_peer(), Rank(0));
}

TEST(HostFailure, OperationTimesOutAsABackstopAndNamesTheRankWaitedFor) {
  HostWorld world(2);
  auto ranks =
      world.Connect([](MeshOptions& options) { options.operation_timeout = Milliseconds(50); });
  int32_t value = 0;
  const Status status = ranks[0]->Receive(&value, 4, DataType::kU8, Rank(1));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.ToString();
  EXPECT_EQ(ranks[0]->Barrier().code(), StatusCode::kAborted);
  EXPECT_EQ(ranks[1]->Barrier().code(), StatusCode::kAborted);
}

TEST(HostFailure, AbortingAGroupLeavesItsParentUsable) {
  HostWorld world(3);
  auto ranks = world.Connect();
  OnRanks(3, [&](int32_t rank) {
    auto& communicator = *ranks[static_cast<size_t>(rank)];
    auto group = communicator.Split(0, rank);
    ASSERT_TRUE(group.ok());
    if (rank == 0) (*group)->Abort(Aborted("only the group"));
    EXPECT_EQ((*group)->Barrier().code(), StatusCode::kAborted);
    EXPECT_EQ(communicator.Barrier(), OkStatus());
  });
}

TEST(HostFailure, AbortEndsAGroupCreationUnderWay) {
  HostWorld world(2);
  auto ranks = world.Connect([](MeshOptions& options) { options.deadline = Seconds(100); });
  Status status;
  std::thread creating([&] {
    const std::vector<Rank> both = {Rank(0), Rank(1)};
    status = ranks[1]->CreateGroup(both, GroupId(1)).status();
  });
  while (world.listener(0).counters().parked == 0) std::this_thread::yield();
  ranks[1]->Abort(Aborted("stop"));
  creating.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
}

// --- Real processes
// -------------------------------------------------------------------------------------------------

constexpr int32_t kProcessMax = 8;

// Shared by the processes of one test.
struct Board {
  char address[kProcessMax][64];
  std::atomic<int32_t> published{0};
  std::atomic<int32_t> connected{0};
  std::atomic<int32_t> rounds[kProcessMax];
  std::atomic<int64_t> freed_at[kProcessMax];  // monotonic nanoseconds, 0 while not
  std::atomic<int32_t> failed_peer[kProcessMax];
  std::atomic<int32_t> code[kProcessMax];
  std::atomic<int32_t> orphan{0};  // pid of the process that a rank left behind
};

int64_t NowNs() { return MonotonicNow().count(); }

// True when `condition` came true; gives up after a minute.
bool Eventually(const std::function<bool()>& condition) {
  const int64_t give_up = NowNs() + Seconds(60).count();
  while (!condition()) {
    if (NowNs() > give_up) return false;
    ::sched_yield();
  }
  return true;
}

// One forked process per rank. Each runs all-reduces of `count` floats until one fails, and writes
// down when and why; an order through its pipe makes it abort, as the controller's would.
class Processes {
 public:
  Processes(int32_t size, size_t count, int32_t forking_rank = -1) : size_(size) {
    board_ = new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                         -1, 0)) Board();
    for (int32_t rank = 0; rank < size; ++rank) {
      board_->failed_peer[rank] = -1;
      int ends[2];
      EXPECT_EQ(::pipe(ends), 0);
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::close(ends[1]);
        RunRank(rank, count, ends[0], rank == forking_rank);
        ::_exit(0);
      }
      ::close(ends[0]);
      pids_.push_back(pid);
      orders_.push_back(ends[1]);
    }
    EXPECT_TRUE(Eventually([&] { return board_->connected.load() == size; }));
    EXPECT_TRUE(Eventually([&] { return board_->rounds[0].load() >= 1; }));
  }

  ~Processes() {
    for (const int order : orders_) ::close(order);
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    if (board_->orphan.load() > 0) ::kill(board_->orphan.load(), SIGKILL);
    ::munmap(board_, sizeof(Board));
  }

  Board& board() { return *board_; }
  void Signal(int32_t rank, int signal) { ::kill(pids_[static_cast<size_t>(rank)], signal); }
  void OrderAbort(int32_t rank) {
    EXPECT_EQ(::write(orders_[static_cast<size_t>(rank)], "x", 1), 1);
  }

  // Waits until all but `except` are out of their operation; the longest time since `since`.
  double MillisecondsUntilFree(int32_t except, int64_t since) {
    double longest = 0;
    for (int32_t rank = 0; rank < size_; ++rank) {
      if (rank == except) continue;
      EXPECT_TRUE(Eventually([&] { return board_->freed_at[rank].load() != 0; }))
          << "rank " << rank;
      longest = std::max(longest, static_cast<double>(board_->freed_at[rank].load() - since) / 1e6);
      EXPECT_EQ(board_->code[rank].load(), static_cast<int32_t>(StatusCode::kAborted));
    }
    return longest;
  }

 private:
  void RunRank(int32_t rank, size_t count, int orders, bool forks) {
    auto listener = MeshListener::Create({});
    if (!listener.ok()) return;
    std::snprintf(board_->address[rank], sizeof(board_->address[rank]), "%s",
                  (*listener)->address().c_str());
    ++board_->published;
    if (!Eventually([&] { return board_->published.load() == size_; })) return;
    MeshOptions options;
    options.job_uid = JobUid("job-1");
    options.generation = Generation(1);
    options.rank = Rank(rank);
    options.listener = *listener;
    for (int32_t i = 0; i < size_; ++i) options.addresses.push_back(board_->address[i]);
    auto made = ConnectMesh(options);
    if (!made.ok()) return;
    Communicator& communicator = **made;
    if (forks) {
      // Never calls exec, so close-on-exec does not help: it inherits every connection of the rank.
      const pid_t child = ::fork();
      if (child == 0) {
        while (true) ::pause();
      }
      board_->orphan = child;
    }
    ++board_->connected;
    std::thread control([&] {
      char order;
      if (::read(orders, &order, 1) == 1) communicator.Abort(Aborted("ordered"));
    });
    std::vector<float> data(count, 1.0f);
    Status status;
    while (status.ok()) {
      status =
          communicator.AllReduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kMax);
      ++board_->rounds[rank];
    }
    const auto peer = communicator.failed_peer();
    board_->failed_peer[rank] = peer.has_value() ? peer->value : -1;
    board_->code[rank] = static_cast<int32_t>(status.code());
    board_->freed_at[rank] = NowNs();
    control.join();  // until the test closes the pipe
  }

  const int32_t size_;
  Board* board_ = nullptr;
  std::vector<pid_t> pids_;
  std::vector<int> orders_;
};

constexpr double kGenerousMs = 1000;

TEST(HostProcesses, KilledRankFreesAllSurvivorsAndIsNamed) {
  for (const size_t count : {size_t{256}, size_t{256} << 10, size_t{8} << 20}) {
    Processes processes(5, count);
    const int64_t killed = NowNs();
    processes.Signal(2, SIGKILL);
    const double freed = processes.MillisecondsUntilFree(2, killed);
    std::printf("kill -9 of one of 5 in all-reduces of %zu KiB: last survivor free after %.2f ms\n",
                count / 256, freed);
    EXPECT_LT(freed, kGenerousMs);
    // Whoever saw it first blames the right rank. The others may have seen the first one's abort
    // before.
    bool named = false;
    for (const int32_t rank : {0, 1, 3, 4})
      named = named || processes.board().failed_peer[rank] == 2;
    EXPECT_TRUE(named);
  }
}

TEST(HostProcesses, StoppedRankIsLeftBehindByAnOrderedAbort) {
  for (const size_t count : {size_t{256}, size_t{2} << 20}) {
    Processes processes(4, count);
    processes.Signal(1, SIGSTOP);
    // The others are stuck, or soon will be: nothing tells them. The order does.
    const int64_t ordered = NowNs();
    for (const int32_t rank : {0, 2, 3}) processes.OrderAbort(rank);
    const double freed = processes.MillisecondsUntilFree(1, ordered);
    std::printf(
        "abort beside a stopped rank of 4 in all-reduces of %zu KiB: last survivor free after %.2f "
        "ms\n",
        count / 256, freed);
    EXPECT_LT(freed, kGenerousMs);
    processes.Signal(1, SIGCONT);
    processes.OrderAbort(1);
  }
}

TEST(HostProcesses, OneAbortReachesRanksThatAreNotItsNeighbours) {
  Processes processes(8, size_t{1} << 20);
  const int64_t ordered = NowNs();
  processes.OrderAbort(5);
  const double freed = processes.MillisecondsUntilFree(-1, ordered);
  std::printf("abort of one of 8: last rank free after %.2f ms\n", freed);
  EXPECT_LT(freed, kGenerousMs);
}

TEST(HostProcesses, ForkedChildThatOutlivesItsRankDoesNotHideTheDeath) {
  Processes processes(4, 256, /*forking_rank=*/1);
  ASSERT_GT(processes.board().orphan.load(), 0);
  const int64_t killed = NowNs();
  processes.Signal(1, SIGKILL);
  EXPECT_LT(processes.MillisecondsUntilFree(1, killed), kGenerousMs);
  EXPECT_EQ(::kill(processes.board().orphan.load(), 0), 0)
      << "the child must still live for this to show anything";
}

}  // namespace
}  // namespace everstep::collective
