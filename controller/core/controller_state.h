// The controller core's run-time tables: what it knows beyond the ledger, rebuilt from agents' reports after a restart.
// Private to controller/core. Loop-only.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "controller/core/detector/liveness.h"
#include "controller/core/effect.h"
#include "controller/core/planner/placement.h"
#include "controller/core/recovery/recovery_point.h"
#include "proto/model/facts.h"

namespace everstep {

inline constexpr int32_t kRetriesMax = 5;  // generations raised, or starts tried, in a row without a lost member

// One spawn of a rank process.
struct ProcessRow {
  ProcessId id;
  JobUid job;
  ServerId server;
  Incarnation incarnation;
  DeviceIndex device;
  int64_t pid = 0;
  bool reported = false;             // an agent confirmed it (false: only the ledger or we say so)
  bool spawn_sent = false;           // its agent was told to start it
  bool started = false;
  bool joined = false;               // its program waits in Join, or did
  bool exited = false;               // reaped, or gone with its server
  bool finished = false;             // ended after RankFinished
  bool kill_sent = false;            // its exit is our doing
  bool excluded = false;             // left out of a decision set
  bool member = false;               // named in a durable assignment; false: standby
  bool planned = false;              // named in the plan of the fenced generation
  Rank rank{-1};                     // in the newest assignment (or plan) that names it
  ShardIndex shard{-1};              // what its memory holds, when a member
  Generation assigned;
  Generation collected;              // answered Collect of this generation
  RankReport report;
  Generation connected;
  Generation ready;
  std::string mesh_address;
  std::string restored_from;
  uint64_t bytes_restored = 0;
  Digest128 digest{};
  Progress progress;
  Instant join_deadline = kNever;    // a standby must have joined by then
  Instant missing_deadline = kNever; // not in its agent's report: an exit fact should follow
  std::deque<std::string> lines;     // newest last, at most 20
};

struct ServerRow {
  ServerInventory inventory;
  Incarnation incarnation;
  uint64_t start_nonce = 0;
  std::optional<SessionId> session;
  CommandSequence commands_sent;
  FactSequence facts_seen;
  ServerLiveness liveness{Instant{}, Incarnation(0)};
  bool dead = false;
  bool late = false;
  Reason reason = Reason::kNone;     // of its state
  WallTime registered;
  Instant registered_at{};
  uint64_t probe_nonce = 0;
  bool silent_held = false;          // silent, but held back by the mass-silence brake
  Instant silent_since = kNever;
  Instant claimed_at = kNever;       // another agent process asked for its name while its stream seemed to stand
  Instant evidence_at = kNever;      // the first sign that it may be gone: its stream broke, a peer complained
};

// A copy that was asked for, and of whom.
struct CopyAsked {
  ServerId to;
  std::set<ServerId> tried;          // `to` and those that died or failed before it
};

enum class JobStage : uint8_t {
  kAdopting,    // the controller restarted; agents report
  kRunning,
  kPreparing,   // a planned switch rides in the vote
  kCollecting,
  kWaiting,     // the recovery point is decided, capacity is missing
  kGathering,   // the plan is made, some processes have not joined yet
  kAssigned,    // ranks connect and restore
  kEnded,
};

struct JobRow {
  JobUid uid;
  JobStage stage = JobStage::kWaiting;
  Instant deadline = kNever;         // of the stage
  Instant stage_since{};
  Reason reason = Reason::kNone;     // why it is in this stage
  std::string message;
  std::set<ProcessId> expected;      // Collect: who must answer
  RecoveryInputs inputs;             // as decided
  std::vector<StateId> proofs;       // pages of members that died since the last Resume
  std::vector<LostRank> lost;        // since the last Resume
  std::optional<RecoveryRecord> open;
  Instant evidence_at{};             // start of the open recovery
  RecoveryPhase phase = RecoveryPhase::kNone;
  Instant phase_since{};
  Step committed;                    // newest step known to have passed its vote
  Instant vote_at{};                 // when committed last rose
  bool failure_counted = false;      // in this generation
  bool trust_memory = true;          // false after unequal digests without a majority
  int32_t retries = 0;               // generations raised in a row without a loss
  Instant complaint_deadline = kNever;  // a peer complaint waits for evidence
  std::string complaint;
  Instant complaint_at = kNever;     // when it came
  Instant submitted_at{};
  Instant regrow_at = kNever;
  Instant standby_at{};              // not before: back-off after a failed start, or until the job steps again
  std::optional<Step> standby_after; // a recovery resumed here: a starting standby must not slow its first step
  int32_t standby_failures = 0;
  std::set<ServerId> banned;         // has not got this program; until its agent is a new one
  std::set<ServerId> avoided;        // failed this recovery; taken again rather than waiting for capacity
  Instant copies_until = kNever;     // Decide waits until then for the holders of a newer checkpoint; kNever: it did not
  Instant standby_check = kNever;    // when the oldest standby that has not joined is overdue
  Generation generation_floor;       // an agent reported this one although the ledger is behind
  std::map<std::string, double> metrics;
  std::map<std::pair<StateId, ShardIndex>, std::vector<SnapshotInfo>> snapshots;
  std::map<std::tuple<StateId, ShardIndex, SnapshotTier>, CopyAsked> copies_asked;
  Step protected_step;
  bool one_domain = false;           // its servers share a failure domain: copies inside it count as protected
  bool drain_noted = false;
  Instant drain_at = kNever;         // not before: a switch for a drain left ranks on the draining server
  int32_t drain_switches = 0;        // such switches in a row
  std::set<ServerId> touched;        // may hold processes or copies of it: told when the job ends
  std::string outranked_by;          // a job with a higher claim that lacked ranks during this recovery
  int32_t world_target = 0;          // ranks that a planned change of width leads to; 0: decided by the plan
  std::vector<std::string> last_lines;  // of the newest failure
};

}  // namespace everstep
