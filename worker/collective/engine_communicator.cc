#include "worker/collective/engine_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace everstep::collective {

class EngineCommunicator::PendingWork : public Work {
 public:
  explicit PendingWork(const Operation& operation)
      : operation_(operation),
        send_counts_(operation.send_counts.begin(), operation.send_counts.end()),
        receive_counts_(operation.receive_counts.begin(), operation.receive_counts.end()) {
    operation_.send_counts = send_counts_;
    operation_.receive_counts = receive_counts_;
  }

  const Operation& operation() const { return operation_; }

  void Complete(Status status) {
    std::function<void(const Status&)> callback;
    {
      std::lock_guard lock(mutex_);
      status_ = std::move(status);
      done_ = true;
      callback = std::move(callback_);
      callback_ = nullptr;
      changed_.notify_all();
    }
    if (callback) callback(status_);
  }

  Status Wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    return status_;
  }

  bool Done() const override {
    std::lock_guard lock(mutex_);
    return done_;
  }

  void OnComplete(std::function<void(const Status&)> callback) override {
    {
      std::lock_guard lock(mutex_);
      if (!done_) {
        callback_ = std::move(callback);
        return;
      }
    }
    callback(status_);  // never changes once done
  }

 private:
  Operation operation_;
  std::vector<size_t> send_counts_;
  std::vector<size_t> receive_counts_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;                            // guarded by mutex_
  Status status_;                                // guarded by mutex_ until done_
  std::function<void(const Status&)> callback_;  // guarded by mutex_
};

EngineCommunicator::EngineCommunicator(EngineIdentity identity,
                                       std::unique_ptr<Transport> transport)
    : identity_(identity), transport_(std::move(transport)), algorithms_(*transport_) {}

EngineCommunicator::~EngineCommunicator() {
  if (pending_.load() != 0)
    Abort(Aborted("the communicator was destroyed with operations pending"));
  {
    std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    queue_changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  if (!abort_.triggered()) transport_->Leave();
}

Status EngineCommunicator::AbortedStatus() const {
  return Aborted("communicator aborted: " + abort_.reason().message());
}

Status EngineCommunicator::Run(const Operation& operation) {
  if (pending_.load(std::memory_order_acquire) != 0) return Submit(operation)->Wait();
  return RunNow(operation);
}

Status EngineCommunicator::RunNow(const Operation& operation) {
  in_flight_.fetch_add(1);
  Status status = abort_.triggered() ? AbortedStatus() : algorithms_.Run(operation);
  if (!status.ok() && status.code() != StatusCode::kInvalidArgument) {
    // Whatever went wrong, messages may be cut in half: nothing can follow. Peers learn by the
    // closed connections.
    if (!abort_.triggered()) Abort(status);
    const Status reason = abort_.reason();
    // The operation that hit a failure reports it as it is; a victim of somebody else's Abort
    // reports that reason.
    if (status.code() == StatusCode::kAborted && reason != status) status = AbortedStatus();
  }
  if (in_flight_.fetch_sub(1) == 1 && abort_.triggered()) {
    std::lock_guard lock(idle_mutex_);
    idle_.notify_all();
  }
  return status;
}

std::shared_ptr<Work> EngineCommunicator::Submit(const Operation& operation) {
  auto work = std::make_shared<PendingWork>(operation);
  if (abort_.triggered()) {
    work->Complete(AbortedStatus());
    return work;
  }
  {
    std::lock_guard lock(queue_mutex_);
    if (queue_.size() >= kPendingWorkMax) {
      work->Complete(
          ResourceExhausted(fmt::format("{} operations are pending already", queue_.size())));
      return work;
    }
    pending_.fetch_add(1, std::memory_order_acq_rel);
    queue_.push_back(work);
    queue_changed_.notify_one();
    if (!worker_.joinable()) worker_ = std::thread([this] { WorkerLoop(); });
  }
  return work;
}

void EngineCommunicator::WorkerLoop() {
  while (true) {
    std::shared_ptr<PendingWork> work;
    {
      std::unique_lock lock(queue_mutex_);
      queue_changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    Status status = RunNow(work->operation());
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    work->Complete(std::move(status));
  }
}

void EngineCommunicator::Abort(Status reason) {
  if (abort_.Trigger(std::move(reason))) transport_->Shutdown();
}

Status EngineCommunicator::AbortAndWait(Status reason, Duration timeout) {
  Abort(std::move(reason));
  std::unique_lock lock(idle_mutex_);
  if (idle_.wait_for(lock, timeout, [&] { return in_flight_.load() == 0; })) return OkStatus();
  return DeadlineExceeded("an operation did not leave the aborted communicator in time");
}

std::optional<Rank> EngineCommunicator::failed_peer() const {
  const std::optional<int32_t> peer = transport_->failed_peer();
  if (!peer.has_value()) return std::nullopt;
  return Rank(*peer);
}

Status EngineCommunicator::CheckHealth() {
  if (abort_.triggered()) return AbortedStatus();
  if (pending_.load(std::memory_order_acquire) != 0) return OkStatus();  // the worker is looking
  in_flight_.fetch_add(1);
  Status status = transport_->CheckHealth();
  if (!status.ok() && !abort_.triggered()) Abort(status);
  if (in_flight_.fetch_sub(1) == 1 && abort_.triggered()) {
    std::lock_guard lock(idle_mutex_);
    idle_.notify_all();
  }
  return status;
}

Result<std::unique_ptr<Communicator>> Communicator::Split(int32_t color, int32_t key) {
  struct Choice {
    int32_t color;
    int32_t key;
  };
  const auto size = static_cast<size_t>(world_size());
  std::vector<Choice> choices(size);
  const Choice mine{color, key};
  EVERSTEP_RETURN_IF_ERROR(AllGather(&mine, choices.data(), sizeof(Choice), DataType::kU8));
  const uint64_t split = ++split_count_;
  if (color < 0) return std::unique_ptr<Communicator>();
  std::vector<Rank> members;
  for (size_t i = 0; i < size; ++i) {
    if (choices[i].color == color) members.push_back(Rank(static_cast<int32_t>(i)));
  }
  std::sort(members.begin(), members.end(), [&](Rank a, Rank b) {
    const int32_t key_a = choices[static_cast<size_t>(a.value)].key;
    const int32_t key_b = choices[static_cast<size_t>(b.value)].key;
    return key_a != key_b ? key_a < key_b : a < b;
  });
  // Mixed so that ids of different parents, splits and colors differ; the top bit keeps them apart
  // from chosen ids.
  uint64_t id = group_id().value;
  for (const uint64_t part : {split, static_cast<uint64_t>(color) + 1}) {
    id = (id ^ part) * 0x9e3779b97f4a7c15u;
    id ^= id >> 29;
  }
  return CreateGroup(members, GroupId(id | (uint64_t{1} << 63)));
}

}  // namespace everstep::collective
