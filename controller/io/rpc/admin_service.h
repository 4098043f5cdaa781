// The operators' service. Mutations become events and wait for the loop's reply; reads are made from the view on a
// thread of their own; watches stream. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "controller/io/rpc/rpc_server.h"
#include "controller/io/rpc/task_thread.h"
#include "everstep/v1/admin.grpc.pb.h"

namespace everstep {

class WatchReactor;

class AdminServiceImpl : public v1::AdminService::CallbackService {
 public:
  explicit AdminServiceImpl(const RpcOptions& options) : options_(options) {}

  void Serve(const RpcServer::Parts* parts) { parts_.store(parts); }
  void Reply(const ReplyToOperator& effect);
  // Answers all calls that wait with UNAVAILABLE and ends all watches.
  void CancelAll();
  void StopTasks() { tasks_.Stop(); }

  using Unary = grpc::ServerUnaryReactor;
  using Context = grpc::CallbackServerContext;
  Unary* SubmitJob(Context*, const v1::SubmitJobRequest*, v1::SubmitJobResponse*) override;
  Unary* CancelJob(Context*, const v1::CancelJobRequest*, v1::CancelJobResponse*) override;
  Unary* DrainServer(Context*, const v1::DrainServerRequest*, v1::DrainServerResponse*) override;
  Unary* UndrainServer(Context*, const v1::UndrainServerRequest*, v1::UndrainServerResponse*) override;
  Unary* ListServers(Context*, const v1::ListServersRequest*, v1::ListServersResponse*) override;
  Unary* ListJobs(Context*, const v1::ListJobsRequest*, v1::ListJobsResponse*) override;
  Unary* GetJob(Context*, const v1::GetJobRequest*, v1::GetJobResponse*) override;
  Unary* ListRecoveries(Context*, const v1::ListRecoveriesRequest*, v1::ListRecoveriesResponse*) override;
  Unary* GetRecovery(Context*, const v1::GetRecoveryRequest*, v1::GetRecoveryResponse*) override;
  Unary* ListCheckpoints(Context*, const v1::ListCheckpointsRequest*, v1::ListCheckpointsResponse*) override;
  Unary* ListEvents(Context*, const v1::ListEventsRequest*, v1::ListEventsResponse*) override;
  Unary* GetLogs(Context*, const v1::GetLogsRequest*, v1::GetLogsResponse*) override;
  grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(Context*, const v1::WatchJobRequest*) override;
  Unary* GetConfig(Context*, const v1::GetConfigRequest*, v1::GetConfigResponse*) override;
  Unary* GetControllerInfo(Context*, const v1::GetControllerInfoRequest*, v1::GetControllerInfoResponse*) override;

 private:
  friend class WatchReactor;
  using Waiting = std::function<void(const ReplyToOperator&)>;
  using Fill = std::function<Status(const ClusterView&)>;

  Unary* Answer(Context* context, const char* method, const Status& status);
  Unary* Read(Context* context, const char* method, Fill fill);
  Unary* Mutate(Context* context, const char* method, const std::string& request_id, bool dry_run,
                Result<OperatorRequest> request, std::function<void(const ReplyToOperator&)> fill);
  void Count(const char* method, StatusCode code);
  void Forget(WatchReactor* watch);

  const RpcOptions options_;
  std::atomic<const RpcServer::Parts*> parts_{nullptr};
  TaskThread tasks_;
  std::mutex mutex_;
  std::map<CallId, Waiting> waiting_;                                  // guarded by mutex_
  std::map<WatchReactor*, std::shared_ptr<WatchReactor>> watches_;     // guarded by mutex_
  uint64_t newest_call_ = 0;                                           // guarded by mutex_
  bool cancelled_ = false;                                             // guarded by mutex_
};

}  // namespace everstep
