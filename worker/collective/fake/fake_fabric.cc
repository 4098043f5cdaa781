#include "worker/collective/fake/fake_fabric.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "worker/collective/engine_communicator.h"

namespace everstep::collective {

// Shared by the ranks of one fake communicator, and by the fabric's handle.
class FakeFabric::State {
 public:
  enum class Health : uint8_t { kAlive, kLeft, kAborted, kDead, kSilent };
  struct Message {
    MessageTag tag;
    std::vector<std::byte> bytes;
  };
  struct Pipe {
    std::deque<Message> messages;
    uint64_t sent = 0;
    bool held = false;
  };

  State(int32_t size_, Generation generation_, GroupId group_, Duration timeout)
      : size(size_),
        generation(generation_),
        group(group_),
        operation_timeout(timeout),
        health(static_cast<size_t>(size_), Health::kAlive),
        pipes(static_cast<size_t>(size_) * static_cast<size_t>(size_)) {}

  Pipe& PipeOf(int32_t from, int32_t to) {
    return pipes[static_cast<size_t>(from) * static_cast<size_t>(size) + static_cast<size_t>(to)];
  }
  Health& HealthOf(int32_t rank) { return health[static_cast<size_t>(rank)]; }

  void Kill(int32_t rank, FakeDeath how) {
    std::vector<std::pair<std::shared_ptr<State>, int32_t>> inner;
    {
      std::lock_guard lock(mutex);
      HealthOf(rank) = how == FakeDeath::kSilence ? Health::kSilent : Health::kDead;
      changed.notify_all();
      for (const auto& [id, made] : groups) {
        for (size_t i = 0; i < made.members.size(); ++i) {
          if (made.members[i].value == rank)
            inner.emplace_back(made.state, static_cast<int32_t>(i));
        }
      }
    }
    for (const auto& [state, inner_rank] : inner) state->Kill(inner_rank, how);
  }

  const int32_t size;
  const Generation generation;
  const GroupId group;
  const Duration operation_timeout;

  std::mutex mutex;
  std::condition_variable changed;
  // All below is guarded by mutex.
  std::vector<Health> health;
  std::vector<Pipe> pipes;
  std::function<void(Rank, Rank, uint64_t)> hook;
  struct Group {
    std::vector<Rank> members;
    std::shared_ptr<State> state;
    size_t joined = 0;
  };
  std::map<GroupId, Group> groups;
};

class FakeTransport : public Transport {
 public:
  using State = FakeFabric::State;
  FakeTransport(std::shared_ptr<State> state, int32_t rank)
      : state_(std::move(state)), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return state_->size; }
  void Begin(MessageTag tag) override { tag_ = tag; }

  Status Exchange(const Outgoing& out, const Incoming& in) override {
    if (out.peer != kNobody) {
      std::function<void(Rank, Rank, uint64_t)> hook;
      uint64_t number = 0;
      {
        std::lock_guard lock(state_->mutex);
        EVERSTEP_RETURN_IF_ERROR(Look());
        hook = state_->hook;
        number = state_->PipeOf(rank_, out.peer).sent++;
      }
      if (hook) hook(Rank(rank_), Rank(out.peer), number);
      std::lock_guard lock(state_->mutex);
      EVERSTEP_RETURN_IF_ERROR(Look());
      State::Message message{tag_, {}};
      if (out.bytes != 0) {
        const auto* data = static_cast<const std::byte*>(out.data);
        message.bytes.assign(data, data + out.bytes);
      }
      state_->PipeOf(rank_, out.peer).messages.push_back(std::move(message));
      state_->changed.notify_all();
    }
    if (in.peer == kNobody) return OkStatus();

    std::unique_lock lock(state_->mutex);
    State::Pipe& pipe = state_->PipeOf(in.peer, rank_);
    const auto deadline = std::chrono::steady_clock::now() + state_->operation_timeout;
    while (true) {
      EVERSTEP_RETURN_IF_ERROR(Look());
      if (!pipe.held && !pipe.messages.empty()) break;
      if (state_->HealthOf(in.peer) == State::Health::kLeft) {
        return Lost(in.peer, fmt::format("rank {} left while it was needed", in.peer));
      }
      if (state_->changed.wait_until(lock, deadline) == std::cv_status::timeout) {
        return DeadlineExceeded(fmt::format("operation timed out waiting for rank {}", in.peer));
      }
    }
    State::Message message = std::move(pipe.messages.front());
    pipe.messages.pop_front();
    if (message.tag != tag_ || message.bytes.size() != in.bytes) {
      return Internal(
          fmt::format("ranks disagree: rank {} sent {} bytes of operation {} where rank {} expects "
                      "{} bytes of operation {}",
                      in.peer, message.bytes.size(), message.tag.kind, rank_, in.bytes, tag_.kind));
    }
    if (in.bytes != 0) std::memcpy(in.data, message.bytes.data(), in.bytes);
    return OkStatus();
  }

  Status CheckHealth() override {
    std::lock_guard lock(state_->mutex);
    return Look();
  }

  void Shutdown() override { End(State::Health::kAborted); }
  void Leave() override { End(State::Health::kLeft); }

  std::optional<int32_t> failed_peer() const override {
    std::lock_guard lock(state_->mutex);
    if (failed_peer_ == kNobody) return std::nullopt;
    return failed_peer_;
  }

  State& state() { return *state_; }

 private:
  // REQUIRES: the mutex is held. What has ended, this rank or a peer of it.
  Status Look() {
    if (state_->HealthOf(rank_) != State::Health::kAlive) return Aborted("shut down");
    for (int32_t peer = 0; peer < state_->size; ++peer) {
      const State::Health health = state_->HealthOf(peer);
      if (health == State::Health::kAborted) return Aborted(fmt::format("rank {} aborted", peer));
      if (health == State::Health::kDead)
        return Lost(peer, fmt::format("lost rank {}: connection closed", peer));
    }
    return OkStatus();
  }

  Status Lost(int32_t peer, std::string why) {
    if (failed_peer_ == kNobody) failed_peer_ = peer;
    return Aborted(std::move(why));
  }

  void End(State::Health health) {
    std::lock_guard lock(state_->mutex);
    if (state_->HealthOf(rank_) == State::Health::kAlive) state_->HealthOf(rank_) = health;
    state_->changed.notify_all();
  }

  const std::shared_ptr<State> state_;
  const int32_t rank_;
  MessageTag tag_;
  int32_t failed_peer_ = kNobody;  // guarded by the state's mutex
};

namespace {

class FakeCommunicator : public EngineCommunicator {
 public:
  using State = FakeTransport::State;
  FakeCommunicator(std::shared_ptr<State> state, int32_t rank)
      : EngineCommunicator({state->generation, state->group, {.deterministic = true}},
                           std::make_unique<FakeTransport>(state, rank)) {}

  Result<std::unique_ptr<Communicator>> CreateGroup(std::span<const Rank> ranks,
                                                    GroupId id) override {
    State& state = static_cast<FakeTransport&>(transport()).state();
    const std::vector<Rank> members(ranks.begin(), ranks.end());
    int32_t mine = kNobody;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].value < 0 || members[i].value >= state.size ||
          std::count(members.begin(), members.end(), members[i]) != 1) {
        return InvalidArgument("a group is a list of different ranks of its parent");
      }
      if (members[i] == rank()) mine = static_cast<int32_t>(i);
    }
    if (mine == kNobody || id.value == 0)
      return InvalidArgument("a group is created by its members, with an id of its own");

    std::unique_lock lock(state.mutex);
    State::Group& group = state.groups[id];
    if (group.state == nullptr) {
      group.members = members;
      group.state = std::make_shared<State>(static_cast<int32_t>(members.size()), state.generation,
                                            id, state.operation_timeout);
    }
    if (group.members != members)
      return InvalidArgument("the members do not agree about the group");
    ++group.joined;
    state.changed.notify_all();
    const auto deadline = std::chrono::steady_clock::now() + state.operation_timeout;
    while (group.joined < members.size()) {
      if (aborted() || state.HealthOf(rank().value) != State::Health::kAlive)
        return Aborted("creating the group was aborted");
      if (state.changed.wait_until(lock, deadline) == std::cv_status::timeout) {
        return DeadlineExceeded("not all members came to create the group");
      }
    }
    return std::unique_ptr<Communicator>(std::make_unique<FakeCommunicator>(group.state, mine));
  }
};

}  // namespace

FakeFabric::FakeFabric(const Options& options)
    : state_(std::make_shared<State>(options.size, options.generation, GroupId(0),
                                     options.operation_timeout)) {}

FakeFabric::~FakeFabric() = default;

std::unique_ptr<Communicator> FakeFabric::Connect(Rank rank) {
  return std::make_unique<FakeCommunicator>(state_, rank.value);
}

void FakeFabric::Kill(Rank rank, FakeDeath how) { state_->Kill(rank.value, how); }

void FakeFabric::HoldMessages(Rank from, Rank to) {
  std::lock_guard lock(state_->mutex);
  state_->PipeOf(from.value, to.value).held = true;
}

void FakeFabric::ReleaseMessages(Rank from, Rank to) {
  std::lock_guard lock(state_->mutex);
  state_->PipeOf(from.value, to.value).held = false;
  state_->changed.notify_all();
}

void FakeFabric::SetMessageHook(std::function<void(Rank, Rank, uint64_t)> hook) {
  std::lock_guard lock(state_->mutex);
  state_->hook = std::move(hook);
}

}  // namespace everstep::collective
