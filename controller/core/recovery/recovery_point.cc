#include "controller/core/recovery/recovery_point.h"

#include <algorithm>

#include "proto/base/mutation.h"
#include <tuple>

namespace everstep {

void AddProof(std::vector<StateId>& proofs, StateId proof, const Lineage& lineage) {
  if (proof.step.value <= 0 || std::find(proofs.begin(), proofs.end(), proof) != proofs.end()) return;
  proofs.push_back(proof);
  if (proofs.size() <= kProofsMax) return;
  std::erase_if(proofs, [&](StateId id) { return !lineage.OnChain(id); });
  if (proofs.size() <= kProofsMax) return;
  proofs.erase(std::min_element(proofs.begin(), proofs.end(),
                                [](StateId x, StateId y) { return std::tie(x.step, x.generation) < std::tie(y.step, y.generation); }));
}

Step ProvedStep(const RecoveryInputs& inputs) {
  Step proved;
  auto consider = [&](StateId id) {
    if (inputs.lineage.OnChain(id)) proved = std::max(proved, id.step);
  };
  if (!inputs.lineage.links().empty()) proved = inputs.lineage.links().back().start;  // an earlier recovery point
  for (const SurvivorReport& s : inputs.survivors) {
    if (s.report.memory_valid) consider(s.report.applied);
  }
  for (const HeldSnapshot& s : inputs.snapshots) consider(s.state);
  for (StateId id : inputs.proofs) consider(id);
  return proved;
}

namespace {

SurvivorAction ActionGivenProof(const Lineage& lineage, const RankReport& report, Step point, Step proved) {
  if (!report.memory_valid || !lineage.OnChain(report.applied)) return SurvivorAction::kFetch;
  if (report.applied.step == point) return SurvivorAction::kKeep;
  const Step next = report.applied.step.Next();
  if (next == point && (point <= proved || Mutated(Mutation::kRollForwardWithoutProof)) && report.gradients.value != 0 &&
      lineage.OnChain({point, report.gradients})) {
    return SurvivorAction::kRollForward;
  }
  return SurvivorAction::kFetch;
}

bool HasSourceGivenProof(const RecoveryInputs& inputs, ShardIndex shard, Step point, Step proved) {
  if (point.value == 0) return true;
  for (const SurvivorReport& s : inputs.survivors) {
    if (s.shard == shard &&
        ActionGivenProof(inputs.lineage, s.report, point, proved) != SurvivorAction::kFetch) {
      return true;
    }
  }
  for (const HeldSnapshot& s : inputs.snapshots) {
    if (s.shard == shard && s.state.step == point && inputs.lineage.OnChain(s.state)) return true;
  }
  return false;
}

}  // namespace

SurvivorAction ActionFor(const RecoveryInputs& inputs, const RankReport& report, Step point) {
  return ActionGivenProof(inputs.lineage, report, point, ProvedStep(inputs));
}

bool HasSource(const RecoveryInputs& inputs, ShardIndex shard, Step point) {
  return HasSourceGivenProof(inputs, shard, point, ProvedStep(inputs));
}

StateId DecideRecoveryPoint(const RecoveryInputs& inputs) {
  const Step proved = ProvedStep(inputs);
  // Only steps that somebody holds can be the answer; try them from the newest down.
  std::vector<Step> candidates;
  for (const SurvivorReport& s : inputs.survivors) {
    if (!s.report.memory_valid) continue;
    candidates.push_back(s.report.applied.step);
    candidates.push_back(s.report.applied.step.Next());
  }
  for (const HeldSnapshot& s : inputs.snapshots) candidates.push_back(s.state.step);
  std::sort(candidates.begin(), candidates.end(), std::greater<>());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  for (Step step : candidates) {
    bool all = true;
    for (int32_t s = 0; s < inputs.shard_count && all; ++s) {
      all = HasSourceGivenProof(inputs, ShardIndex(s), step, proved);
    }
    if (all && step.value > 0) return inputs.lineage.AtStep(step);
  }
  return {};
}

}  // namespace everstep
