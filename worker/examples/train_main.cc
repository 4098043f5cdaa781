// everstep-train: the example model, trained by any number of processes through libeverstep's session.
// Started by an agent it survives whatever happens to its peers; with a static world (EVERSTEP_STATIC_*)
// it runs without controller and agent.

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "proto/base/status.h"
#include "worker/client/session.h"
#include "worker/examples/cpu_check.h"
#include "worker/examples/distributed_trainer.h"
#include "worker/examples/step_log.h"

namespace everstep::examples {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int64_t kStepCountMax = 10'000'000;

struct Flags {
  std::string size = "small";
  std::string data = kDefaultDataPath;
  int64_t steps = 0;  // 0: the preset's
  uint64_t seed = 1;
  bool fp64 = false;
  Reduction reduction = Reduction::kExact;
  int64_t micro_batches = 0;  // 0: the preset's
  int64_t snapshot_every = 0;
  int64_t pace_milliseconds = 0;
  std::string step_log;       // empty: EVERSTEP_OUTPUT_DIR
};

int Fail(const Status& status, int exit_code) {
  fmt::print(stderr, "everstep-train: {}\n", status.message());
  return exit_code;
}

template <typename Scalar>
int Train(const Flags& flags, const Preset& preset, const TextData& data) {
  DistributedTrainerOptions options;
  options.step_count = flags.steps > 0 ? flags.steps : preset.training.step_count;
  options.model = preset.model;
  options.optimizer = DefaultAdamW(preset.training, options.step_count);
  options.micro_batch_count = flags.micro_batches > 0 ? flags.micro_batches : preset.training.micro_batch_count;
  options.seed = flags.seed;
  options.reduction = flags.reduction;
  options.snapshot_every = flags.snapshot_every;
  options.step_time_min = std::chrono::milliseconds(flags.pace_milliseconds);
  options.validation_sequence_count = preset.training.validation_sequence_count;

  SessionOptions session_options;
  session_options.micro_batch_count = static_cast<int32_t>(options.micro_batch_count);
  const Result<std::unique_ptr<Session>> session = Session::Create(session_options);
  if (!session.ok()) {
    return Fail(session.status(),
                session.status().code() == StatusCode::kInvalidArgument ? kExitUsage : kExitFailure);
  }
  StepLog log;
  std::string folder = flags.step_log;
  if (const char* output = std::getenv("EVERSTEP_OUTPUT_DIR"); folder.empty() && output != nullptr) folder = output;
  if (!folder.empty()) {
    if (const Status opened = log.Open(folder, (*session)->process()); !opened.ok()) {
      return Fail(opened, kExitUsage);
    }
  }
  DistributedTrainer<Scalar> trainer(options, data, **session, log);
  const Result<TrainingResult> result = trainer.Run();
  if (!result.ok()) return Fail(result.status(), kExitFailure);
  if (result->reports) {
    fmt::print("validation loss {:.9g}\n", result->validation_loss);
    fmt::print("final digest {}\n", result->digest);
    std::fflush(stdout);
  }
  return 0;
}

int Run(int argc, char** argv) {
  if (const Status processor = CheckProcessor(); !processor.ok()) return Fail(processor, kExitFailure);
  Flags flags;
  CLI::App app{
      "Trains the example language model in one or many processes.\n"
      "Example: everstep run --nnodes 4 everstep-train --size base --steps 100"};
  app.add_option("--size", flags.size, "tiny, small, base or large")->capture_default_str();
  app.add_option("--data", flags.data, "a text file or a folder of text files")->capture_default_str();
  app.add_option("--steps", flags.steps, "optimizer steps; 0: as many as the size is meant for")
      ->check(CLI::Range(int64_t{0}, kStepCountMax))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "of the initial values and of the samples")->capture_default_str();
  app.add_flag("--fp64", flags.fp64, "compute in double precision");
  app.add_option("--reduction", flags.reduction,
                 "exact: the same bits however the batch is shared; native: floating point")
      ->transform(CLI::CheckedTransformer(std::map<std::string, Reduction>{
          {"exact", Reduction::kExact}, {"native", Reduction::kNative}}));
  app.add_option("--micro-batches", flags.micro_batches,
                 "of the global batch, where the job does not say; 0: the size's own")
      ->check(CLI::Range(int64_t{0}, kMicroBatchCountMax))
      ->capture_default_str();
  app.add_option("--snapshot-every", flags.snapshot_every, "steps between snapshots; 0: none")
      ->check(CLI::Range(int64_t{0}, kStepCountMax))
      ->capture_default_str();
  app.add_option("--pace", flags.pace_milliseconds, "milliseconds that a step takes at least, as if data came slowly")
      ->check(CLI::Range(int64_t{0}, int64_t{60'000}))
      ->capture_default_str();
  app.add_option("--step-log", flags.step_log,
                 "folder for the log of steps (default: EVERSTEP_OUTPUT_DIR, which is lost with its server)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const Result<Preset> preset = FindPreset(flags.size);
  if (!preset.ok()) return Fail(preset.status(), kExitUsage);
  const Result<TextData> data = TextData::Load(flags.data, preset->model.sequence_length);
  if (!data.ok()) return Fail(data.status(), kExitUsage);
  return flags.fp64 ? Train<double>(flags, *preset, *data) : Train<float>(flags, *preset, *data);
}

}  // namespace
}  // namespace everstep::examples

int main(int argc, char** argv) { return everstep::examples::Run(argc, argv); }
