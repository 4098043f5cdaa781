#include "controller/io/rpc/admin_service.h"

#include <fmt/format.h>

#include <utility>

#include "controller/io/rpc/grpc_status.h"
#include "controller/io/rpc/view_convert.h"
#include "controller/io/rpc/watch_reactor.h"
#include "proto/convert/job_convert.h"
#include "proto/convert/reader.h"

namespace everstep {
namespace {

// The uid of the job that a read is limited to; null for "all".
Status FindFilter(const ClusterView& view, const std::string& job, const JobUid** uid) {
  *uid = nullptr;
  if (job.empty()) return OkStatus();
  const JobView* found = FindJob(view, job);
  if (found == nullptr) return NotFound(fmt::format("job: there is no job \"{}\"", job));
  *uid = &found->entry.uid;
  return OkStatus();
}

Result<OperatorRequest> DrainRequest(const std::string& server, bool draining) {
  Reader reader;
  SetDrain request{ServerId(reader.Name(server, "server")), draining};
  if (!reader.ok()) return reader.status();
  return OperatorRequest(std::move(request));
}

}  // namespace

void AdminServiceImpl::Count(const char* method, StatusCode code) {
  const RpcServer::Parts* parts = parts_.load();
  if (parts != nullptr && parts->handled) parts->handled(method, code);
}

grpc::ServerUnaryReactor* AdminServiceImpl::Answer(Context* context, const char* method, const Status& status) {
  Count(method, status.code());
  auto* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::Read(Context* context, const char* method, Fill fill) {
  const RpcServer::Parts* parts = parts_.load();
  if (parts == nullptr) return Answer(context, method, Unavailable("the controller is starting"));
  auto* reactor = context->DefaultReactor();
  const bool accepted = parts->loop->RequestView([this, reactor, method, fill](ControllerLoop::View view) {
    tasks_.Post([this, reactor, method, fill, view = std::move(view)] {
      const Status status = view == nullptr ? Unavailable("the controller is stopping") : fill(*view);
      Count(method, status.code());
      reactor->Finish(ToGrpc(status));
    });
  });
  if (!accepted) {
    const Status status = ResourceExhausted("too many reads wait for the controller; try again");
    Count(method, status.code());
    reactor->Finish(ToGrpc(status));
  }
  return reactor;
}

grpc::ServerUnaryReactor* AdminServiceImpl::Mutate(Context* context, const char* method,
                                                   const std::string& request_id, bool dry_run,
                                                   Result<OperatorRequest> request,
                                                   std::function<void(const ReplyToOperator&)> fill) {
  const RpcServer::Parts* parts = parts_.load();
  if (parts == nullptr) return Answer(context, method, Unavailable("the controller is starting"));
  Reader reader;
  reader.Name(request_id, "request_id");
  if (!reader.ok()) return Answer(context, method, reader.status());
  if (!request.ok()) return Answer(context, method, request.status());
  auto* reactor = context->DefaultReactor();
  CallId call;
  Status refused;
  {
    std::lock_guard lock(mutex_);
    if (cancelled_) {
      refused = Unavailable("the controller is stopping");
    } else if (waiting_.size() >= options_.calls_max) {
      refused = ResourceExhausted("too many calls wait for the controller; try again");
    } else {
      call = CallId(++newest_call_);
      waiting_[call] = [this, reactor, method, fill = std::move(fill)](const ReplyToOperator& reply) {
        if (reply.status.ok()) fill(reply);
        Count(method, reply.status.code());
        reactor->Finish(ToGrpc(reply.status));
      };
    }
  }
  if (refused.ok()) {
    // Until certificates give names, the caller is known by where it calls from.
    OperatorCalled event{call, RequestId(request_id), context->peer(), dry_run, std::move(request).value()};
    if (parts->loop->Post(std::move(event))) return reactor;
    ReplyToOperator gone{call, Unavailable("the controller is stopping"), {}, {}};
    Reply(gone);
    return reactor;
  }
  Count(method, refused.code());
  reactor->Finish(ToGrpc(refused));
  return reactor;
}

void AdminServiceImpl::Reply(const ReplyToOperator& effect) {
  Waiting waiting;
  {
    std::lock_guard lock(mutex_);
    const auto found = waiting_.find(effect.call);
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  waiting(effect);
}

void AdminServiceImpl::CancelAll() {
  std::map<CallId, Waiting> waiting;
  std::map<WatchReactor*, std::shared_ptr<WatchReactor>> watches;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    waiting.swap(waiting_);
    watches = watches_;
  }
  for (const auto& [call, answer] : waiting) {
    answer(ReplyToOperator{call, Unavailable("the controller is stopping"), {}, {}});
  }
  for (const auto& [watch, held] : watches) held->Cancel();
}

void AdminServiceImpl::Forget(WatchReactor* watch) {
  std::shared_ptr<WatchReactor> held;
  std::lock_guard lock(mutex_);
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  held = std::move(found->second);
  watches_.erase(found);
}

// ---- mutations

grpc::ServerUnaryReactor* AdminServiceImpl::SubmitJob(Context* context, const v1::SubmitJobRequest* request,
                                                      v1::SubmitJobResponse* response) {
  Result<JobSpec> spec = FromMessage(request->spec());
  Result<OperatorRequest> body = spec.ok() ? Result<OperatorRequest>(everstep::SubmitJob{std::move(*spec)})
                                           : Result<OperatorRequest>(spec.status());
  return Mutate(context, "SubmitJob", request->request_id(), request->dry_run(), std::move(body),
                [response](const ReplyToOperator& reply) {
                  response->set_job_uid(reply.job.value);
                  response->set_message(ToUtf8(reply.message));
                });
}

grpc::ServerUnaryReactor* AdminServiceImpl::CancelJob(Context* context, const v1::CancelJobRequest* request,
                                                      v1::CancelJobResponse* response) {
  Reader reader;
  OperatorRequest body = everstep::CancelJob{reader.Name(request->job(), "job")};
  return Mutate(context, "CancelJob", request->request_id(), request->dry_run(),
                reader.ok() ? Result<OperatorRequest>(std::move(body)) : Result<OperatorRequest>(reader.status()),
                [response](const ReplyToOperator& reply) { response->set_message(ToUtf8(reply.message)); });
}

grpc::ServerUnaryReactor* AdminServiceImpl::DrainServer(Context* context, const v1::DrainServerRequest* request,
                                                        v1::DrainServerResponse* response) {
  return Mutate(context, "DrainServer", request->request_id(), request->dry_run(),
                DrainRequest(request->server(), true),
                [response](const ReplyToOperator& reply) { response->set_message(ToUtf8(reply.message)); });
}

grpc::ServerUnaryReactor* AdminServiceImpl::UndrainServer(Context* context, const v1::UndrainServerRequest* request,
                                                          v1::UndrainServerResponse* response) {
  return Mutate(context, "UndrainServer", request->request_id(), request->dry_run(),
                DrainRequest(request->server(), false),
                [response](const ReplyToOperator& reply) { response->set_message(ToUtf8(reply.message)); });
}

// ---- reads

grpc::ServerUnaryReactor* AdminServiceImpl::ListServers(Context* context, const v1::ListServersRequest*,
                                                        v1::ListServersResponse* response) {
  return Read(context, "ListServers", [response](const ClusterView& view) {
    WriteServers(view, response);
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListJobs(Context* context, const v1::ListJobsRequest*,
                                                     v1::ListJobsResponse* response) {
  return Read(context, "ListJobs", [response](const ClusterView& view) {
    WriteJobs(view, response);
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetJob(Context* context, const v1::GetJobRequest* request,
                                                   v1::GetJobResponse* response) {
  return Read(context, "GetJob", [request, response](const ClusterView& view) {
    const JobView* job = FindJob(view, request->job());
    if (job == nullptr) return NotFound(fmt::format("job: there is no job \"{}\"", request->job()));
    WriteJob(*job, response->mutable_job());
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListRecoveries(Context* context, const v1::ListRecoveriesRequest* request,
                                                           v1::ListRecoveriesResponse* response) {
  return Read(context, "ListRecoveries", [request, response](const ClusterView& view) -> Status {
    const JobUid* job = nullptr;
    EVERSTEP_RETURN_IF_ERROR(FindFilter(view, request->job(), &job));
    WriteRecoveries(view, job, response);
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetRecovery(Context* context, const v1::GetRecoveryRequest* request,
                                                        v1::GetRecoveryResponse* response) {
  return Read(context, "GetRecovery", [request, response](const ClusterView& view) {
    for (const RecoveryRecord& recovery : view.recoveries) {
      if (recovery.id.value != request->id()) continue;
      WriteRecovery(recovery, response->mutable_recovery());
      return OkStatus();
    }
    return NotFound(fmt::format("id: there is no recovery {}", request->id()));
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListCheckpoints(Context* context,
                                                            const v1::ListCheckpointsRequest* request,
                                                            v1::ListCheckpointsResponse* response) {
  return Read(context, "ListCheckpoints", [request, response](const ClusterView& view) -> Status {
    const JobUid* job = nullptr;
    EVERSTEP_RETURN_IF_ERROR(FindFilter(view, request->job(), &job));
    WriteCheckpoints(view, job, response);
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListEvents(Context* context, const v1::ListEventsRequest* request,
                                                       v1::ListEventsResponse* response) {
  return Read(context, "ListEvents", [request, response](const ClusterView& view) -> Status {
    const JobUid* job = nullptr;
    EVERSTEP_RETURN_IF_ERROR(FindFilter(view, request->job(), &job));
    WriteEvents(view, *request, job, response);
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetLogs(Context* context, const v1::GetLogsRequest* request,
                                                    v1::GetLogsResponse* response) {
  return Read(context, "GetLogs", [request, response](const ClusterView& view) {
    const JobView* job = FindJob(view, request->job());
    if (job == nullptr) return NotFound(fmt::format("job: there is no job \"{}\"", request->job()));
    WriteLogs(view, *job, *request, response);
    if (request->has_rank() && response->logs_size() == 0) {
      return NotFound(fmt::format("rank: job \"{}\" has no lines of rank {}", request->job(), request->rank()));
    }
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetConfig(Context* context, const v1::GetConfigRequest*,
                                                      v1::GetConfigResponse* response) {
  const RpcServer::Parts* parts = parts_.load();
  if (parts == nullptr) return Answer(context, "GetConfig", Unavailable("the controller is starting"));
  parts->describe_config(response);
  return Answer(context, "GetConfig", OkStatus());
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetControllerInfo(Context* context, const v1::GetControllerInfoRequest*,
                                                              v1::GetControllerInfoResponse* response) {
  return Read(context, "GetControllerInfo", [this, response](const ClusterView& view) {
    parts_.load()->describe_controller(response);
    response->set_term(view.term.value);
    response->set_adopting(view.adopting);
    response->set_frozen(view.frozen);
    return OkStatus();
  });
}

grpc::ServerWriteReactor<v1::WatchJobResponse>* AdminServiceImpl::WatchJob(Context* context,
                                                                          const v1::WatchJobRequest* request) {
  class Refused : public grpc::ServerWriteReactor<v1::WatchJobResponse> {
   public:
    explicit Refused(const Status& status) { Finish(ToGrpc(status)); }
    void OnDone() override { delete this; }
  };
  const RpcServer::Parts* parts = parts_.load();
  if (parts == nullptr) return new Refused(Unavailable("the controller is starting"));
  auto watch = std::make_shared<WatchReactor>(this, parts, context, request->job());
  {
    std::lock_guard lock(mutex_);
    if (cancelled_) return new Refused(Unavailable("the controller is stopping"));
    if (watches_.size() >= kWatchersMax) return new Refused(ResourceExhausted("too many watches are open; end some"));
    watches_[watch.get()] = watch;
  }
  watch->Begin();
  return watch.get();
}

}  // namespace everstep
