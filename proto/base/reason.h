// Why something happened, as a closed set. The same name appears in logs, metrics, CLI output and docs/reasons.md;
// core decisions carry a Reason and a sentence. Add new reasons at the end of the table only.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace everstep {

// X(name, what it means, in a sentence for docs/reasons.md)
#define EVERSTEP_REASONS(X)                                                                                \
  X(None, "Nothing to explain")                                                                            \
  X(ProcessExited, "A rank process ended with an exit code other than zero")                               \
  X(ProcessKilled, "A rank process ended by a signal")                                                     \
  X(ServerRefused, "The server's host refused a connection: its agent is dead while the host lives")       \
  X(ServerSilent, "The server's lease expired without a datagram, a stream answer or a vote of its ranks") \
  X(ServerRestarted, "The agent registered again with a new incarnation, so its old ranks are dead")       \
  X(ServerDrained, "An operator or a notice asked the server to be emptied")                               \
  X(ServerQuarantined, "The server failed too often and is held back")                                     \
  X(HeartbeatLate, "No heartbeat for more than half of the lease")                                         \
  X(AgentNotActing, "Heartbeats arrive but the agent no longer acts on commands")                          \
  X(StreamBroken, "The agent's stream was reset")                                                          \
  X(PeerComplaint, "A rank reported that a peer's connection failed")                                      \
  X(CollectDeadline, "The rank did not answer Collect before its deadline")                                \
  X(PhaseDeadline, "A recovery phase exceeded its share of the budget")                                    \
  X(RankHung, "The rank made no progress for longer than the hang bound")                                  \
  X(DigestMismatch, "Replicas of one shard have different state digests")                                  \
  X(UserError, "The program failed on its own: the same failure came again at the same step")              \
  X(RestartsExhausted, "The job failed more often than its limit allows")                                  \
  X(ProgramMissing, "The program does not exist on the server")                                            \
  X(JobStarted, "The job starts")                                                                          \
  X(JobFinished, "All ranks ended with exit code zero")                                                    \
  X(JobCancelled, "An operator cancelled the job")                                                         \
  X(NoCapacity, "Fewer healthy devices are free than the job's minimum")                                   \
  X(SparesExhausted, "No spare is left")                                                                   \
  X(SpareTaken, "A spare replaced the lost rank")                                                          \
  X(StandbyPromoted, "A warm standby replaced the lost rank")                                              \
  X(RestartedInPlace, "The rank's process was started again on the same device")                           \
  X(JobShrunk, "No spare was left, so the job continues with fewer data-parallel replicas")                \
  X(JobRegrown, "Capacity returned, so the job grows back at a step boundary")                             \
  X(WaitingForCapacity, "The job is parked until enough devices are healthy")                              \
  X(ReservedByPriority, "A job of higher priority or greater age has the spare")                           \
  X(MassSilence, "Most servers fell silent at once: the controller doubts its own network and freezes")    \
  X(MassSilenceReleased, "The freeze ended: servers answered again, or were proved lost")                  \
  X(Takeover, "A controller took over an unfinished recovery")                                             \
  X(Adopted, "A restarted controller adopted the running generation")                                      \
  X(SourceLost, "The recovery point lost its last source")                                                 \
  X(RolledBack, "A shard had no live replica; the job went back to the newest protected state")            \
  X(StaleGeneration, "A message of an older generation was refused")                                       \
  X(StaleTerm, "A message of an older controller term was refused")                                        \
  X(StorageFull, "A disk is full")                                                                         \
  X(StorageCorrupt, "A checksum did not match what was stored")                                            \
  X(StorageFailed, "A disk operation failed")                                                              \
  X(LedgerFailed, "The ledger could not be written; the controller makes no new promise")                  \
  X(LedgerBehind, "An agent reported a generation above the ledger's: the ledger was restored from an old copy") \
  X(SameFailureTwice, "The same failure came again on another server")                                     \
  X(Registered, "The server registered")                                                                   \
  X(Healthy, "All checks passed")                                                                          \
  X(ControllerStopped, "The controller was asked to stop")                                                 \
  X(CheckpointCommitted, "All shards of the checkpoint are verified and its manifest is durable")          \
  X(CheckpointDropped, "Retention or lineage removed the checkpoint")                                      \
  X(MemberLost, "A member of the generation was lost")

enum class Reason : uint16_t {
#define EVERSTEP_REASON_ENUM(name, text) k##name,
  EVERSTEP_REASONS(EVERSTEP_REASON_ENUM)
#undef EVERSTEP_REASON_ENUM
  kCount,
};

std::string_view ReasonName(Reason reason);         // "ServerSilent"
std::string_view ReasonText(Reason reason);         // the sentence
std::optional<Reason> ReasonFromName(std::string_view name);

}  // namespace everstep
