#include "proto/model/names.h"

namespace everstep {

std::string_view ServerStateName(ServerState state) {
  switch (state) {
    case ServerState::kJoining: return "Joining";
    case ServerState::kChecking: return "Checking";
    case ServerState::kSpare: return "Spare";
    case ServerState::kActive: return "Active";
    case ServerState::kSuspect: return "Suspect";
    case ServerState::kDead: return "Dead";
    case ServerState::kDraining: return "Draining";
    case ServerState::kQuarantined: return "Quarantined";
  }
  return "Unknown";
}

std::string_view JobStateName(JobState state) {
  switch (state) {
    case JobState::kPending: return "Pending";
    case JobState::kStarting: return "Starting";
    case JobState::kRunning: return "Running";
    case JobState::kRecovering: return "Recovering";
    case JobState::kWaitingForCapacity: return "WaitingForCapacity";
    case JobState::kSucceeded: return "Succeeded";
    case JobState::kFailed: return "Failed";
    case JobState::kCancelled: return "Cancelled";
  }
  return "Unknown";
}

std::string_view RecoveryPhaseName(RecoveryPhase phase) {
  switch (phase) {
    case RecoveryPhase::kNone: return "none";
    case RecoveryPhase::kDetect: return "detect";
    case RecoveryPhase::kDecide: return "decide";
    case RecoveryPhase::kFence: return "fence";
    case RecoveryPhase::kCollect: return "collect";
    case RecoveryPhase::kPlan: return "plan";
    case RecoveryPhase::kAssign: return "assign";
    case RecoveryPhase::kRestore: return "restore";
    case RecoveryPhase::kConnect: return "connect";
    case RecoveryPhase::kResume: return "resume";
  }
  return "unknown";
}

std::string_view RankPhaseName(RankPhase phase) {
  switch (phase) {
    case RankPhase::kStarting: return "starting";
    case RankPhase::kJoining: return "joining";
    case RankPhase::kRestoring: return "restoring";
    case RankPhase::kReady: return "ready";
    case RankPhase::kComputing: return "computing";
    case RankPhase::kReduced: return "reduced";
    case RankPhase::kVoting: return "voting";
    case RankPhase::kApplying: return "applying";
    case RankPhase::kFinished: return "finished";
  }
  return "unknown";
}

std::string_view RestoreActionName(RestoreAction action) {
  switch (action) {
    case RestoreAction::kInitialize: return "initialize";
    case RestoreAction::kKeep: return "keep";
    case RestoreAction::kRollForward: return "roll-forward";
    case RestoreAction::kFetchFromRank: return "fetch-from-rank";
    case RestoreAction::kFetchFromSnapshot: return "fetch-from-snapshot";
  }
  return "unknown";
}

std::string_view SnapshotTierName(SnapshotTier tier) {
  switch (tier) {
    case SnapshotTier::kStaged: return "staged";
    case SnapshotTier::kPeer: return "peer";
    case SnapshotTier::kStored: return "stored";
  }
  return "unknown";
}

}  // namespace everstep
