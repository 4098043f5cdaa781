// Owns every copy of a snapshot on this server: what ranks staged, copies of peers' snapshots in memory, and the local
// store; serves them to other agents and provides them to ranks. The agent (worker/io) calls it from its loop thread
// and gets its answers on the keeper's own thread, from where it posts them to its loop.
//
// Threads: one loop that owns the rules (SnapshotCustody) and all bookkeeping; workers for restores (4), verifying what
// was staged (1), copies of peers (2), writing to the disk (1) and reading from it for peers (1); one that serves. Thread-safe: every public method may be called on any
// thread, also from a callback, except the destructor. No lock is held across a callback.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/core/custody.h"
#include "checkpoint/io/memory_region.h"
#include "checkpoint/io/transfer_client.h"
#include "checkpoint/io/transfer_server.h"
#include "checkpoint/store/snapshot_store.h"
#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"

namespace everstep::checkpoint {

// A snapshot for a rank: sealed bytes, and what SnapshotProvided says about them (its generation included).
struct ProvidedSnapshot {
  UniqueFd fd;
  SnapshotProvided message;
};

class SnapshotKeeper {
 public:
  struct Options {
    ServerId self;
    std::string transfer_address = "127.0.0.1:0";  // where peers fetch from us; port 0: chosen by the kernel
    SnapshotStore* store = nullptr;                // outlives the keeper; null: stored copies are refused
    SnapshotCustody::Limits limits;
    TransferServer::Options transfer;              // its address is taken from transfer_address
    FetchOptions fetch;
    size_t loads_max = 4;                          // stored copies being read into memory to serve peers
    Duration retry_interval = Milliseconds(20);    // after UNAVAILABLE
    Duration retry_timeout = Seconds(2);           // for one source that answers
    int connects_max = 2;                          // for one that can't be reached: it is dead, others are not
  };
  struct Callbacks {
    // A verified copy is held; `slot` is meaningful for a staged one. Said again when the request comes again.
    std::function<void(const SnapshotHeld&, StagedSlot slot)> held;
    // `answer`: a request (OnStaged, Copy) failed. Otherwise a copy that was held is gone or bad.
    std::function<void(const SnapshotLost&, StagedSlot slot, bool answer)> lost;
  };

  // Lists the store, starts the threads, listens. Statuses of TransferServer::Start and SnapshotStore::List.
  static Result<std::unique_ptr<SnapshotKeeper>> Start(Options options, Callbacks callbacks);
  // Stops transfers and copies; no callback runs afterwards. Volatile copies are gone.
  ~SnapshotKeeper();

  uint16_t transfer_port() const;
  // Every verified copy at this moment, for AgentHello. Stored copies are there right after Start.
  std::vector<std::pair<JobUid, SnapshotInfo>> Held() const;

  // ---- facts from the agent
  // A rank says that a slot of its staging memory is written. The keeper takes a descriptor of the process's staging
  // memory once; later ones are closed. Answer: held or lost.
  void OnStaged(const JobUid& job, ProcessId process, UniqueFd staging, const SnapshotStaged& staged);
  // It was reaped. What it staged stays readable while the job may need it.
  void ProcessGone(const JobUid& job, ProcessId process);
  // What it staged is of no use any more.
  void FreeStaging(ProcessId process);

  // ---- commands from the controller
  // Answer: held or lost.
  void Copy(const CopySnapshot& command);
  void Drop(const DropSnapshots& command);
  void ProtectedRaised(const JobUid& job, Step watermark);
  // The highest generation the agent knows; lower ones are fenced from now on and their transfers end.
  void SetGeneration(const JobUid& job, Generation generation);
  // An assignment came: its generation started from this step, durably.
  void Assigned(const JobUid& job, Generation generation, Step start);
  void ReleaseJob(const JobUid& job, bool keep_stored = true);
  // All of the above that follows from a command the agent received (fences, assignments, watermarks, copies, drops,
  // releases); others are passed over.
  void Observe(const Command& command);

  // Finds the first good copy: the sources in their order, then any other copy of the same state held here. Bad ones
  // are said in message.from and told through `lost`. The callback runs on the keeper's thread, or never if the
  // keeper is destroyed first.
  //   ABORTED: the generation is stale; final. Otherwise the status of the last source that failed; NOT_FOUND: there
  //   was none.
  void Provide(const JobUid& job, Generation generation, std::vector<SnapshotSource> sources,
               std::function<void(Result<ProvidedSnapshot>)> done);

  struct Counters {
    uint64_t bytes_served = 0;
    uint64_t bytes_fetched = 0;
    uint64_t stale_refused = 0;      // requests of peers and ranks with a stale generation
    uint64_t requests_refused = 0;   // by the transfer server, for any cause
    uint64_t drops_refused = 0;
    uint64_t peer_bytes = 0;         // in memory for peers
  };
  Counters counters() const;

 private:
  class Impl;
  explicit SnapshotKeeper(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep::checkpoint
