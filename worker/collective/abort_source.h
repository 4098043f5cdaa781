// A latch that ends waiting: set once, from any thread, with a reason; visible to poll() through an
// eventfd that stays readable. Used to cancel a pending ConnectMesh. Thread-safe.
#pragma once

#include <atomic>
#include <mutex>

#include "proto/base/status.h"
#include "worker/collective/host/descriptor.h"

namespace everstep::collective {

class AbortSource {
 public:
  AbortSource();
  // The first reason wins; true if this call set it.
  bool Trigger(Status reason);
  bool triggered() const { return triggered_.load(); }
  Status reason() const;  // OK while not triggered
  int fd() const { return event_.get(); }

 private:
  Descriptor event_;
  std::atomic<bool> triggered_{false};
  mutable std::mutex mutex_;
  Status reason_;  // guarded by mutex_
};

}  // namespace everstep::collective
