// The one interface of all collective backends (host, nccl, fake). Owned by the rank library or by
// a test; its operations are called by the rank's training thread, Abort by any thread.
//
// A backend implements Run (blocking) and Submit (asynchronous) for an Operation, which is plain
// data; the named methods only fill one in. Operations of one communicator happen in the order in
// which the rank issues them, and all its ranks must issue the same collectives in the same order;
// the host backend detects when they do not.
//
// Failure: the first failure (a peer's connection breaks, a timeout, ranks that disagree, Abort)
// ends the communicator for good: every operation that waits returns within milliseconds, and every
// later one returns kAborted. Contents of output buffers are then undefined. A new generation makes
// new communicators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/base/time.h"
#include "worker/collective/types.h"

namespace everstep::collective {

enum class OperationKind : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kReceive,
  kBarrier,
  kSendReceive,
};

// One operation. Which fields count depends on the kind; see the named methods of Communicator.
struct Operation {
  OperationKind kind = OperationKind::kBarrier;
  DataType type = DataType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  Rank root{0};    // root of a rooted collective, or the peer of Send and Receive
  Rank source{0};  // of SendReceive, whose destination is `root`
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;  // in elements; ignored when the counts below are given
  std::span<const size_t> send_counts =
      {};  // elements per rank, for uneven sizes; one count in SendReceive
  std::span<const size_t> receive_counts = {};
  void* stream = nullptr;  // device stream on which a device backend orders the operation; host
                           // backends ignore it
};

// One asynchronous operation. Thread-safe.
class Work {
 public:
  virtual ~Work() = default;
  // Blocks until the operation has ended and no thread of the backend touches its buffers any more.
  // kAborted after Abort or a failure; kDeadlineExceeded when the operation timed out.
  virtual Status Wait() = 0;
  virtual bool Done() const = 0;
  // Calls `callback` once, when the operation has ended: on the backend's worker thread, or at once
  // on the caller's when it already has. The callback must not block; it may submit nothing. One
  // callback per work.
  virtual void OnComplete(std::function<void(const Status&)> callback) = 0;
};

struct Capabilities {
  bool shrink = false;         // can drop ranks without being rebuilt
  bool grow = false;           // can add ranks without being rebuilt
  bool device_memory = false;  // buffers may (and then must) be device memory
  bool deterministic =
      false;  // results are the same bits on all ranks and in every run of equal width
};

// Thread-compatible: one thread issues operations. Abort, AbortAndWait, aborted, abort_reason and
// failed_peer are thread-safe.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual Rank rank() const = 0;
  virtual int32_t world_size() const = 0;
  virtual Generation generation() const = 0;
  virtual GroupId group_id() const = 0;
  virtual Capabilities capabilities() const = 0;

  // Runs one operation and returns when its buffers may be used again.
  // kInvalidArgument: the operation makes no sense (nothing was sent). kAborted: the communicator
  // has ended. kDeadlineExceeded: the operation timeout passed; the communicator has ended.
  // kInternal: the ranks disagree about what they are doing; the communicator has ended. After an
  // error other than kInvalidArgument, Abort is in effect.
  virtual Status Run(const Operation& operation) = 0;

  // The same, asynchronously; counts are copied, buffers must live until the work is done. Never
  // null.
  virtual std::shared_ptr<Work> Submit(const Operation& operation) = 0;

  // Ends the communicator: every waiter returns kAborted within milliseconds, whatever the peers
  // do, and the peers learn of it. Idempotent: the first reason wins. Returns at once; an operation
  // may still be on its way out.
  virtual void Abort(Status reason) = 0;
  // Abort, and then waits until no thread is inside an operation: after OK no user buffer is
  // touched any more. kDeadlineExceeded: an operation did not leave in time (a device backend that
  // is stuck): kill the process.
  virtual Status AbortAndWait(Status reason, Duration timeout) = 0;
  virtual bool aborted() const = 0;
  virtual Status abort_reason() const = 0;  // OK while not aborted
  // The peer whose connection broke first, when that is why the communicator ended. Evidence, not
  // proof: a peer that closed because *it* lost somebody may be named when its notice could not be
  // delivered.
  virtual std::optional<Rank> failed_peer() const = 0;
  // Looks for broken connections without waiting; for a rank that computes for long. Same codes as
  // Run.
  virtual Status CheckHealth() = 0;

  // A new communicator of the given ranks of this one, in that order. Called by those ranks only,
  // all with the same list and an id that no other group of the generation uses (not 0). Only links
  // that the group needs are made. Aborting one communicator leaves the others alone, but aborts a
  // creation that is under way from it. kInvalidArgument: bad list. kAborted, kDeadlineExceeded: as
  // in Run, but this communicator stays usable.
  virtual Result<std::unique_ptr<Communicator>> CreateGroup(std::span<const Rank> ranks,
                                                            GroupId id) = 0;
  // Collective over this communicator: ranks with equal color form a group, ordered by (key, rank).
  // A negative color takes part and gets null. The group's id follows from this one's id, the color
  // and the number of earlier splits.
  Result<std::unique_ptr<Communicator>> Split(int32_t color, int32_t key);

  // --- Operations. Counts are in elements. In-place is allowed where input == output is
  // meaningful. ---

  // Every rank's output = reduction of all inputs, the same bits on every rank. input == output is
  // allowed.
  Status AllReduce(const void* input, void* output, size_t count, DataType type, ReduceOp op) {
    return Run({.kind = OperationKind::kAllReduce,
                .type = type,
                .reduce = op,
                .input = input,
                .output = output,
                .count = count});
  }
  // output holds world_size blocks of `count`. In place: input == output + rank * count.
  Status AllGather(const void* input, void* output, size_t count, DataType type) {
    return Run({.kind = OperationKind::kAllGather,
                .type = type,
                .input = input,
                .output = output,
                .count = count});
  }
  // Rank i contributes counts[i] elements.
  Status AllGatherV(const void* input, void* output, std::span<const size_t> counts,
                    DataType type) {
    return Run({.kind = OperationKind::kAllGather,
                .type = type,
                .input = input,
                .output = output,
                .receive_counts = counts});
  }
  // input holds world_size blocks of `count`; output gets the reduced block of this rank. In place:
  // output == input + rank * count; the other blocks of the input are then destroyed, and no
  // scratch memory is needed.
  Status ReduceScatter(const void* input, void* output, size_t count, DataType type, ReduceOp op) {
    return Run({.kind = OperationKind::kReduceScatter,
                .type = type,
                .reduce = op,
                .input = input,
                .output = output,
                .count = count});
  }
  Status ReduceScatterV(const void* input, void* output, std::span<const size_t> counts,
                        DataType type, ReduceOp op) {
    return Run({.kind = OperationKind::kReduceScatter,
                .type = type,
                .reduce = op,
                .input = input,
                .output = output,
                .send_counts = counts});
  }
  // `buffer` is read on the root and written elsewhere.
  Status Broadcast(void* buffer, size_t count, DataType type, Rank root) {
    return Run({.kind = OperationKind::kBroadcast,
                .type = type,
                .root = root,
                .input = buffer,
                .output = buffer,
                .count = count});
  }
  // output is written on the root only (elsewhere it may be null). input == output is allowed.
  Status Reduce(const void* input, void* output, size_t count, DataType type, ReduceOp op,
                Rank root) {
    return Run({.kind = OperationKind::kReduce,
                .type = type,
                .reduce = op,
                .root = root,
                .input = input,
                .output = output,
                .count = count});
  }
  Status Gather(const void* input, void* output, size_t count, DataType type, Rank root) {
    return Run({.kind = OperationKind::kGather,
                .type = type,
                .root = root,
                .input = input,
                .output = output,
                .count = count});
  }
  Status GatherV(const void* input, void* output, std::span<const size_t> counts, DataType type,
                 Rank root) {
    return Run({.kind = OperationKind::kGather,
                .type = type,
                .root = root,
                .input = input,
                .output = output,
                .receive_counts = counts});
  }
  Status Scatter(const void* input, void* output, size_t count, DataType type, Rank root) {
    return Run({.kind = OperationKind::kScatter,
                .type = type,
                .root = root,
                .input = input,
                .output = output,
                .count = count});
  }
  Status ScatterV(const void* input, void* output, std::span<const size_t> counts, DataType type,
                  Rank root) {
    return Run({.kind = OperationKind::kScatter,
                .type = type,
                .root = root,
                .input = input,
                .output = output,
                .send_counts = counts});
  }
  // input and output hold world_size blocks of `count`: block j of the input goes to rank j.
  Status AllToAll(const void* input, void* output, size_t count, DataType type) {
    return Run({.kind = OperationKind::kAllToAll,
                .type = type,
                .input = input,
                .output = output,
                .count = count});
  }
  Status AllToAllV(const void* input, std::span<const size_t> send_counts, void* output,
                   std::span<const size_t> receive_counts, DataType type) {
    return Run({.kind = OperationKind::kAllToAll,
                .type = type,
                .input = input,
                .output = output,
                .send_counts = send_counts,
                .receive_counts = receive_counts});
  }
  // A send returns when the buffer may be reused, which says nothing about the receiver; a large
  // one waits for it. Two ranks that both send first may therefore wait for each other, also
  // asynchronously, since operations keep their order: what is exchanged goes through SendReceive
  // or AllToAll.
  Status Send(const void* input, size_t count, DataType type, Rank to) {
    return Run(
        {.kind = OperationKind::kSend, .type = type, .root = to, .input = input, .count = count});
  }
  Status Receive(void* output, size_t count, DataType type, Rank from) {
    return Run({.kind = OperationKind::kReceive,
                .type = type,
                .root = from,
                .output = output,
                .count = count});
  }
  // Sends to one rank and receives from one (the same or another) at the same time.
  Status SendReceive(const void* input, size_t send_count, Rank to, void* output,
                     size_t receive_count, Rank from, DataType type) {
    return Run({.kind = OperationKind::kSendReceive,
                .type = type,
                .root = to,
                .source = from,
                .input = input,
                .output = output,
                .send_counts = {&send_count, 1},
                .receive_counts = {&receive_count, 1}});
  }
  Status Barrier() { return Run({.kind = OperationKind::kBarrier}); }

  // Asynchronous forms of the commonest; others through Submit.
  std::shared_ptr<Work> AllReduceAsync(const void* input, void* output, size_t count, DataType type,
                                       ReduceOp op) {
    return Submit({.kind = OperationKind::kAllReduce,
                   .type = type,
                   .reduce = op,
                   .input = input,
                   .output = output,
                   .count = count});
  }
  std::shared_ptr<Work> AllGatherAsync(const void* input, void* output, size_t count,
                                       DataType type) {
    return Submit({.kind = OperationKind::kAllGather,
                   .type = type,
                   .input = input,
                   .output = output,
                   .count = count});
  }
  std::shared_ptr<Work> ReduceScatterAsync(const void* input, void* output, size_t count,
                                           DataType type, ReduceOp op) {
    return Submit({.kind = OperationKind::kReduceScatter,
                   .type = type,
                   .reduce = op,
                   .input = input,
                   .output = output,
                   .count = count});
  }
  std::shared_ptr<Work> BroadcastAsync(void* buffer, size_t count, DataType type, Rank root) {
    return Submit({.kind = OperationKind::kBroadcast,
                   .type = type,
                   .root = root,
                   .input = buffer,
                   .output = buffer,
                   .count = count});
  }
  std::shared_ptr<Work> SendAsync(const void* input, size_t count, DataType type, Rank to) {
    return Submit(
        {.kind = OperationKind::kSend, .type = type, .root = to, .input = input, .count = count});
  }
  std::shared_ptr<Work> ReceiveAsync(void* output, size_t count, DataType type, Rank from) {
    return Submit({.kind = OperationKind::kReceive,
                   .type = type,
                   .root = from,
                   .output = output,
                   .count = count});
  }
  std::shared_ptr<Work> BarrierAsync() { return Submit({.kind = OperationKind::kBarrier}); }

 private:
  uint64_t split_count_ = 0;
};

}  // namespace everstep::collective
