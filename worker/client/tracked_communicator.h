// What the program holds instead of a backend's communicator: the same operations, and the session learns of each
// collective entered (progress page) and of each failure. The backend's object is shared with the session, which can
// abort it from its own thread while the program destroys this one. Threads as Communicator says.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "worker/collective/communicator.h"

namespace everstep::client {

// Implemented by Session::Impl. Thread-safe.
class CommunicatorObserver {
 public:
  virtual ~CommunicatorObserver() = default;
  virtual void CollectiveEntered() = 0;
  // `suspect`: world rank, or -1.
  virtual void CollectiveEnded(Generation generation, Rank suspect, const Status& failure) = 0;
  // Makes an abort of the generation reach this one too; at once, when it was aborted already.
  virtual void Track(Generation generation, const std::shared_ptr<collective::Communicator>& communicator) = 0;
};

class TrackedCommunicator : public collective::Communicator {
 public:
  // `world_ranks`: of each rank of the communicator.
  TrackedCommunicator(CommunicatorObserver* observer, std::shared_ptr<collective::Communicator> inner,
                      std::vector<Rank> world_ranks)
      : observer_(observer), inner_(std::move(inner)), world_ranks_(std::move(world_ranks)) {
    observer_->Track(inner_->generation(), inner_);
  }

  Rank rank() const override { return inner_->rank(); }
  int32_t world_size() const override { return inner_->world_size(); }
  Generation generation() const override { return inner_->generation(); }
  collective::GroupId group_id() const override { return inner_->group_id(); }
  collective::Capabilities capabilities() const override { return inner_->capabilities(); }

  Status Run(const collective::Operation& operation) override {
    observer_->CollectiveEntered();
    Status status = inner_->Run(operation);
    Report(status);
    return status;
  }
  std::shared_ptr<collective::Work> Submit(const collective::Operation& operation) override {
    observer_->CollectiveEntered();
    return inner_->Submit(operation);
  }
  void Abort(Status reason) override { inner_->Abort(std::move(reason)); }
  Status AbortAndWait(Status reason, Duration timeout) override {
    return inner_->AbortAndWait(std::move(reason), timeout);
  }
  bool aborted() const override { return inner_->aborted(); }
  Status abort_reason() const override { return inner_->abort_reason(); }
  std::optional<Rank> failed_peer() const override { return inner_->failed_peer(); }
  Status CheckHealth() override {
    Status status = inner_->CheckHealth();
    Report(status);
    return status;
  }
  Result<std::unique_ptr<collective::Communicator>> CreateGroup(std::span<const Rank> ranks,
                                                                collective::GroupId id) override {
    auto created = inner_->CreateGroup(ranks, id);
    if (!created.ok()) return created.status();
    std::vector<Rank> world_ranks;
    for (const Rank rank : ranks) world_ranks.push_back(world_ranks_[static_cast<size_t>(rank.value)]);
    std::shared_ptr<collective::Communicator> inner = std::move(created).value();
    return std::unique_ptr<collective::Communicator>(
        std::make_unique<TrackedCommunicator>(observer_, std::move(inner), std::move(world_ranks)));
  }

  // The failed peer as a world rank; -1 if there is none.
  Rank Suspect() const {
    const std::optional<Rank> peer = inner_->failed_peer();
    if (!peer || peer->value < 0 || static_cast<size_t>(peer->value) >= world_ranks_.size()) return Rank(-1);
    return world_ranks_[static_cast<size_t>(peer->value)];
  }
  collective::Communicator& inner() { return *inner_; }

 private:
  void Report(const Status& status) {
    if (status.ok() || status.code() == StatusCode::kInvalidArgument) return;
    observer_->CollectiveEnded(inner_->generation(), Suspect(), status);
  }

  CommunicatorObserver* const observer_;
  const std::shared_ptr<collective::Communicator> inner_;
  const std::vector<Rank> world_ranks_;
};

}  // namespace everstep::client
