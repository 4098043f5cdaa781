// A job of toy ranks in threads of the test, each with a real Session, and the other end of each rank's socket in the
// test's hands, which plays agent and controller. The state is a vector that a step multiplies and adds to, so a step
// that is lost, repeated or applied with foreign gradients shows in the result.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "worker/client/session.h"
#include "worker/client/static_world.h"
#include "worker/wire/rank_codec.h"
#include "worker/wire/staging_layout.h"

namespace everstep {

inline constexpr int kMessageWaitMs = 20'000;

// The agent's end of one rank's socket. Used by the test's thread only.
class FakeAgent {
 public:
  FakeAgent() {
    std::string pattern = testing::TempDir() + "/es-agent-XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    path_ = pattern + "/socket";
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof address.sun_path - 1);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_, 4), 0);
  }
  ~FakeAgent() {
    Close();
    close(listener_);
  }
  const std::string& path() const { return path_; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

  RankHello Greet(uint64_t staging_bytes_max = 1u << 26) {
    fd_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    EXPECT_GE(fd_, 0);
    RankHello hello = Expect<RankHello>();
    Send(HelloAccepted{staging_bytes_max});
    return hello;
  }

  void Send(const AgentToRank& message, int descriptor = -1) {
    const std::string frame = EncodeFrame(message);
    iovec vector{const_cast<char*>(frame.data()), frame.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    if (descriptor >= 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    }
    EXPECT_EQ(sendmsg(fd_, &header, MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
  }

  // The next message that isn't a metric.
  RankToAgent Next() {
    while (true) {
      auto frame = reader_.Next();
      EXPECT_TRUE(frame.ok());
      if (frame->has_value()) {
        Result<RankToAgent> message = DecodeRankToAgent(**frame);
        EXPECT_TRUE(message.ok()) << message.status().ToString();
        if (std::holds_alternative<MetricReported>(*message)) {
          metrics.push_back(std::get<MetricReported>(*message));
          continue;
        }
        return *message;
      }
      pollfd waiting{fd_, POLLIN, 0};
      if (poll(&waiting, 1, kMessageWaitMs) <= 0) {
        ADD_FAILURE() << "no message from the rank";
        return RankFailed{};
      }
      char buffer[4096];
      const ssize_t count = read(fd_, buffer, sizeof buffer);
      if (count <= 0) {
        ADD_FAILURE() << "the rank closed its socket";
        return RankFailed{};
      }
      reader_.Append(std::string_view(buffer, static_cast<size_t>(count)));
    }
  }
  template <typename M>
  M Expect() {
    RankToAgent message = Next();
    if (M* m = std::get_if<M>(&message)) return *m;
    ADD_FAILURE() << "expected another message than number " << message.index();
    if (const auto* failed = std::get_if<RankFailed>(&message)) ADD_FAILURE() << failed->message;
    return M{};
  }

  std::vector<MetricReported> metrics;

 private:
  std::string path_;
  int listener_ = -1;
  int fd_ = -1;
  FrameReader reader_;
};

// Where a rank may be held by the test.
enum class Point { kBeforeReduce, kBeforeCommit, kInApply, kAfterApply };

class ToyRank {
 public:
  static constexpr size_t kElements = 10'000;

  struct Options {
    int64_t steps = 10;
    bool staging = false;
    int64_t snapshot_every = 0;
    double initial_error = 0;
    // Called on the rank's thread. False: the rank dies here (its session is destroyed).
    std::function<bool(Point, int64_t step)> at = [](Point, int64_t) { return true; };
  };

  ToyRank(uint64_t process, Options options) : process_(process), options_(std::move(options)) {
    page_fd_ = memfd_create("page", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(page_fd_, sizeof(ProgressPage)), 0);
    page_ = static_cast<ProgressPage*>(
        mmap(nullptr, sizeof(ProgressPage), PROT_READ | PROT_WRITE, MAP_SHARED, page_fd_, 0));
    staging_fd_ = memfd_create("staging", MFD_CLOEXEC);
    thread_ = std::thread([this] { Main(); });
    hello_ = agent.Greet();
  }
  ~ToyRank() {
    Wait();
    munmap(page_, sizeof(ProgressPage));
    close(page_fd_);
    close(staging_fd_);
  }
  void Wait() {
    if (thread_.joinable()) thread_.join();
  }

  FakeAgent agent;
  const RankHello& hello() const { return hello_; }
  ProcessId process() const { return ProcessId(process_); }
  int staging_fd() const { return staging_fd_; }
  RankPhase phase() const { return static_cast<RankPhase>(page_->phase); }

  // REQUIRES: the rank is held at a Gate.
  bool generation_over() const { return session_.load()->generation_over(); }
  // REQUIRES: the rank is held at a Gate.
  void AwaitStaleRefused(uint64_t count) const {
    while (session_.load()->counters().stale_refused < count) std::this_thread::yield();
  }

  // After Wait.
  Status outcome;
  std::vector<double> state = std::vector<double>(kElements);
  std::vector<int64_t> applied;      // by Commit
  std::vector<int64_t> rolled;       // by Join
  std::vector<Membership> memberships;
  SessionCounters counters;

  // What a run without any failure ends with.
  static double Expected(int64_t steps, size_t element) {
    double x = Initial(element);
    for (int64_t step = 1; step <= steps; ++step) x = Next(x, step);
    return x;
  }

 private:
  static double Initial(size_t element) { return static_cast<double>(element % 17); }
  // Small integers over powers of two: sums are exact, whatever the width.
  static double Share(int64_t step, int micro_batch) { return static_cast<double>(step * 8 + micro_batch); }
  static double Next(double x, int64_t step) {
    double sum = 0;
    for (int m = 0; m < kMicroBatches; ++m) sum += Share(step, m);
    return x * 0.5 + sum;
  }
  static constexpr int kMicroBatches = 4;

  void Main() {
    client::RankEnvironment environment;
    environment.agent_socket = agent.path();
    environment.process = ProcessId(process_);
    environment.page_fd = dup(page_fd_);
    if (options_.staging) environment.staging_fd = dup(staging_fd_);
    auto session = Session::CreateIn({}, environment);
    if (!session.ok()) {
      outcome = session.status();
      return;
    }
    session_.store(session->get());
    outcome = Train(**session);
    counters = (*session)->counters();
  }

  Status Train(Session& session) {
    bool committing = false;
    const int64_t shape[] = {static_cast<int64_t>(kElements)};
    EVERSTEP_RETURN_IF_ERROR(
        session.RegisterTensor("x", "f64", shape, {}, {}, state.data(), kElements * sizeof(double)));
    session.SetInitialize([this] {
      for (size_t i = 0; i < kElements; ++i) state[i] = Initial(i) + options_.initial_error;
      return OkStatus();
    });
    session.SetApply([&](Step step) {
      if (!options_.at(Point::kInApply, step.value)) return Internal("dies in apply");
      for (double& x : state) x = x * 0.5 + gradient_;
      (committing ? applied : rolled).push_back(step.value);
      return OkStatus();
    });
    while (true) {
      EVERSTEP_ASSIGN_OR_RETURN(const Membership place, session.Join());
      memberships.push_back(place);
      bool over = false;
      for (Step step = place.next_step; step.value <= options_.steps && !over; step = step.Next()) {
        if (!session.BeginStep(step).ok()) {
          over = true;
          break;
        }
        double sum = 0;
        for (int m = 0; m < place.micro_batch_count; ++m) sum += Share(step.value, place.micro_batch_first + m);
        if (!options_.at(Point::kBeforeReduce, step.value)) return Aborted("dies");
        if (!session.dp_group().AllReduce(&sum, &sum, 1, collective::DataType::kF64, collective::ReduceOp::kSum).ok()) {
          over = true;
          break;
        }
        gradient_ = sum;
        if (!session.GradientsComplete(step).ok()) {
          over = true;
          break;
        }
        if (!options_.at(Point::kBeforeCommit, step.value)) return Aborted("dies");
        committing = true;
        const Result<CommitOutcome> committed = session.Commit(step);
        committing = false;
        over = !committed.ok() || *committed == CommitOutcome::kSwitch;
        if (!committed.ok() && committed.status().code() == StatusCode::kInternal) return committed.status();
        if (committed.ok()) {
          session.ReportMetric(step, "x", state[0]);
          if (!options_.at(Point::kAfterApply, step.value)) return Aborted("dies");
        }
        if (!over && options_.snapshot_every > 0 && step.value % options_.snapshot_every == 0) {
          const Status taken = session.Snapshot();
          if (!taken.ok() && taken.code() == StatusCode::kInvalidArgument) return taken;
        }
      }
      if (over) continue;
      const Status finished = session.Finish();
      if (finished.code() != StatusCode::kAborted) return finished;
    }
  }

  const uint64_t process_;
  const Options options_;
  double gradient_ = 0;
  std::atomic<Session*> session_{nullptr};
  int page_fd_ = -1, staging_fd_ = -1;
  ProgressPage* page_ = nullptr;
  RankHello hello_;
  std::thread thread_;
};

// The controller's part.
struct Place {
  ToyRank* rank;
  RestoreAction action;
  int source = -1;
  std::vector<SnapshotSource> sources = {};
};

inline Assignment Assign(uint64_t generation, StateId point, const std::vector<Place>& places) {
  Assignment a;
  a.job = JobUid("toy");
  a.job_name = "toy";
  a.generation = Generation(generation);
  a.recovery_point = point;
  a.token = {1, 2, 3, static_cast<uint8_t>(generation)};
  a.dp_size = static_cast<int32_t>(places.size());
  a.micro_batch_count = 4;
  const int32_t each = 4 / a.dp_size, more = 4 % a.dp_size;
  for (int32_t i = 0; i < a.dp_size; ++i) {
    const Place& place = places[static_cast<size_t>(i)];
    RankAssignment r;
    r.rank = Rank(i);
    r.process = place.rank->process();
    r.dp = i;
    r.micro_batch_first = i * each + std::min(i, more);
    r.micro_batch_count = each + (i < more ? 1 : 0);
    r.mesh_address = place.rank->hello().mesh_address;
    r.action = place.action;
    r.source_rank = Rank(place.source);
    r.sources = place.sources;
    a.ranks.push_back(std::move(r));
  }
  return a;
}

inline void SendAssignment(const Assignment& a, const std::vector<Place>& places) {
  for (size_t i = 0; i < places.size(); ++i) places[i].rank->agent.Send(AssignRank{a, Rank(static_cast<int32_t>(i))});
}

// From Assign to Resume when nothing goes wrong. Returns what each rank said it restored from.
inline std::vector<RankReady> Form(uint64_t generation, StateId point, const std::vector<Place>& places,
                                   int64_t protected_step = 0) {
  SendAssignment(Assign(generation, point, places), places);
  std::vector<RankReady> ready;
  for (const Place& place : places) {
    EXPECT_EQ(place.rank->agent.Expect<RankConnected>().generation, Generation(generation));
    ready.push_back(place.rank->agent.Expect<RankReady>());
  }
  for (const Place& place : places) place.rank->agent.Send(ResumeRank{Generation(generation), Step(protected_step)});
  return ready;
}

// A gate that the test opens; whoever comes to it waits.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  // Blocks until `count` came.
  void Await(int count = 1) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::milliseconds(kMessageWaitMs), [&] { return arrived_ >= count; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

}  // namespace everstep
