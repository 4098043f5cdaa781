// The read-only picture of the cluster that status calls, metrics and the web page are made from. Built by
// ControllerCore::MakeView on the loop thread; immutable afterwards, so any thread may read a shared copy.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "controller/core/effect.h"
#include "controller/core/ledger/record.h"
#include "proto/model/job.h"
#include "proto/model/server.h"

namespace everstep {

struct RankPlace {                   // one process of a job
  JobUid job;
  std::string job_name;
  Rank rank{-1};                     // -1: standby
  ServerId server;
  DeviceIndex device;
  ProcessId process;
  int64_t pid = 0;
  bool ready_standby = false;
  RankPhase phase = RankPhase::kStarting;
  Step vote_passed;
  std::string restored_from;
};

struct ServerView {
  ServerId server;
  ServerState state = ServerState::kJoining;
  Reason reason = Reason::kNone;
  bool draining = false;
  Incarnation incarnation;
  ServerInventory inventory;
  int32_t devices_free = 0;
  std::vector<RankPlace> ranks;
  WallTime registered;
  Duration heartbeat_age{};
};

struct JobView {
  JobEntry entry;                    // spec, generations, lineage, assignment, manifests, end
  JobState state = JobState::kPending;
  RecoveryPhase phase = RecoveryPhase::kNone;
  Reason reason = Reason::kNone;     // why it is in this state
  std::string message;
  Step step;                         // newest committed step heard of
  Step protected_step;
  bool one_domain = false;           // copies inside the only failure domain of its servers count as protected
  int32_t world_size = 0;
  std::vector<RankPlace> ranks;      // by rank, then standbys
  std::vector<std::pair<std::string, double>> metrics;   // newest value per name
  std::vector<SnapshotInfo> snapshots;
};

struct EventView {
  uint64_t sequence = 0;
  WallTime wall;
  Notice notice;
};

struct RankLines { JobUid job; Rank rank; ProcessId process; std::vector<std::string> lines; };

struct ClusterView {
  Term term;
  bool adopting = false;             // a restarted controller waits for agents
  bool frozen = false;               // mass silence
  std::vector<ServerView> servers;
  std::vector<JobView> jobs;         // oldest first
  std::deque<RecoveryRecord> recoveries;  // open ones too, newest last
  std::deque<EventView> events;
  std::vector<RankLines> lines;      // last lines of each process still known
};

}  // namespace everstep
