// A session core on a table: events in, effects out, with the shortest ways to the usual states.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "worker/core/session/session_core.h"

namespace everstep::session {

inline constexpr ProcessId kProcess{77};

inline Assignment MakeAssignment(uint64_t generation, StateId point, RestoreAction action, int32_t ranks = 2) {
  Assignment a;
  a.job = JobUid("job");
  a.generation = Generation(generation);
  a.recovery_point = point;
  a.dp_size = ranks;
  for (int32_t i = 0; i < ranks; ++i) {
    RankAssignment r;
    r.rank = Rank(i);
    r.dp = i;
    r.process = i == 0 ? kProcess : ProcessId(100 + static_cast<uint64_t>(i));
    r.action = i == 0 ? action : RestoreAction::kKeep;
    if (r.action == RestoreAction::kFetchFromRank) r.source_rank = Rank(1);
    if (r.action == RestoreAction::kFetchFromSnapshot) {
      r.sources = {{ServerId("s1"), SnapshotTier::kStaged, "a:1", point, ShardIndex(0)},
                   {ServerId("s2"), SnapshotTier::kPeer, "a:2", point, ShardIndex(0)}};
    }
    a.ranks.push_back(std::move(r));
  }
  return a;
}

class Rig {
 public:
  explicit Rig(SessionPolicy policy = {.process = kProcess}) : core(policy) {}

  // The effects of one event, which stay until the next.
  Rig& Do(const Event& event) {
    effects.clear();
    core.Step(event, now, effects);
    return *this;
  }

  template <typename E>
  const E* Find() const {
    for (const Effect& effect : effects) {
      if (const E* found = std::get_if<E>(&effect)) return found;
    }
    return nullptr;
  }
  template <typename M>
  const M* Sent() const {
    for (const Effect& effect : effects) {
      if (const auto* send = std::get_if<SendToAgent>(&effect)) {
        if (const M* message = std::get_if<M>(&send->message)) return message;
      }
    }
    return nullptr;
  }
  template <typename E>
  bool Has() const { return Find<E>() != nullptr; }
  bool Answered(StatusCode code) const {
    const CallAnswered* answer = Find<CallAnswered>();
    return answer != nullptr && answer->status.code() == code;
  }
  bool Outcome(CallOutcome outcome) const { return Answered(StatusCode::kOk) && Find<CallAnswered>()->outcome == outcome; }

  // ---- ways to states

  Rig& Joined() { return Do(JoinCalled{}); }
  Rig& Assigned(const Assignment& a) { return Do(AssignRank{a, Rank(0)}); }
  // Stepping in `generation` from the initial state.
  Rig& Stepping(uint64_t generation = 1) {
    Joined();
    Assigned(MakeAssignment(generation, {}, RestoreAction::kInitialize));
    Do(MeshConnected{Generation(generation)});
    Do(RestoreDone{Generation(generation), 0});
    Do(DigestsAgreed{Generation(generation), {1, 2}});
    return Do(ResumeRank{Generation(generation), everstep::Step(0)});
  }
  Rig& Reduced(int64_t step) {
    Do(StepBegun{everstep::Step(step)});
    return Do(GradientsCompleted{everstep::Step(step)});
  }
  Rig& Voting(int64_t step) {
    Reduced(step);
    return Do(VoteStarted{everstep::Step(step)});
  }
  VotePassed Passed(int64_t step, uint64_t generation = 1) const {
    VotePassed passed;
    passed.step = everstep::Step(step);
    passed.generation = Generation(generation);
    return passed;
  }
  Rig& StepDone(int64_t step, uint64_t generation = 1) {
    Voting(step);
    Do(Passed(step, generation));
    return Do(Applied{everstep::Step(step)});
  }
  // Fenced, aborted, answered, and waiting in Join.
  Rig& Collected(uint64_t generation) {
    const Generation old = core.progress().generation;
    Do(FenceRank{Generation(generation)});
    Do(AbortConfirmed{old});
    return *this;
  }

  SessionCore core;
  Instant now = Instant(Seconds(1));
  std::vector<Effect> effects;
};

inline StateId State(int64_t step, uint64_t generation) { return {everstep::Step(step), Generation(generation)}; }

}  // namespace everstep::session
