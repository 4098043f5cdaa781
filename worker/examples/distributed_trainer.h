// Training in many processes through a Session: data parallel, or pipeline × data parallel (1F1B over
// micro-batches). Memory survives changes of membership; a step is applied only when the whole job
// voted for it. Used by everstep-train; thread-compatible, the program's one training thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "worker/client/session.h"
#include "worker/examples/adamw.h"
#include "worker/examples/aligned_buffer.h"
#include "worker/examples/gradient_reducer.h"
#include "worker/examples/step_log.h"
#include "worker/examples/text_data.h"
#include "worker/examples/transformer.h"

namespace everstep::examples {

struct DistributedTrainerOptions {
  ModelConfig model;
  AdamWConfig optimizer;
  int64_t micro_batch_count = 1;  // of the global batch, when the job does not say
  int64_t step_count = 1;
  uint64_t seed = 1;
  Reduction reduction = Reduction::kExact;
  int64_t snapshot_every = 0;     // steps; 0: never
  int64_t validation_sequence_count = 0;
  std::chrono::milliseconds step_time_min{0};  // a faster step waits: as if data came slowly
};

struct TrainingResult {
  bool reports = false;           // this rank holds the whole model's results
  double validation_loss = 0;
  std::string digest;             // of all parameters, in global tensor order
};

template <typename Scalar>
class DistributedTrainer {
 public:
  // All outlive the trainer. `log` may be closed.
  DistributedTrainer(const DistributedTrainerOptions& options, const TextData& data, Session& session,
                     StepLog& log);

  // Effect: joins, trains to the last step through any change of membership, and finishes. Prints
  // one line per applied step on the rank that leads (dp 0, pp 0).
  // As Session::Join; any other code: the program's own failure.
  Result<TrainingResult> Run();

 private:
  // What a coordinate's state lives in; kept while the stage stays the same.
  struct Shard {
    StageRange range;
    std::unique_ptr<Stage<Scalar>> stage;
    AlignedBuffer<Scalar> parameters, m, v;
    std::vector<ForwardContext<Scalar>> contexts;  // one per micro-batch in flight
    std::unique_ptr<GradientReducer<Scalar>> reducer;
  };

  // Takes the memory of a whole model before a place is known, as most jobs have one stage: a standby
  // then spends none of the recovery on it.
  Status Warm();
  Status LayOut(const Assignment& assignment, const RankAssignment& mine);
  Status Register();
  Status Initialize();
  Status Apply(Step step);

  // Until the last step is applied (true) or the membership changes (false).
  Result<bool> TrainGeneration();
  // Forward and backward over this rank's micro-batches; the reducer and the losses are filled.
  Status ComputeGradients(Step step);
  // Joins losses and norms over the job: mean loss and clip scale, the same bits everywhere.
  Status Agree(VoteExtras& extras);
  // Prints and reports the loss of the last applied step, on the leader, once.
  void Announce(Step step);
  Result<TrainingResult> Conclude();
  TokenBatch Batch(Step step, int64_t micro_batch) const;
  void DiscardIfUndecided();

  const DistributedTrainerOptions options_;
  const TextData& data_;
  Session& session_;
  StepLog& log_;
  Membership place_;
  std::unique_ptr<collective::Communicator> backward_group_;  // gradients flow here, activations in pp_group
  Shard shard_;
  std::vector<int64_t> stage_tensor_first_;  // of each stage, in the model's global order
  int64_t tensor_count_ = 0;                 // of the whole model
  int64_t micro_batches_ = 0;                // of the global batch
  std::vector<double> agreed_;               // losses of all micro-batches, then square sums of all tensors
  double loss_ = 0;                          // of the step in hand
  double last_loss_ = 0;                     // of the last applied step; part of the state
  Step announced_{0};
  double clip_scale_ = 1;
  std::chrono::steady_clock::time_point next_step_at_{};
  Step computed_{0};                         // gradients of this step are held and it is undecided; 0: none
  Generation computed_generation_;
  bool committing_ = false;
};

}  // namespace everstep::examples
