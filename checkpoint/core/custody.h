// The agent's half of the commit protocol (docs/protocol.md section 5): which copies of snapshots this server holds,
// what it promises about them, and what may be freed. Each method takes one fact or command and returns what to do,
// in order. Owned by SnapshotKeeper's loop thread; loop-only, pure.
//
// Rules it keeps:
//   - nothing is promised (TellHeld) before its bytes were verified;
//   - a staged copy at or above the job's protected watermark is never freed, unless the chain excludes it or the job
//     ended. A live rank's slots belong to the rank: the agent only stops offering them;
//   - a peer copy below the watermark may give way to a newer one when memory is full, others never do;
//   - commands are idempotent: who asks again is told again.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/reason.h"
#include "proto/model/commands.h"
#include "proto/model/facts.h"
#include "proto/model/rank_messages.h"

namespace everstep::checkpoint {

struct ShardState {  // what a copy is of
  StateId state;
  ShardIndex shard;
  auto operator<=>(const ShardState&) const = default;
};

struct StagedSlot {  // where a rank put a snapshot
  ProcessId process;
  uint32_t slot = 0;
  auto operator<=>(const StagedSlot&) const = default;
};

// ---- what to do

struct VerifyStaged { JobUid job; StagedSlot slot; ShardState what; uint64_t bytes = 0; };
// From a copy held here (staged or peer) when `local`, else from command.source.
struct MakeCopy { CopySnapshot command; bool local = false; };
struct FreeSegment { JobUid job; ProcessId process; };   // unmap and close the staging memory of a gone process
struct FreePeerCopy { JobUid job; ShardState what; };
struct DeleteStored { JobUid job; ShardState what; };
struct ForgetJob { JobUid job; };                        // generation, transfers, queued work
struct TellHeld { SnapshotHeld fact; StagedSlot slot; };  // slot: of a staged copy
struct TellLost {
  SnapshotLost fact;
  StagedSlot slot;
  bool answer = false;  // to a request that failed; false: a copy that was held is gone
};

using CustodyEffect = std::variant<VerifyStaged, MakeCopy, FreeSegment, FreePeerCopy, DeleteStored, ForgetJob,
                                   TellHeld, TellLost>;
using CustodyEffects = std::vector<CustodyEffect>;

class SnapshotCustody {
 public:
  struct Limits {
    uint64_t peer_bytes_max = uint64_t{8} << 30;  // of peer copies held or being made, all jobs together
    size_t copies_in_flight_max = 1024;
    size_t chain_links_max = 4096;                // newest links of one job that are remembered
    size_t staged_max = 65536;                    // slots of one job
  };
  SnapshotCustody(ServerId self, Limits limits) : self_(std::move(self)), limits_(limits) {}

  // ---- facts
  // A rank says the header of a slot is written. What was in that slot before is gone.
  CustodyEffects Staged(const JobUid& job, StagedSlot slot, ShardState what, uint64_t bytes);
  // The answer to VerifyStaged. A stale answer (the slot has moved on) is ignored.
  CustodyEffects StagedVerified(const JobUid& job, StagedSlot slot, ShardState what, const Digest128& digest);
  CustodyEffects StagedRefused(const JobUid& job, StagedSlot slot, ShardState what, Reason reason,
                               std::string message);
  // The process was reaped: nobody writes its segment any more.
  CustodyEffects ProcessGone(const JobUid& job, ProcessId process);
  // Its segment is of no use any more, whatever it holds: somebody who knows more says so.
  CustodyEffects FreeStaging(const JobUid& job, ProcessId process);
  // The answer to MakeCopy.
  CustodyEffects CopyMade(const JobUid& job, const SnapshotInfo& copy);
  CustodyEffects CopyFailed(const JobUid& job, ShardState what, SnapshotTier tier, Reason reason,
                            std::string message);
  // A copy turned out bad when it was read. It is not offered any more.
  CustodyEffects CopyFoundBad(const JobUid& job, const SnapshotInfo& copy, Reason reason, std::string message);
  // Found in the store when the agent started. Nothing is told: AgentHello lists it.
  void StoredFound(const JobUid& job, const SnapshotInfo& copy);

  // ---- commands
  CustodyEffects Copy(const CopySnapshot& command);
  CustodyEffects Drop(const DropSnapshots& command);
  CustodyEffects ProtectedRaised(const JobUid& job, Step watermark);
  // An assignment was received: its recovery point is durable, so states above it of lower generations are off the
  // chain for good.
  CustodyEffects Assigned(const JobUid& job, Generation generation, Step start);
  // The job ended: volatile copies are freed; stored ones stay when keep_stored.
  CustodyEffects Release(const JobUid& job, bool keep_stored);

  // ---- questions
  // Every verified copy, by job, tier, state, shard.
  std::vector<std::pair<JobUid, SnapshotInfo>> Held() const;
  // A verified copy of `what` in `tier`, or null.
  const SnapshotInfo* Find(const JobUid& job, ShardState what, SnapshotTier tier) const;
  // The slot of a verified staged copy. REQUIRES: Find(job, what, kStaged) != nullptr.
  StagedSlot SlotOf(const JobUid& job, ShardState what) const;
  // Whether the process was reaped: nobody can change what it staged.
  bool Gone(const JobUid& job, ProcessId process) const;
  uint64_t peer_bytes() const { return peer_bytes_; }
  uint64_t drops_refused() const { return drops_refused_; }

 private:
  struct StagedCopy {
    SnapshotInfo info;
    bool verified = false;
    bool offered = true;      // false: dropped by the controller while its rank lives
  };
  struct InFlight {
    uint64_t peer_bytes = 0;  // reserved
    bool dropped = false;     // dropped while being made: freed as soon as it is there
  };
  using CopyKey = std::pair<ShardState, SnapshotTier>;
  struct Job {
    Step watermark;
    std::vector<std::pair<Generation, Step>> starts;  // of generations; Invariant: both rise strictly
    std::map<StagedSlot, StagedCopy> staged;
    std::set<ProcessId> gone;
    std::map<ShardState, SnapshotInfo> peer;
    std::map<ShardState, SnapshotInfo> stored;
    std::map<CopyKey, InFlight> in_flight;
  };

  static bool OffChain(const Job& job, StateId state);
  const StagedCopy* FindStaged(const Job& job, ShardState what, StagedSlot* slot) const;
  bool MustStay(const Job& job, const StagedCopy& copy) const;
  void FreeDeadSegments(const JobUid& uid, Job& job, CustodyEffects& effects);
  void FreePeer(const JobUid& uid, Job& job, ShardState what, CustodyEffects& effects);
  bool MakeRoom(uint64_t bytes, CustodyEffects& effects);
  void TellFailed(const JobUid& uid, ShardState what, SnapshotTier tier, Reason reason, std::string message,
                  CustodyEffects& effects, StagedSlot slot = {}) const;

  ServerId self_;
  Limits limits_;
  std::map<JobUid, Job> jobs_;
  uint64_t peer_bytes_ = 0;      // Invariant: held and reserved together, at most limits_.peer_bytes_max
  size_t copies_in_flight_ = 0;
  uint64_t drops_refused_ = 0;
};

}  // namespace everstep::checkpoint
