// Which process holds which rank of the next generation: a pure function from an immutable snapshot to a placement or
// a refusal, with its reason and its rivals. Incumbents keep their ranks; only what must move moves. Ties end in ids.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/model/assignment.h"
#include "proto/model/job.h"

namespace everstep {

// A process that answered Collect and may go on.
struct Incumbent {
  ProcessId process;
  Rank rank;                          // in the generation before
  ServerId server;
  DeviceIndex device;
  ShardIndex shard;
  bool source = true;                 // its memory is the recovery point, or one apply away from it
};

// A device that a rank could be put on.
struct Candidate {
  enum class Kind : uint8_t {
    kReadyStandby,                    // a warm process of this job waits there
    kFreedInPlace,                    // the lost rank's own device, healthy and free
    kStartingStandby,                 // a process of this job is being started there
    kFreeDevice,
    kForeignStandby,                  // an idle standby of another job that must be stopped first
  };
  Kind kind = Kind::kFreeDevice;
  ServerId server;
  DeviceIndex device;
  ProcessId process;                  // kReadyStandby, kStartingStandby
  std::string failure_domain;
  std::string device_model;
  double speed = 1.0;
};

// A rank of the generation before that is gone.
struct LostRank {
  Rank rank;
  ServerId server;
  DeviceIndex device;
  std::string failure_domain;
  std::string device_model;
};

struct PlacementRequest {
  int32_t world_wanted = 1;           // devices
  int32_t world_min = 1;
  int32_t pipeline_stages = 1;
  std::vector<Incumbent> incumbents;
  std::vector<LostRank> lost;
  std::vector<Candidate> candidates;
  std::vector<std::string> rivals;    // names of jobs in recovery whose claim on spares is higher
};

struct PlacedRank {
  Rank rank;
  int32_t dp = 0, pp = 0;
  ServerId server;
  DeviceIndex device;
  ProcessId process;                  // 0: must be spawned
  bool incumbent = false;
  Candidate::Kind kind = Candidate::Kind::kFreeDevice;  // of a newcomer
};

struct Placement {
  int32_t dp_size = 0;
  std::vector<PlacedRank> ranks;      // index = rank
  Reason reason = Reason::kNone;
  std::string message;
  std::vector<std::string> alternatives;
};

struct PlacementResult {
  std::optional<Placement> placement;
  std::string refusal;                // when there is none
};

// REQUIRES: pipeline_stages >= 1, world_min >= 1, world_wanted >= world_min. The world is a multiple of
// pipeline_stages, as large as incumbents and candidates allow, at most world_wanted.
PlacementResult Place(const PlacementRequest& request);

// The shares of `micro_batches` for `replicas` equal replicas: contiguous, they differ by at most one.
struct Share { int32_t first = 0; int32_t count = 0; };
std::vector<Share> EqualShares(int32_t micro_batches, int32_t replicas);

}  // namespace everstep
