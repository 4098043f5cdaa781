// The shell around SessionCore: one mutex (the abort mutex of docs/protocol.md section 2), the program's training
// thread and one I/O thread. Either thread feeds an event to the core and performs its effects under the mutex;
// work for the training thread is handed to Join, aborts run after the mutex is released.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "worker/client/agent_link.h"
#include "worker/client/session.h"
#include "worker/client/staging_writer.h"
#include "worker/client/state_registry.h"
#include "worker/client/static_world.h"
#include "worker/client/tracked_communicator.h"
#include "worker/collective/abort_source.h"
#include "worker/collective/host/mesh_listener.h"
#include "worker/core/session/session_core.h"

namespace everstep {

class Session::Impl : public client::CommunicatorObserver {
 public:
  Impl(const SessionOptions& options, client::RankEnvironment environment);
  ~Impl() override;
  // Listener, page, staging, agent's greeting, I/O thread.
  Status Start();

  // --- the training thread
  Result<Membership> Join();
  Status BeginStep(Step step);
  Status GradientsComplete(Step step);
  Result<CommitOutcome> Commit(Step step, const VoteExtras& extras);
  Status Snapshot();
  void ReportMetric(Step step, std::string_view name, double value);
  Status Finish();
  Result<std::unique_ptr<collective::Communicator>> CreateGroup(std::span<const Rank> ranks, uint32_t id);

  // --- CommunicatorObserver
  void CollectiveEntered() override;
  void CollectiveEnded(Generation generation, Rank suspect, const Status& failure) override;
  void Track(Generation generation, const std::shared_ptr<collective::Communicator>& communicator) override;

  bool generation_over() const { return Left(Generation(joined_generation_.load())); }
  Progress progress() const;
  SessionCounters counters() const;
  bool is_static() const { return environment_.agent_socket.empty(); }
  ProcessId process() const { return environment_.process; }

  client::StateRegistry registry;
  std::function<Status(const Assignment&, const RankAssignment&)> layout;
  std::function<Status()> initialize;
  std::function<Status(Step)> apply;
  std::function<uint64_t()> data_position;
  std::shared_ptr<client::TrackedCommunicator> world, dp_group, pp_group;

 private:
  using Work = std::variant<session::ConnectMesh, session::RollForward, session::InitializeState,
                            session::ReceiveState, session::CopySnapshot, session::ServeState,
                            session::ExchangeDigests>;
  struct Tracked {
    Generation generation;
    std::weak_ptr<collective::Communicator> communicator;
  };

  // session.cc
  Status MapPage();
  Result<uint64_t> Greet();                          // the limit of staging memory, in bytes
  void Post(const session::Event& event);            // takes the mutex, performs what follows
  session::CallAnswered Call(const session::Event& event);
  void DispatchLocked(const session::Event& event);
  void PerformLocked(session::Effect& effect);
  void AnswerLocallyLocked(const RankToAgent& message);  // the agent's part in a static world
  void SendLocked(const RankToAgent& message);
  void RunAbort(Generation generation);
  void IoLoop();
  void ReadAgent();
  void WakeIo();
  [[noreturn]] void Exit(const std::string& message) const;

  // session_work.cc: what Join does between its assignment and its return
  session::Event Do(const session::ConnectMesh& work);
  session::Event Do(const session::RollForward& work);
  session::Event Do(const session::InitializeState& work);
  session::Event Do(const session::ReceiveState& work);
  session::Event Do(const session::CopySnapshot& work);
  session::Event Do(const session::ServeState& work);
  session::Event Do(const session::ExchangeDigests& work);
  Status Connect(const Assignment& assignment, Rank rank);
  Status CreateGroups(const Assignment& assignment, Rank rank);
  Status LayOut();
  session::Event Failed(Generation generation, const Status& status, Rank suspect = Rank(-1)) const;
  session::Event OfProgram(Generation generation, const Status& status) const;
  bool Left(Generation generation) const;
  Membership MembershipLocked() const;

  const SessionOptions options_;
  const client::RankEnvironment environment_;
  std::shared_ptr<collective::MeshListener> listener_;
  ProgressPage* page_ = nullptr;
  std::unique_ptr<ProgressPage> own_page_;
  client::StagingWriter staging_;

  mutable std::mutex mutex_;
  std::condition_variable wake_training_;
  // Guarded by mutex_ from here on.
  session::SessionCore core_;
  std::vector<session::Effect> effects_;
  std::deque<session::Event> local_events_;   // the static agent's answers; at most a few
  client::AgentLink link_;
  std::optional<session::CallAnswered> answer_;
  std::optional<Work> work_;
  int provided_fd_ = -1;                      // of the SnapshotProvided being dispatched
  int work_fd_ = -1;                          // of the CopySnapshot in work_
  std::optional<Generation> abort_wanted_;
  Generation aborted_;                        // newest generation whose communicators were aborted
  std::vector<Tracked> tracked_;
  std::shared_ptr<collective::AbortSource> connect_abort_;
  Generation connect_generation_;
  uint64_t collective_sequence_ = 0;
  SessionCounters counters_;
  // Until here.

  std::atomic<uint64_t> left_generation_{0};  // all up to this one were left: copies in progress stop
  std::atomic<uint64_t> joined_generation_{0};  // what the last Join returned
  Assignment assignment_;                     // training thread: of the work in hand
  Rank rank_{-1};
  int wake_fd_ = -1;
  std::atomic<bool> stopping_{false};
  std::thread io_thread_;
};

}  // namespace everstep
