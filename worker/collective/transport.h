// Transport: how bytes move between the ranks of one communicator. The algorithms are written once
// over this seam; sockets (host) and queues in memory (fake) are behind it, and shared memory
// between ranks of one server can be. Called by one thread at a time (whoever runs the operation),
// except where stated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "proto/base/status.h"
#include "worker/collective/reduce_kernels.h"

namespace everstep::collective {

// What both ends of a message must agree on; carried in front of it.
struct MessageTag {
  uint8_t kind = 0;
  uint8_t type = 0;
  uint8_t reduce = 0;
  bool operator==(const MessageTag&) const = default;
};

inline constexpr int32_t kNobody = -1;

struct Outgoing {
  int32_t peer = kNobody;
  const void* data = nullptr;
  size_t bytes = 0;
};

struct Incoming {
  int32_t peer = kNobody;
  void* data = nullptr;
  size_t bytes = 0;
};

// One piece of a stream that arrives: into = received, or, when other is set, into = received op
// other. `divide` asks for the division of an average afterwards.
struct StreamReceive {
  std::byte* into = nullptr;
  const std::byte* other = nullptr;
  size_t bytes = 0;
  bool divide = false;
};

struct StreamSend {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// A pipelined pass along a ring or chain. The first `head` sends are ready at the start; send head
// + i is receive i (same memory and size) and may leave as its bytes arrive. A transport cuts
// through at any element boundary.
struct StreamPlan {
  int32_t from = kNobody;
  int32_t to = kNobody;
  std::span<const StreamReceive> receives;
  std::span<const StreamSend> sends;
  size_t head = 0;
  size_t element_bytes = 1;
  ReduceFunction reduce = nullptr;
  DivideFunction divide = nullptr;
  double divisor = 1;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;

  // Starts an operation: sets the tag that its messages carry and the time allowed.
  virtual void Begin(MessageTag tag) = 0;
  // Sends and receives one message each, concurrently; either peer may be kNobody. Returns when the
  // outgoing buffer may be reused and the incoming one is complete. kAborted: Shutdown was called,
  // or a peer is gone (see failed_peer). kDeadlineExceeded. kInternal: tags or sizes differ.
  virtual Status Exchange(const Outgoing& out, const Incoming& in) = 0;
  // Same codes. The default moves piece by piece through Exchange.
  virtual Status Stream(const StreamPlan& plan);

  // Looks for peers that are gone, without waiting.
  virtual Status CheckHealth() = 0;
  // Ends everything at once; tells the peers when there is a way. Thread-safe, idempotent, never
  // blocks.
  virtual void Shutdown() = 0;
  // Leaves in good order: peers that need nothing more from this rank are not disturbed. Called
  // once, when idle.
  virtual void Leave() = 0;
  // The peer whose loss made an operation fail. Thread-safe.
  virtual std::optional<int32_t> failed_peer() const = 0;
};

}  // namespace everstep::collective
