// The loop: the one thread that owns the core. Others post events to its bounded queue; it steps the core, appends what
// was decided to the ledger, and performs every effect in order, none before the ledger is durable up to what its
// decision saw (persist, then tell). It measures its own lag and reports it, so that leases are extended by it.
// Post, RequestView, GetView and Stop are thread-safe; the rest is loop-only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "controller/core/event.h"
#include "controller/core/view/view.h"
#include "controller/io/loop/core_interface.h"
#include "controller/io/loop/loop_ports.h"
#include "controller/io/store/ledger_store.h"
#include "proto/base/status.h"

namespace everstep {

struct LoopOptions {
  size_t events_max = 64 * 1024;
  size_t effects_pending_max = 256 * 1024;  // beyond it no event is taken until the ledger catches up
  size_t view_requests_max = 1000;
  int64_t snapshot_records = 1000;          // the ledger is compacted after this many records
  int64_t snapshot_bytes = 8 << 20;         // or this many bytes
  Duration lag_reported = Milliseconds(50); // a lateness above this is fed to the core
  Duration wait_max = Milliseconds(50);     // between turns; bounds the lag that goes unseen when everything stops
  Duration view_age_max = Milliseconds(100);  // without a record, notice or reply since, a view lives this long
};

// Instants are CLOCK_BOOTTIME, so that a suspended machine's leases have run out when it wakes.
Now SystemNow();

class ControllerLoop {
 public:
  struct Parts {
    std::unique_ptr<CoreInterface> core;
    LedgerStore* store = nullptr;
    LoopOutputs* outputs = nullptr;
    HeartbeatSource* heartbeats = nullptr;     // may be null
    std::function<Now()> clock = SystemNow;
    // The ledger failed: no promise may be made any more. Called on the store's thread; ends the process.
    std::function<void(const Status&)> on_ledger_failure;
  };

  ControllerLoop(LoopOptions options, Parts parts);
  ~ControllerLoop();

  // Starts the thread; its first turn starts the core.
  void Start();
  // Ends the thread after effects that wait for the ledger have left, or after `patience`. Idempotent.
  void Stop(Duration patience);

  // False when the loop has stopped. Waits while the queue is full: whoever reads from agents must not read on.
  bool Post(Event event);
  // Heartbeats arrived.
  void Wake();

  using View = std::shared_ptr<const ClusterView>;
  // Calls `done` on the loop's thread once all that the view shows is durable; with null when the loop has stopped.
  // False, and no call, when too many requests wait.
  bool RequestView(std::function<void(View)> done);
  // kDeadlineExceeded · kResourceExhausted: too many readers · kUnavailable: the loop has stopped.
  Result<View> GetView(Duration timeout);

  // When the last turn began; for liveness. Thread-safe.
  Instant last_turn() const { return Instant(Duration(last_turn_ns_.load(std::memory_order_relaxed))); }
  // The core has started, so that the ledger is replayed and events are taken. Thread-safe.
  bool ready() const { return ready_.load(std::memory_order_relaxed); }

 private:
  using ViewRequest = std::function<void(View)>;
  struct ViewReply { ViewRequest done; View view; };
  struct Pending {
    LedgerSequence after;
    std::variant<EffectBody, ViewReply> body;
  };

  void Run();
  void Turn();
  void WaitForWork();
  void StepCore(const Event& event);
  void StepConfirmed();
  void RunTimers();
  void StepQueued(bool drain_datagrams);
  // The core has no clock: how long a plan took is measured here.
  void ReportPlanning(const Effects& effects, Duration duration);
  void TakeEffects(Effects effects);
  void FlushAppends();
  void CompactIfDue();
  void PerformReady();
  void Perform(EffectBody& body, WallTime wall);
  void AnswerViewRequests();
  bool Stopping();

  const LoopOptions options_;
  Parts parts_;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable room_;
  std::deque<Event> events_;              // guarded by mutex_
  std::vector<ViewRequest> view_requests_;  // guarded by mutex_
  LedgerSequence durable_shared_;         // guarded by mutex_
  bool woken_ = false;                    // guarded by mutex_
  bool stopping_ = false;                 // guarded by mutex_
  bool stopped_ = false;                  // guarded by mutex_
  Instant stop_deadline_ = kNever;        // guarded by mutex_

  std::atomic<int64_t> last_turn_ns_{0};
  std::atomic<bool> ready_{false};
  std::atomic<bool> compacting_{false};
  std::atomic<bool> failed_{false};

  // Loop thread only.
  std::deque<Pending> pending_;
  std::deque<FenceBecameDurable> confirmed_;  // performed confirmations that the core has yet to hear of
  std::vector<StoredRecord> batch_;
  LedgerSequence appended_;
  LedgerSequence durable_;
  int64_t records_since_snapshot_ = 0;
  int64_t bytes_since_snapshot_ = 0;
  Instant turn_started_{};
  bool stuck_deadline_ = false;           // TimeAdvanced did not move a due deadline
  View view_;
  Instant view_built_{};
  bool view_stale_ = true;                // something was told after it was built
};

}  // namespace everstep
