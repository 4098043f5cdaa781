// The shape of the example language model and the sizes that come ready-made. Plain data, any
// thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace everstep::examples {

inline constexpr int64_t kVocabularySize = 256;  // one token per byte
inline constexpr int64_t kLayerCountMax = 256;
inline constexpr int64_t kWidthMax = 16384;
inline constexpr int64_t kSequenceLengthMax = 4096;
inline constexpr int64_t kSequencesPerMicroBatchMax = 1024;
inline constexpr int64_t kMicroBatchCountMax = 65536;

struct ModelConfig {
  int64_t layer_count = 0;
  int64_t width = 0;
  int64_t head_count = 0;
  int64_t mlp_width = 0;
  int64_t sequence_length = 0;  // tokens
  int64_t sequences_per_micro_batch = 0;

  int64_t TokensPerMicroBatch() const { return sequences_per_micro_batch * sequence_length; }
  bool operator==(const ModelConfig&) const = default;
};

// How a preset is trained unless flags say otherwise.
struct TrainingDefaults {
  int64_t micro_batch_count = 0;  // of one global batch, constant through every change
  int64_t step_count = 0;
  int64_t warmup_step_count = 0;
  double learning_rate = 0;  // peak
  int64_t validation_sequence_count = 0;
};

struct Preset {
  std::string name;
  ModelConfig model;
  TrainingDefaults training;
};

// "tiny", "small", "base", "large", in this order.
const std::vector<Preset>& Presets();
// INVALID_ARGUMENT: no such preset; the message lists those that exist.
Result<Preset> FindPreset(std::string_view name);

// INVALID_ARGUMENT: an impossible size; the message names the field, its value and the remedy.
Status ValidateModelConfig(const ModelConfig& config);

// Parameters of the whole model.
int64_t ParameterCount(const ModelConfig& config);

}  // namespace everstep::examples
