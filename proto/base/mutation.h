// Deliberate protocol mistakes, for the test of the simulator's checkers: a checker that never fires is not a checker.
// In the product Mutated() is constant false and costs nothing; tests/sim builds the cores a second time with
// EVERSTEP_MUTATIONS and sets g_mutation to one mistake at a time. Single-threaded there.
#pragma once

#include <cstdint>

namespace everstep {

#define EVERSTEP_MUTATION_LIST(X)                                                                                   \
  X(SkipFence, "a fenced rank answers and goes on stepping")                                                        \
  X(AnswerBeforeAbort, "Collect is answered before the abort is confirmed")                                         \
  X(ForgetUndecided, "the undecided step is left out of the report")                                                \
  X(AcceptStaleGeneration, "a rank accepts an assignment below what it promised")                                   \
  X(TornIsValid, "memory counts as valid while a step is applied to it")                                            \
  X(ServeWhileApplying, "a source serves before it has rolled forward")                                             \
  X(RollForwardWithoutProof, "gradients are applied although nothing proves that their vote passed")                \
  X(IgnoreProofOfDead, "the progress page of a dead rank proves nothing")                                           \
  X(CommitIncomplete, "a checkpoint is committed before all of its shards are there")                               \
  X(AcceptOffChain, "a copy off the chain is taken for one on it")                                                  \
  X(PromoteTwice, "a standby that is planned for one job is given to another")                                      \
  X(PlanOnDraining, "a draining server takes newcomers")                                                            \
  X(AmendAfterAssign, "a loss after Assign changes the plan of the same generation")                                \
  X(AdoptUnfinished, "a new leader goes on with an unfinished recovery of the old one")                             \
  X(ReuseGeneration, "a recovery starts without a new generation")                                                  \
  X(KeepIncarnation, "a restarted agent keeps the incarnation of the one before")                                   \
  X(IgnoreVotes, "votes are no proof of life")                                                                      \
  X(IgnoreMassSilence, "most servers fall silent, and all of them are declared dead")                               \
  X(NeverReleaseBrake, "whoever is held by the mass-silence brake is held for ever")                                \
  X(SkipProbe, "silence of datagrams alone is a death")                                                             \
  X(ObeyOldTerm, "an agent obeys a leader that was replaced")                                                       \
  X(ObeyReplayed, "an agent obeys a command twice")                                                                 \
  X(ReuseDeviceEarly, "a device is used again before its process is reaped")                                        \
  X(FreeAboveWatermark, "staged copies at or above the watermark are freed")                                        \
  X(PromiseUnverified, "a staged copy is promised before it is verified")                                           \
  X(DeleteWithoutCondemning, "a chunk is deleted, and its name may be used again")                                  \
  X(SkipRelease, "agents are not told that a job has ended")                                                        \
  X(ShareTwice, "shares of the global batch overlap")                                                               \
  X(ResumeEarly, "Resume is said before every rank is ready")                                                       \
  X(KeepExcluded, "a rank left out of the decision set is not killed")

enum class Mutation : uint8_t {
  kNone,
#define EVERSTEP_MUTATION_ENUM(name, text) k##name,
  EVERSTEP_MUTATION_LIST(EVERSTEP_MUTATION_ENUM)
#undef EVERSTEP_MUTATION_ENUM
};

#ifdef EVERSTEP_MUTATIONS
inline Mutation g_mutation = Mutation::kNone;
inline bool Mutated(Mutation mutation) { return g_mutation == mutation; }
#else
constexpr bool Mutated(Mutation) { return false; }
#endif

}  // namespace everstep
