#include "worker/examples/model_config.h"

#include <fmt/core.h>

namespace everstep::examples {
namespace {

Status CheckRange(const char* field, int64_t value, int64_t first, int64_t last) {
  if (value >= first && value <= last) return OkStatus();
  return InvalidArgument(
      fmt::format("{} is {}: choose a value from {} to {}", field, value, first, last));
}

}  // namespace

const std::vector<Preset>& Presets() {
  static const std::vector<Preset>& presets = *new std::vector<Preset>{
      {.name = "tiny",
       .model = {.layer_count = 2,
                 .width = 32,
                 .head_count = 2,
                 .mlp_width = 128,
                 .sequence_length = 32,
                 .sequences_per_micro_batch = 1},
       .training = {.micro_batch_count = 8,
                    .step_count = 200,
                    .warmup_step_count = 10,
                    .learning_rate = 5e-3,
                    .validation_sequence_count = 32}},
      {.name = "small",
       .model = {.layer_count = 4,
                 .width = 96,
                 .head_count = 3,
                 .mlp_width = 384,
                 .sequence_length = 64,
                 .sequences_per_micro_batch = 1},
       .training = {.micro_batch_count = 8,
                    .step_count = 300,
                    .warmup_step_count = 20,
                    .learning_rate = 2e-3,
                    .validation_sequence_count = 32}},
      {.name = "base",
       .model = {.layer_count = 4,
                 .width = 288,
                 .head_count = 6,
                 .mlp_width = 1152,
                 .sequence_length = 64,
                 .sequences_per_micro_batch = 1},
       .training = {.micro_batch_count = 8,
                    .step_count = 400,
                    .warmup_step_count = 20,
                    .learning_rate = 1e-3,
                    .validation_sequence_count = 32}},
      {.name = "large",
       .model = {.layer_count = 6,
                 .width = 512,
                 .head_count = 8,
                 .mlp_width = 2048,
                 .sequence_length = 128,
                 .sequences_per_micro_batch = 1},
       .training = {.micro_batch_count = 8,
                    .step_count = 400,
                    .warmup_step_count = 20,
                    .learning_rate = 6e-4,
                    .validation_sequence_count = 16}},
  };
  return presets;
}

Result<Preset> FindPreset(std::string_view name) {
  std::string known;
  for (const Preset& preset : Presets()) {
    if (preset.name == name) return preset;
    known += (known.empty() ? "" : ", ") + preset.name;
  }
  return InvalidArgument(fmt::format("size is \"{}\": choose one of {}", name, known));
}

Status ValidateModelConfig(const ModelConfig& config) {
  EVERSTEP_RETURN_IF_ERROR(CheckRange("layer_count", config.layer_count, 1, kLayerCountMax));
  EVERSTEP_RETURN_IF_ERROR(CheckRange("width", config.width, 8, kWidthMax));
  EVERSTEP_RETURN_IF_ERROR(CheckRange("head_count", config.head_count, 1, config.width / 8));
  EVERSTEP_RETURN_IF_ERROR(CheckRange("mlp_width", config.mlp_width, 8, 4 * kWidthMax));
  EVERSTEP_RETURN_IF_ERROR(
      CheckRange("sequence_length", config.sequence_length, 8, kSequenceLengthMax));
  EVERSTEP_RETURN_IF_ERROR(CheckRange("sequences_per_micro_batch", config.sequences_per_micro_batch,
                                      1, kSequencesPerMicroBatchMax));
  if (config.width % config.head_count != 0) {
    return InvalidArgument(fmt::format("head_count is {}: it must divide width, which is {}",
                                       config.head_count, config.width));
  }
  return OkStatus();
}

int64_t ParameterCount(const ModelConfig& config) {
  const int64_t block =
      2 * config.width + 4 * config.width * config.width + 2 * config.width * config.mlp_width;
  return (2 * kVocabularySize + config.sequence_length + 1) * config.width +
         config.layer_count * block;
}

}  // namespace everstep::examples
