// EngineCommunicator: what all backends of ours share. It runs the algorithms over a Transport on
// the caller's thread, runs asynchronous operations in order on one worker thread that starts with
// the first of them, and owns the life of the communicator: usable, then aborted for good. Threads
// as Communicator says.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "worker/collective/abort_source.h"
#include "worker/collective/algorithms.h"
#include "worker/collective/communicator.h"
#include "worker/collective/transport.h"

namespace everstep::collective {

struct EngineIdentity {
  Generation generation;
  GroupId group;
  Capabilities capabilities;
};

class EngineCommunicator : public Communicator {
 public:
  EngineCommunicator(EngineIdentity identity, std::unique_ptr<Transport> transport);
  ~EngineCommunicator()
      override;  // pending asynchronous operations are aborted; otherwise leaves in good order

  Rank rank() const override { return Rank(transport_->rank()); }
  int32_t world_size() const override { return transport_->size(); }
  Generation generation() const override { return identity_.generation; }
  GroupId group_id() const override { return identity_.group; }
  Capabilities capabilities() const override { return identity_.capabilities; }

  Status Run(const Operation& operation) override;
  std::shared_ptr<Work> Submit(const Operation& operation) override;
  void Abort(Status reason) override;
  Status AbortAndWait(Status reason, Duration timeout) override;
  bool aborted() const override { return abort_.triggered(); }
  Status abort_reason() const override { return abort_.reason(); }
  std::optional<Rank> failed_peer() const override;
  Status CheckHealth() override;

  static constexpr size_t kPendingWorkMax = 4096;

 protected:
  Transport& transport() { return *transport_; }
  AbortSource& abort_source() { return abort_; }

 private:
  class PendingWork;

  Status RunNow(const Operation& operation);
  Status AbortedStatus() const;
  void WorkerLoop();

  const EngineIdentity identity_;
  std::unique_ptr<Transport> transport_;
  Algorithms algorithms_;
  AbortSource abort_;

  // Number of threads inside an operation. Raised before aborted() is read and, in Abort, read
  // after it is set: one of the two always sees the other.
  std::atomic<int> in_flight_{0};
  std::mutex idle_mutex_;
  std::condition_variable idle_;  // in_flight_ fell to 0 while aborted

  // Works submitted and not yet done. While it is not 0, blocking operations queue behind.
  std::atomic<size_t> pending_{0};
  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<PendingWork>> queue_;  // guarded by queue_mutex_
  bool stopping_ = false;                           // guarded by queue_mutex_
  std::thread worker_;
};

}  // namespace everstep::collective
