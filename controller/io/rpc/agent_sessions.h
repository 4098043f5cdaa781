// The streams of agents. Each message becomes an event of the loop; commands are queued per session and written as fast
// as the agent takes them. The death of a stream is told at once. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "controller/io/rpc/rpc_server.h"
#include "everstep/v1/agent.grpc.pb.h"
#include "proto/base/time.h"

namespace everstep {

class AgentSession;

class AgentSessions : public v1::AgentService::CallbackService {
 public:
  explicit AgentSessions(const RpcOptions& options) : options_(options) {}

  void Serve(const RpcServer::Parts* parts) { parts_.store(parts); }
  void Send(const SendCommand& effect);
  void Close(const CloseSession& effect);
  // Ends all sessions and takes no more.
  void CancelAll();
  int count() const { return count_.load(std::memory_order_relaxed); }

  grpc::ServerBidiReactor<v1::AgentMessage, v1::ControllerMessage>* Session(
      grpc::CallbackServerContext* context) override;

 private:
  friend class AgentSession;
  std::shared_ptr<AgentSession> Find(SessionId id);
  void Remove(SessionId id);
  // Ends streams that said nothing for too long: they cost a place. REQUIRES: mutex_ is held.
  void CancelMute(Instant now);

  const RpcOptions options_;
  std::atomic<const RpcServer::Parts*> parts_{nullptr};
  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::map<SessionId, std::shared_ptr<AgentSession>> sessions_;  // guarded by mutex_
  uint64_t newest_ = 0;                                          // guarded by mutex_
  Instant swept_{};                                              // guarded by mutex_
  bool cancelled_ = false;                                       // guarded by mutex_
};

}  // namespace everstep
