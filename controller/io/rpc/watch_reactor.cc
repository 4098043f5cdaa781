#include "controller/io/rpc/watch_reactor.h"

#include <fmt/format.h>

#include <utility>

#include "controller/io/rpc/grpc_status.h"
#include "controller/io/rpc/view_convert.h"

namespace everstep {

void WatchReactor::Begin() { WithView(&WatchReactor::FindAndSubscribe); }

void WatchReactor::WithView(void (WatchReactor::*use)(const ClusterView&)) {
  auto self = shared_from_this();
  const bool accepted = parts_->loop->RequestView([self, use](ControllerLoop::View view) {
    self->service_->tasks_.Post([self, use, view = std::move(view)] {
      if (view == nullptr) {
        self->End(Unavailable("the controller is stopping"));
      } else {
        (self.get()->*use)(*view);
      }
    });
  });
  if (!accepted) End(ResourceExhausted("too many reads wait for the controller; try again"));
}

void WatchReactor::FindAndSubscribe(const ClusterView& view) {
  const JobView* job = FindJob(view, job_name_);
  if (job == nullptr) return End(NotFound(fmt::format("job: there is no job \"{}\"", job_name_)));
  std::weak_ptr<WatchReactor> weak = weak_from_this();
  auto watcher = parts_->watches->Subscribe(job->entry.uid, [weak] {
    if (const auto self = weak.lock()) self->SchedulePump();
  });
  if (watcher == nullptr) return End(ResourceExhausted("too many watches are open; end some"));
  {
    std::lock_guard lock(mutex_);
    uid_ = job->entry.uid;
    watcher_ = std::move(watcher);
  }
  // What happens from here on is in the watcher's queue: a view made now loses nothing in between.
  WithView(&WatchReactor::SendFirst);
}

void WatchReactor::SendFirst(const ClusterView& view) {
  const JobView* job = FindJob(view, uid_.value);
  if (job == nullptr) return End(NotFound(fmt::format("job: \"{}\" is gone", job_name_)));
  {
    std::lock_guard lock(mutex_);
    v1::WatchJobResponse first;
    WriteJob(*job, first.mutable_job());
    outgoing_.push_front(std::move(first));
    if (job->entry.ended) {
      outcome_.emplace();
      WriteOutcome(*job->entry.ended, outcome_->mutable_outcome());
    }
    started_ = true;
  }
  Pump();
}

void WatchReactor::CheckEnd(const ClusterView& view) {
  const JobView* job = FindJob(view, uid_.value);
  if (job == nullptr) return End(NotFound(fmt::format("job: \"{}\" is gone", job_name_)));
  {
    std::lock_guard lock(mutex_);
    checking_ = false;
    if (job->entry.ended && !outcome_) {
      outcome_.emplace();
      WriteOutcome(*job->entry.ended, outcome_->mutable_outcome());
    }
  }
  Pump();
}

void WatchReactor::SchedulePump() {
  {
    std::lock_guard lock(mutex_);
    if (pump_scheduled_) return;
    pump_scheduled_ = true;
  }
  service_->tasks_.Post([self = shared_from_this()] {
    {
      std::lock_guard lock(self->mutex_);
      self->pump_scheduled_ = false;
    }
    self->Pump();
  });
}

void WatchReactor::Pump() {
  bool check = false;
  bool write = false;
  bool end = false;
  {
    std::lock_guard lock(mutex_);
    if (!started_ || ending_ || writing_) return;
    if (outgoing_.empty()) Convert(watcher_->Take());
    if (!outgoing_.empty()) {
      writing_message_ = std::move(outgoing_.front());
      outgoing_.pop_front();
      writing_ = write = true;
    } else if (outcome_ && outcome_->has_outcome()) {
      writing_message_ = std::move(*outcome_);
      outcome_->Clear();
      writing_ = write = true;
    } else if (outcome_) {
      end = true;  // the outcome was the last message
    }
    check = check_end_ && !checking_ && !outcome_;
    if (check) {
      check_end_ = false;
      checking_ = true;
    }
  }
  if (write) StartWrite(&writing_message_);
  if (end) End(OkStatus());
  if (check) WithView(&WatchReactor::CheckEnd);
}

void WatchReactor::Convert(Watcher::Taken taken) {
  struct Visitor {
    v1::WatchJobResponse* out;
    bool* check_end;
    void operator()(const ForwardLines& in) const {
      out->mutable_lines()->set_rank(in.rank.value);
      out->mutable_lines()->set_process(in.process.value);
      for (const std::string& line : in.lines) out->mutable_lines()->add_lines(line);
    }
    void operator()(const ForwardMetric& in) const {
      out->mutable_metric()->set_rank(in.rank.value);
      out->mutable_metric()->set_step(in.step.value);
      out->mutable_metric()->set_name(ToUtf8(in.name));
      out->mutable_metric()->set_value(in.value);
    }
    void operator()(const WatchedNotice& in) const {
      WriteEvent(EventView{0, in.wall, in.notice}, out->mutable_event());
      *check_end = true;
    }
  };
  for (const WatchItem& item : taken.items) {
    outgoing_.emplace_back();
    std::visit(Visitor{&outgoing_.back(), &check_end_}, item);
  }
  if (!outgoing_.empty()) outgoing_.front().set_dropped(taken.dropped);
}

void WatchReactor::OnWriteDone(bool ok) {
  bool finish = false;
  Status status;
  {
    std::lock_guard lock(mutex_);
    writing_ = false;
    finish = TakeFinish(&status);
  }
  if (finish) return Finish(ToGrpc(status));
  if (!ok) return End(Status(StatusCode::kCancelled, "the caller is gone"));
  SchedulePump();
}

void WatchReactor::OnCancel() { End(Status(StatusCode::kCancelled, "the call was cancelled")); }

bool WatchReactor::TakeFinish(Status* status) {
  if (!ending_ || finished_ || writing_) return false;
  finished_ = true;
  *status = end_status_;
  return true;
}

void WatchReactor::End(Status status) {
  bool finish = false;
  {
    std::lock_guard lock(mutex_);
    if (!ending_) {
      ending_ = true;
      end_status_ = std::move(status);
      watcher_.reset();
    }
    finish = TakeFinish(&status);
  }
  if (finish) Finish(ToGrpc(status));
}

void WatchReactor::OnDone() {
  guard_.Done();
  service_->Count("WatchJob", end_status_.code());
  service_->Forget(this);  // may be the last use of this object
}

}  // namespace everstep
