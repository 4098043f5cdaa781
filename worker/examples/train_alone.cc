// everstep-train-alone: trains the example model in one process, without any controller. Shows that
// the model learns, how fast it is, and which digest a distributed run must reach.

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <string>

#include "proto/base/status.h"
#include "worker/examples/cpu_check.h"
#include "worker/examples/kernels.h"
#include "worker/examples/local_trainer.h"

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
};

int Fail(const Status& status, int exit_code) {
  fmt::print(stderr, "everstep-train-alone: {}\n", status.message());
  return exit_code;
}

template <typename Scalar>
int Train(const Flags& flags, const Preset& preset, const TextData& data) {
  using Clock = std::chrono::steady_clock;
  const int64_t step_count = flags.steps > 0 ? flags.steps : preset.training.step_count;
  const LocalTrainerOptions options{.model = preset.model,
                                    .optimizer = DefaultAdamW(preset.training, step_count),
                                    .micro_batch_count = preset.training.micro_batch_count,
                                    .seed = flags.seed};
  auto created = LocalTrainer<Scalar>::Create(options, data);
  if (!created.ok()) return Fail(created.status(), kExitUsage);
  LocalTrainer<Scalar>& trainer = *created.value();

  fmt::print("model {} parameters {} precision {} instructions {}\n", preset.name,
             trainer.stage().parameter_count(), flags.fp64 ? "fp64" : "fp32",
             kernels::InstructionSetName());
  fmt::print("data {} files {} skipped {} train_bytes {} validation_bytes {} digest {}\n",
             flags.data, data.file_count(), data.skipped_file_count(), data.train_bytes(),
             data.validation_bytes(), data.digest());
  const int64_t validation_count = preset.training.validation_sequence_count;
  fmt::print("validation loss {:.9g}\n", trainer.Validate(validation_count));

  const Clock::time_point start = Clock::now();
  for (int64_t i = 0; i < step_count; ++i) {
    const StepReport report = trainer.TrainStep();
    fmt::print("step {} loss {:.9g}\n", i, report.loss);
    std::fflush(stdout);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const double tokens = static_cast<double>(step_count * options.micro_batch_count *
                                            options.model.TokensPerMicroBatch());

  fmt::print("validation loss {:.9g}\n", trainer.Validate(validation_count));
  fmt::print("speed {:.0f} tokens/s, {:.2f} ms per step\n", tokens / seconds,
             1000 * seconds / static_cast<double>(step_count));
  fmt::print("digest {}\n", trainer.Digest());
  return 0;
}

int Run(int argc, char** argv) {
  if (const Status processor = CheckProcessor(); !processor.ok())
    return Fail(processor, kExitFailure);
  Flags flags;
  CLI::App app{
      "Trains the example language model in one process.\n"
      "Example: everstep-train-alone --size small --steps 100"};
  app.add_option("--size", flags.size, "tiny, small, base or large")->capture_default_str();
  app.add_option("--data", flags.data, "a text file or a folder of text files")
      ->capture_default_str();
  app.add_option("--steps", flags.steps, "optimizer steps; 0: as many as the size is meant for")
      ->check(CLI::Range(int64_t{0}, kStepCountMax))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "of the initial values and of the samples")
      ->capture_default_str();
  app.add_flag("--fp64", flags.fp64, "compute in double precision");
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
