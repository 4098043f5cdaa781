#include "worker/collective/abort_source.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/base/check.h"

namespace everstep::collective {

AbortSource::AbortSource() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  EVERSTEP_CHECK(event_.valid());
}

bool AbortSource::Trigger(Status reason) {
  std::lock_guard lock(mutex_);
  if (triggered_.load(std::memory_order_relaxed)) return false;
  reason_ = reason.ok() ? Aborted("aborted without a reason") : std::move(reason);
  triggered_.store(true);
  const uint64_t one = 1;
  // Cannot fail: the counter of this eventfd is only ever raised once.
  if (::write(event_.get(), &one, sizeof(one)) != sizeof(one))
    EVERSTEP_REPORT_BUG("abort eventfd write failed");
  return true;
}

Status AbortSource::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace everstep::collective
