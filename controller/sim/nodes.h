// The inhabitants of the world: agents with their disks and staging memory, rank processes with their program, and the
// meshes in which ranks meet. Fields marked "truth" are what is really so, whatever a core believes; checkers read
// those. Plain data, owned by World.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/core/chunk_registry.h"
#include "checkpoint/core/custody.h"
#include "controller/sim/clock.h"
#include "controller/sim/content.h"
#include "controller/sim/network.h"
#include "worker/core/agent/agent_core.h"
#include "worker/core/session/session_core.h"

namespace everstep::sim {

using checkpoint::ShardState;
using CopyKey = std::pair<JobUid, ShardState>;

// The mesh of one generation: reductions and votes of its ranks.
struct Mesh {
  JobUid job;
  Generation generation;
  Assignment assignment;
  size_t size = 0;
  struct Member {
    uint64_t process = 0;
    ServerId server;
    bool arrived = false;        // in ConnectMesh
    bool left = false;           // aborted or dead
    int64_t reduced = 0;         // newest step whose reduction it entered
    int64_t voted = 0;           // newest step for which its ballot is in
    int64_t decided = 0;         // newest vote whose result it was given
    int64_t finished = 0;
    bool digest = false;
    uint64_t pending = 0;        // of its newest ballot
    int64_t protected_step = 0;  // of its newest ballot
    bool complete_gradients = false;  // truth, at its newest ballot
    Generation answered;         // truth: highest Collect that its process had answered at its newest ballot
  };
  std::map<int32_t, Member> members;
  uint64_t restores = 0;         // of the ledger, when it was formed
  int64_t passed = 0;            // truth: newest step whose vote all ballots reached
};

struct RankNode {
  ProcessId id;
  JobUid job;
  ServerId server;
  DeviceIndex device;
  int64_t pid = 0;
  bool opaque = false;
  bool alive = true;
  bool reaped = false;
  bool stopped = false;
  bool unkillable = false;       // in state D: signals do nothing
  std::unique_ptr<session::SessionCore> core;
  Connection connection;
  Content memory;                // truth
  bool torn = false;             // truth: memory is being overwritten
  std::optional<uint64_t> gradients;  // truth: generation of complete gradients of the next step
  int64_t drawn = 0;             // truth: steps' worth of random numbers drawn, part of the registered state
  int64_t drawn_saved = 0;       // at the start of the step
  struct Answer { Generation generation; bool valid = false; Content memory; std::optional<uint64_t> gradients; };
  Answer answered;               // truth at its newest answer to Collect
  std::string mesh_key;
  int32_t rank = -1;
  int32_t shard = 0;
  // The library call that the program waits in.
  enum class Call { kNone, kJoin, kBegin, kGradients, kVoteStart, kVotePassed, kVoteFailed, kApplied, kFinish };
  Call call = Call::kNone;
  int64_t call_step = 0;
  // What it waits for in the mesh.
  enum class Doing { kNothing, kReducing, kVoting, kFinishing, kConnecting, kReceiving, kServing, kDigesting };
  Doing doing = Doing::kNothing;
  uint64_t op = 0;               // rises with each wait: stale completions are dropped
  Generation mesh_generation;
  std::optional<session::ReceiveState> receiving;
  std::optional<session::ServeState> serving;
  std::set<int32_t> served;
  Content provided;              // of a snapshot on its way into memory
  struct Slot { StateId state; bool valid = false; };
  std::array<Slot, 3> slots{};   // of staging memory, as the library's writer keeps them
  Step protected_step;
  uint64_t snapshots_skipped = 0;
  std::deque<std::function<void()>> deferred;  // while stopped
};

// A disk that survives its agent. Chunks are named by the real registry; deletes may land late.
struct StoreDisk {
  checkpoint::ChunkRegistry registry{checkpoint::Epoch(1)};
  std::map<checkpoint::ChunkName, Content> chunks;
  struct Stored { checkpoint::ChunkName name; SnapshotInfo info; };
  std::map<CopyKey, Stored> copies;
  bool full = false;
  bool failing = false;
  Duration slow{};
};

struct AgentNode {
  ServerId id;
  ServerInventory inventory;
  std::unique_ptr<AgentCore> core;
  std::unique_ptr<checkpoint::SnapshotCustody> custody;
  bool alive = false;
  bool stopped = false;
  int64_t slowness = 1;          // factor on what its ranks compute
  uint64_t life = 0;             // rises with each start
  std::optional<SessionId> session;
  bool down_pending = false;     // its stream is gone and it has not noticed
  std::optional<Welcome> beating;
  uint64_t beats = 0;
  Instant armed = kNever;
  std::map<uint64_t, ProcessId> connections;
  std::set<ProcessId> processes; // truth: not reaped
  std::map<std::pair<ProcessId, uint32_t>, Content> staging;  // truth, by slot
  std::map<CopyKey, Content> peers;                           // truth
  std::map<uint64_t, Content> descriptors;
  StoreDisk disk;
  uint64_t next_connection = 1, next_descriptor = 1;
  ServerLinks links;
  Clock clock;
  std::set<DeviceIndex> broken_devices;
  std::optional<int64_t> crash_in;  // effects until it dies
  std::optional<int64_t> stop_in;   // effects until it is stopped
  Instant well_since{};          // truth: alive, running and connected in every way since then
  Instant dead_since = kNever;   // truth: nobody answers there since then
  std::deque<std::function<void()>> deferred;
};

}  // namespace everstep::sim
