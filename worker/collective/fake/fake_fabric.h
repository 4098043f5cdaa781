// The fake backend: N communicators in one process over queues in memory, with the algorithms of
// the host backend, and hooks with which a test kills ranks, holds messages back and acts at an
// exact message. For tests and simulation. FakeFabric is thread-safe; its communicators behave as
// Communicator says.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "worker/collective/communicator.h"

namespace everstep::collective {

enum class FakeDeath : uint8_t {
  kConnectionsClose,  // peers see it at once, as after kill -9
  kSilence,           // peers see nothing, as after SIGSTOP or a lost host
};

class FakeFabric {
 public:
  struct Options {
    int32_t size = 1;
    Generation generation{1};
    Duration operation_timeout = Seconds(60);
  };
  explicit FakeFabric(const Options& options);
  ~FakeFabric();  // the communicators may outlive it

  // The world communicator of one rank. REQUIRES: called once per rank.
  std::unique_ptr<Communicator> Connect(Rank rank);

  // The rank's own operations, running and later, return kAborted; what its peers see depends on
  // `how`. Groups too.
  void Kill(Rank rank, FakeDeath how);
  // Messages from one rank to another are kept back, in order, until released.
  void HoldMessages(Rank from, Rank to);
  void ReleaseMessages(Rank from, Rank to);
  // Runs `hook(from, to, number)` on the sender's thread just before message `number` (counted per
  // pair from 0) of the world communicator is delivered. It may call Kill, HoldMessages, and Abort
  // of any communicator.
  void SetMessageHook(std::function<void(Rank from, Rank to, uint64_t number)> hook);

 private:
  friend class FakeTransport;
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace everstep::collective
