// Session: what a training process holds to be part of a job. It joins, trains, votes for each step, and comes back
// to Join whenever the membership changed; in between, its memory stays where it is.
//
//   auto session = Session::Create({});                 // from the environment its agent gave it, or static
//   (*session)->SetLayout(...); SetInitialize(...); SetApply(...);
//   while (step < last) {
//     auto membership = session->Join();                // restores memory to the recovery point
//     for (step = membership->next_step; ...; step = step.Next()) {
//       session->BeginStep(step);
//       ... compute, reduce over session->dp_group() ...
//       session->GradientsComplete(step);
//       auto outcome = session->Commit(step);           // votes, then calls Apply
//       if (!outcome.ok() || *outcome == CommitOutcome::kSwitch) break;   // Join again
//     }
//   }
//   session->Finish();
//
// Threads: everything here is called by the program's one training thread, except where stated. The library has one
// thread of its own (the agent's socket, and aborts) besides the listener of the mesh; callbacks run on the training
// thread, inside Join or Commit, and must not call the session back, except RegisterTensor and ClearTensors.
//
// Environment: EVERSTEP_AGENT_SOCKET, EVERSTEP_PROCESS_ID, EVERSTEP_PAGE_FD, EVERSTEP_STAGING_FD (inherited
// descriptors), EVERSTEP_HOST (address for the mesh; default 127.0.0.1). Without an agent socket the world is static:
// EVERSTEP_STATIC_RANK, EVERSTEP_STATIC_WORLD (host:port of each rank, separated by commas), EVERSTEP_STATIC_PP
// (pipeline stages); with none of them it is one rank. A static world cannot recover: Join works once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/assignment.h"
#include "proto/model/progress.h"
#include "proto/model/rank_messages.h"
#include "worker/collective/communicator.h"

namespace everstep {

namespace client {
struct RankEnvironment;
}

struct SessionOptions {
  // Of the global batch, for a static world only; the job's own is in the assignment.
  int32_t micro_batch_count = 0;
  Duration connect_timeout = Seconds(20);       // of one mesh
  Duration operation_timeout = Seconds(300);    // backstop of each collective
  Duration abort_confirm_max = Seconds(5);      // then the process ends, because it can't be trusted to have left
};

// This rank's place in the new generation.
struct Membership {
  Generation generation;
  Rank rank;
  int32_t world_size = 1;
  int32_t dp = 0, tp = 0, pp = 0;
  int32_t dp_size = 1, tp_size = 1, pp_size = 1;
  int32_t local_rank = 0;
  int32_t micro_batch_first = 0;   // its share of the global batch: [first, first + count)
  int32_t micro_batch_count = 0;
  int32_t micro_batch_total = 0;   // 0: the program shares out work itself
  StateId state;                   // in memory now
  Step next_step;                  // state.step + 1
  RestoreAction restored = RestoreAction::kInitialize;
  std::string restored_from;       // for people: "kept", "rolled-forward", "rank 2", "s03 staged"
  uint64_t bytes_restored = 0;
};

// What this rank adds to the vote. One rank's word counts for all.
struct VoteExtras {
  bool out_of_range = false;  // exact reduction: a gradient exceeded its block's exponent
  bool not_finite = false;    // a loss or gradient is NaN or infinite
};

enum class CommitOutcome : uint8_t {
  kApplied,    // go on with the next step
  kRedo,       // some rank was out of range: nothing was applied, compute the step again
  kNotFinite,  // some rank was not finite: nothing was applied, the program decides
  kSwitch,     // applied, and this generation is over: call Join
};

struct SessionCounters {
  uint64_t snapshots_taken = 0;
  uint64_t snapshots_skipped = 0;   // no free slot, no staging memory, or over its limit
  uint64_t stale_refused = 0;       // messages of older generations
  uint64_t metrics_dropped = 0;     // the agent did not read fast enough
};

class Session {
 public:
  // INVALID_ARGUMENT: the environment makes no sense; the message names the variable, its value and the remedy.
  // UNAVAILABLE: no agent, or no address to listen on. FAILED_PRECONDITION: the agent refuses this process.
  static Result<std::unique_ptr<Session>> Create(const SessionOptions& options);
  // The same with an environment that was read before (worker/client/static_world.h).
  static Result<std::unique_ptr<Session>> CreateIn(const SessionOptions& options,
                                                   const client::RankEnvironment& environment);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // --- The state: named tensors in the program's memory, which stay put until cleared or registered again.

  // `shape` is that of this piece (empty: the whole global_shape), `offsets` its place (empty: zeros). A name
  // registered before is replaced. INVALID_ARGUMENT: names, sizes or counts out of bounds.
  Status RegisterTensor(std::string_view name, std::string_view dtype, std::span<const int64_t> global_shape,
                        std::span<const int64_t> offsets, std::span<const int64_t> shape, void* data, size_t bytes);
  void ClearTensors();

  // Called when this rank's place is known, before its state is restored: build and register the state for the
  // coordinate. When the action is kKeep or kRollForward the memory must be left as it is.
  void SetLayout(std::function<Status(const Assignment&, const RankAssignment&)> layout);
  // Computes the state before step 1. Without it, memory as it is counts as the initial state.
  void SetInitialize(std::function<Status()> initialize);
  // Updates the registered state with the complete gradients of `step`. Talks to nobody. Also called by Join, for a
  // step whose vote passed but that a failure kept this rank from applying: gradients must stay untouched from
  // GradientsComplete until the next BeginStep.
  void SetApply(std::function<Status(Step)> apply);
  // A number that must agree over all ranks besides the step: where the data is. Default: the step.
  void SetDataPosition(std::function<uint64_t()> position);

  // --- Membership

  // Blocks until this rank has a place in a generation and its memory is at the recovery point. All communicators of
  // the generation before are gone then.
  // FAILED_PRECONDITION: the job ended, or a static world lost a rank. Any other code: what a callback of the program
  // returned; the process should end.
  Result<Membership> Join();

  // REQUIRES: Join succeeded. References live until the next Join.
  collective::Communicator& world();
  collective::Communicator& dp_group();  // ranks with this rank's shard, by dp
  collective::Communicator& pp_group();  // the pipeline this rank is a stage of, by pp
  // A group of world ranks in the given order; called by its members only, with an id below 2^32 that no other group
  // of this generation uses. It is aborted together with the generation.
  Result<std::unique_ptr<collective::Communicator>> CreateGroup(std::span<const Rank> ranks, uint32_t id);

  // --- The step. ABORTED from any of these: the generation is over; call Join.

  Status BeginStep(Step step);
  // The step's gradients are complete in memory (device work observed to have ended).
  Status GradientsComplete(Step step);
  // The job's vote; if it passes, calls Apply. Implies GradientsComplete.
  Result<CommitOutcome> Commit(Step step, const VoteExtras& extras = {});

  // Copies the registered state into staging memory and returns; the agent does the rest. Between steps only.
  // RESOURCE_EXHAUSTED: no slot is free (counted). FAILED_PRECONDITION: there is no staging memory, or not now.
  Status Snapshot();

  void ReportMetric(Step step, std::string_view name, double value);

  // All ranks come to their end together, then the agent is told. ABORTED: not yet; call Join and go on.
  Status Finish();

  // Thread-safe.
  // This rank's generation is over, so what it computes now will be thrown away: a program that asks between the
  // pieces of a long step (micro-batches, layers) is back in Join sooner. Costs one atomic read.
  bool generation_over() const;
  bool is_static() const;
  ProcessId process() const;
  Progress progress() const;
  SessionCounters counters() const;

 private:
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep
