// One WatchJob stream. Internal to controller/io/rpc.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "controller/io/loop/watch.h"
#include "controller/io/rpc/admin_service.h"
#include "controller/io/rpc/cancel_guard.h"

namespace everstep {

// Follows a job: its state, then lines, metrics and notices as they leave the loop, at last its outcome. gRPC's threads,
// the loop (through the watcher) and the task thread meet here under one mutex.
class WatchReactor : public grpc::ServerWriteReactor<v1::WatchJobResponse>,
                     public std::enable_shared_from_this<WatchReactor> {
 public:
  WatchReactor(AdminServiceImpl* service, const RpcServer::Parts* parts, grpc::CallbackServerContext* context,
               std::string job)
      : service_(service), parts_(parts), guard_(context), job_name_(std::move(job)) {}

  void Begin();
  void Cancel() { guard_.Cancel(); }

 private:
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Calls `use` with a view on the task thread.
  void WithView(void (WatchReactor::*use)(const ClusterView&));
  void FindAndSubscribe(const ClusterView& view);
  void SendFirst(const ClusterView& view);
  void CheckEnd(const ClusterView& view);
  void SchedulePump();
  void Pump();
  // REQUIRES: mutex_ is held.
  void Convert(Watcher::Taken taken);
  void End(Status status);
  bool TakeFinish(Status* status);

  AdminServiceImpl* const service_;
  const RpcServer::Parts* const parts_;
  CancelGuard guard_;
  const std::string job_name_;
  v1::WatchJobResponse writing_message_;

  std::mutex mutex_;
  JobUid uid_;
  std::shared_ptr<Watcher> watcher_;
  std::deque<v1::WatchJobResponse> outgoing_;
  std::optional<v1::WatchJobResponse> outcome_;  // goes last
  Status end_status_;
  bool started_ = false;        // the job's state was queued
  bool check_end_ = false;      // a notice came: it may have been the end
  bool checking_ = false;
  bool pump_scheduled_ = false;
  bool writing_ = false;
  bool ending_ = false;
  bool finished_ = false;
};

}  // namespace everstep
