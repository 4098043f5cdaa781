// Cancels a call from any thread, never after gRPC has let go of its context. Only for controller/io/rpc. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>

namespace everstep {

class CancelGuard {
 public:
  explicit CancelGuard(grpc::CallbackServerContext* context) : context_(context) {}

  // REQUIRES: the caller holds the reactor that owns this.
  void Cancel() {
    {
      std::lock_guard lock(mutex_);
      if (done_) return;
      ++cancelling_;
    }
    context_->TryCancel();  // without the mutex: reactions may run in here
    std::lock_guard lock(mutex_);
    --cancelling_;
    idle_.notify_all();
  }

  // First thing in OnDone: the context is gone when that returns.
  void Done() {
    std::unique_lock lock(mutex_);
    done_ = true;
    idle_.wait(lock, [this] { return cancelling_ == 0; });
  }

 private:
  grpc::CallbackServerContext* const context_;
  std::mutex mutex_;
  std::condition_variable idle_;
  int cancelling_ = 0;  // guarded by mutex_
  bool done_ = false;   // guarded by mutex_
};

}  // namespace everstep
