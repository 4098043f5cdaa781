// The collective algorithms, over any Transport. Every result is the same bits on all ranks and in
// every run: the order in which contributions meet depends only on rank numbers and sizes, never on
// timing.
//
//   small all-reduce   recursive doubling; ranks past the largest power of two fold into it first
//   large all-reduce   ring reduce-scatter and all-gather as one stream that cuts through at
//   element boundaries broadcast, reduce  binomial tree when small, pipelined chain when large
//   barrier            dissemination
//
// With chord links (peers at distance 2^k) everything but gather, scatter, all-to-all and arbitrary
// send and receive works; those open further links. Thread-compatible: the caller's thread does all
// the work.
#pragma once

#include <cstddef>
#include <vector>

#include "worker/collective/communicator.h"
#include "worker/collective/transport.h"

namespace everstep::collective {

class Algorithms {
 public:
  explicit Algorithms(Transport& transport) : transport_(transport) {}
  // kInvalidArgument before anything is sent; otherwise the transport's codes.
  Status Run(const Operation& operation);

 private:
  Status Validate(const Operation& operation) const;
  Status AllReduce(const Operation& operation);
  Status AllReduceSmall(const Operation& operation);
  Status AllReduceRing(const Operation& operation);
  Status AllGather(const Operation& operation);
  Status ReduceScatter(const Operation& operation);
  Status Broadcast(const Operation& operation);
  Status Reduce(const Operation& operation);
  Status Gather(const Operation& operation);
  Status Scatter(const Operation& operation);
  Status AllToAll(const Operation& operation);
  Status Barrier();

  // Element counts per rank, as given or all equal.
  size_t CountOf(std::span<const size_t> counts, size_t count, int32_t rank) const;
  std::byte* Scratch(size_t bytes);

  Transport& transport_;
  std::vector<std::byte> scratch_;  // kept between operations up to kScratchKeptBytes
  std::vector<StreamReceive> receives_;
  std::vector<StreamSend> sends_;
};

}  // namespace everstep::collective
