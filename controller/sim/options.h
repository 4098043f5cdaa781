// Everything that a run of the world can vary, and how it is drawn from a seed. Plain data; printed before each run.
#pragma once

#include <cstdint>
#include <string>

#include "controller/core/policy.h"
#include "proto/base/time.h"

namespace everstep::sim {

// Mistakes outside the cores: in the shells that perform their effects. Only for the test of the checkers.
enum class ShellMistake : uint8_t { kNone, kTellBeforePersist, kStaleVoteBuffer, kForgetDiscard };

struct WorldOptions {
  uint64_t seed = 1;
  Policy policy;
  ShellMistake mistake = ShellMistake::kNone;
  bool fixed_times = false;                 // every duration is its minimum: for traces that people read
  // network
  Duration link_min = Microseconds(50), link_max = Microseconds(800);
  uint32_t datagram_loss_percent = 0, datagram_double_percent = 0, datagram_late_percent = 0;
  uint32_t command_double_percent = 0;      // commands that an agent, and messages that a rank, sees twice
  // disks
  Duration sync_min = Microseconds(200), sync_max = Milliseconds(3);  // of the ledger's disk
  Duration store_max = Milliseconds(4);     // verify, copy, load
  // clocks
  int64_t drift_ppm_max = 0;
  // processes
  Duration reap_max = Milliseconds(12);     // from a death to its observation
  Duration start_min = Milliseconds(30), start_max = Milliseconds(120);    // spawn to Join
  Duration compute_min = Milliseconds(5), compute_max = Milliseconds(15);  // of one step on one rank
  Duration reduce_max = Milliseconds(2);    // reductions and votes: each rank sees the result at its own time
  Duration apply_max = Milliseconds(1);
  int64_t snapshot_every = 0;               // steps; 0: never
  // checks
  uint32_t replay_check_every = 1;          // appends
};

enum class Profile : uint8_t {
  kSmall,   // up to 9 servers, short steps: many faults in the middle of a step
  kLarge,   // 32 to 256 servers for ten minutes
};

struct RunOptions {
  WorldOptions world;
  Profile profile = Profile::kSmall;
  int servers = 7;
  int devices = 1;                          // of each server
  int racks = 0;                            // 0: each server is a domain of its own
  int jobs = 1;
  Duration lasting{};                       // of the phase with faults
  Duration fault_min{}, fault_max{};        // between two faults
  bool focus = false;                       // most faults strike ranks at named moments, several at once
  uint32_t kinds = UINT32_MAX;              // bit k: faults of kind k may be drawn (swarm)
  bool fixed_length = false;                // the job ends by itself after `steps`
  int64_t steps = 0;
};

RunOptions DrawOptions(uint64_t seed, Profile profile);

// One line: every option that differs from seed to seed.
std::string Describe(const RunOptions& options);

// After everything is healed, each job must step within this time.
Duration LivenessBound(const Policy& policy);

}  // namespace everstep::sim
