// What the ledger holds: records, and the state they add up to. Apply is the only writer of LedgerState, live and in
// replay alike, so "replay equals live" holds by construction. No monotonic instants in here. Plain data; loop-only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/base/time.h"
#include "proto/model/assignment.h"
#include "proto/model/job.h"
#include "proto/model/lineage.h"
#include "proto/model/rank_messages.h"

namespace everstep {

struct Manifest {                    // exists only when every shard of one state id on the chain is verified
  StateId state;
  int32_t shard_count = 0;
  std::vector<SnapshotInfo> shards;  // where each verified copy was, several per shard allowed
  WallTime committed;
  bool operator==(const Manifest&) const = default;
};

struct PhaseRecord {
  RecoveryPhase phase = RecoveryPhase::kNone;
  Duration start{};                  // since the first evidence
  Duration duration{};
  Duration budget{};                 // zero: none
  bool operator==(const PhaseRecord&) const = default;
};

struct RestoredRank {
  Rank rank;
  ServerId server;
  ProcessId process;
  bool kept_process = false;         // the same process as in the generation before
  std::string from;                  // "kept", "rank 2", "s03 staged" …
  uint64_t bytes = 0;
  bool operator==(const RestoredRank&) const = default;
};

struct RecoveryRecord {
  RecoveryId id;
  JobUid job;
  std::string job_name;
  Generation from;                   // last generation that stepped; 0 at job start
  Generation to;                     // the newest generation this recovery allotted
  Reason reason = Reason::kNone;     // of the first evidence
  std::string evidence;
  bool planned = false;
  Reason decision = Reason::kNone;
  std::string decision_message;
  std::vector<std::string> alternatives;  // "shrink to 3 replicas: keeps 75 % of the throughput; not needed"
  std::string outcome;               // "resumed", "waiting", "job ended"
  StateId recovery_point;
  int64_t steps_lost = 0;
  int32_t generations_used = 1;
  WallTime started;
  std::vector<PhaseRecord> phases;
  std::vector<RestoredRank> ranks;
  bool operator==(const RecoveryRecord&) const = default;
};

struct PlannedSlot {
  Rank rank;
  ServerId server;
  DeviceIndex device;
  ProcessId process;
  bool operator==(const PlannedSlot&) const = default;
};

// ---- records

struct TermStarted { Term term; };
struct ServerRegistered { ServerId server; Incarnation incarnation; uint64_t start_nonce = 0; std::string failure_domain; };
struct ServerDied { ServerId server; Incarnation incarnation; Reason reason = Reason::kNone; };  // terminal for the incarnation
struct ServerDrainSet { ServerId server; bool draining = false; RequestId request; };
struct JobSubmitted { JobUid job; JobSpec spec; RequestId request; WallTime submitted; };
struct GenerationFenced { JobUid job; Generation generation; RecoveryId recovery; Reason reason = Reason::kNone; bool planned = false; };
struct RecoveryPointDecided { JobUid job; Generation generation; StateId point; };
struct PlanMade { JobUid job; Generation generation; std::vector<PlannedSlot> slots; Reason reason = Reason::kNone; std::string message; };
struct AssignmentMade { Assignment assignment; };
struct GenerationResumed { JobUid job; Generation generation; };
struct FinishReached { JobUid job; Generation generation; };   // a member came to its end: every step is done
struct FailureCounted { JobUid job; Step step; Rank rank; ServerId server; int32_t exit_code = 0; int32_t signal = 0; };
struct RecoveryEnded { RecoveryRecord recovery; };
struct ManifestCommitted { JobUid job; Manifest manifest; };
struct ManifestDropped { JobUid job; StateId state; };
struct JobEnded { JobUid job; JobState outcome = JobState::kFailed; Reason reason = Reason::kNone; int32_t exit_code = 0; std::string message; std::vector<std::string> last_lines; WallTime ended; };
struct JobForgotten { JobUid job; };  // an ended job leaves the ledger

using Record = std::variant<TermStarted, ServerRegistered, ServerDied, ServerDrainSet, JobSubmitted, GenerationFenced,
                            RecoveryPointDecided, PlanMade, AssignmentMade, GenerationResumed, FinishReached, FailureCounted,
                            RecoveryEnded, ManifestCommitted, ManifestDropped, JobEnded, JobForgotten>;

// ---- state

struct ServerEntry {
  Incarnation newest;
  Incarnation dead_upto;             // this incarnation and all below are dead
  uint64_t start_nonce = 0;          // of the newest
  std::string failure_domain;
  bool draining = false;
  std::deque<RequestId> drain_requests;  // that set or confirmed it, newest last, at most 16
  bool operator==(const ServerEntry&) const = default;
};

struct FailureEntry {
  Step step;
  Rank rank;
  ServerId server;
  int32_t exit_code = 0;
  int32_t signal = 0;
  bool operator==(const FailureEntry&) const = default;
};

struct JobEntry {
  JobUid uid;
  JobSpec spec;
  uint64_t order = 0;                // age: lower is older
  WallTime submitted;
  Generation fenced;                 // highest generation allotted
  RecoveryId recovery;               // open recovery; meaningful while fenced != resumed
  Reason fence_reason = Reason::kNone;
  bool fence_planned = false;
  Generation resumed;                // newest generation that all ranks were told to step in
  Generation finish_reached;         // newest generation of which a member came to its end
  Lineage lineage;
  StateId recovery_point;            // of lineage.newest()
  std::optional<PlanMade> plan;      // of `fenced`; the reservation of its devices
  std::optional<Assignment> assignment;  // newest made durable
  std::vector<Manifest> manifests;   // oldest first
  int32_t failures = 0;
  std::vector<FailureEntry> recent_failures;  // newest last, at most 16
  std::optional<JobEnded> ended;
  bool operator==(const JobEntry&) const;
};

struct LedgerState {
  Term term;
  uint64_t next_job_order = 1;
  uint64_t next_recovery = 1;
  LedgerSequence applied;            // sequence of the newest record in it
  std::map<ServerId, ServerEntry> servers;
  std::map<JobUid, JobEntry> jobs;
  std::deque<RecoveryRecord> recoveries;              // newest last, at most 200
  std::map<RequestId, JobUid> requests;               // of the jobs still in the ledger
  bool operator==(const LedgerState&) const = default;
};

// REQUIRES: sequence is the state's applied + 1. Records that name unknown jobs or servers are ignored (they were
// forgotten), so that a compacted ledger replays.
void Apply(LedgerState& state, LedgerSequence sequence, const Record& record);

}  // namespace everstep
