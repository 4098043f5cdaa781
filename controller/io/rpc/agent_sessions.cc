#include "controller/io/rpc/agent_sessions.h"

#include <deque>
#include <utility>

#include "controller/io/rpc/cancel_guard.h"
#include "controller/io/rpc/grpc_status.h"
#include "proto/convert/agent_convert.h"

namespace everstep {
namespace {

constexpr Duration kHelloTimeout = Seconds(10);
constexpr Duration kSweepInterval = Seconds(1);

}  // namespace

// One stream. gRPC calls its reactions one kind at a time, from its own threads; Send and Close come from the loop.
class AgentSession : public grpc::ServerBidiReactor<v1::AgentMessage, v1::ControllerMessage> {
 public:
  AgentSession(SessionId id, AgentSessions* owner, const RpcServer::Parts* parts, grpc::CallbackServerContext* context)
      : id_(id), owner_(owner), parts_(parts), guard_(context) {}

  void Begin() { StartRead(&incoming_); }

  // ---- from the loop

  void Send(v1::ControllerMessage message) {
    bool start = false;
    bool overflow = false;
    {
      std::lock_guard lock(mutex_);
      if (ending_) return;
      overflow = outgoing_.size() >= owner_->options_.commands_queued_max;
      if (!overflow) {
        outgoing_.push_back(std::move(message));
        start = TakeNext();
      }
    }
    if (overflow) return Cancel();
    if (start) StartWrite(&writing_message_);
  }

  void SendWelcome(const SendCommand& effect) {
    Command command = effect.command;
    auto& welcome = std::get<Welcome>(command);
    const HeartbeatKeys::Issued issued = parts_->keys->Issue(server());
    welcome.heartbeat_key_id = issued.id;
    welcome.heartbeat_key = issued.key;
    Send(ToMessage(effect.header, command));
  }

  // Ends the stream once what was sent before has left.
  void Close() { End(Aborted("the controller closed the session")); }
  void Cancel() { guard_.Cancel(); }

  ServerId server() {
    std::lock_guard lock(mutex_);
    return server_;
  }
  bool MuteSince(Instant limit) {
    std::lock_guard lock(mutex_);
    return !connected_ && opened_ < limit;
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      ReportEnd();
      End(OkStatus());
      return;
    }
    const Status status = Accept();
    if (!status.ok()) {
      ReportEnd();
      End(status);
      return;
    }
    incoming_.Clear();
    StartRead(&incoming_);
  }

  Status Accept() {
    EVERSTEP_ASSIGN_OR_RETURN(FromAgent body, FromMessage(incoming_));
    if (auto* hello = std::get_if<AgentHello>(&body)) {
      {
        std::lock_guard lock(mutex_);
        if (connected_) return InvalidArgument("hello: was said already on this stream");
        connected_ = true;
        server_ = hello->inventory.server;
      }
      return Post(AgentConnected{id_, std::move(*hello)});
    }
    {
      std::lock_guard lock(mutex_);
      if (!connected_) return InvalidArgument("hello: must be the first message of a stream");
    }
    if (auto* fact = std::get_if<SequencedFact>(&body)) {
      return Post(FactReceived{id_, fact->sequence, std::move(fact->fact)});
    }
    auto& heartbeat = std::get<Heartbeat>(body);
    if (heartbeat.server != server()) return InvalidArgument("heartbeat.server: is not the one that said hello");
    return Post(HeartbeatReceived{std::move(heartbeat)});
  }

  Status Post(Event event) {
    if (parts_->loop->Post(std::move(event))) return OkStatus();
    return Unavailable("the controller is stopping");
  }

  void OnWriteDone(bool ok) override {
    bool start = false;
    bool finish = false;
    Status status;
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      if (!ok) outgoing_.clear();
      start = TakeNext();
      finish = !start && TakeFinish(&status);
    }
    if (start) StartWrite(&writing_message_);
    if (finish) Finish(ToGrpc(status));
  }

  void OnCancel() override {
    ReportEnd();
    {
      std::lock_guard lock(mutex_);
      outgoing_.clear();
    }
    End(Status(StatusCode::kCancelled, "the stream was reset"));
  }

  void OnDone() override {
    guard_.Done();
    ReportEnd();
    owner_->Remove(id_);  // the last use of this object
  }

  // Moves the next command in place. REQUIRES: mutex_ is held. True: the caller must write it, without the mutex.
  bool TakeNext() {
    if (writing_ || outgoing_.empty()) return false;
    writing_ = true;
    writing_message_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    return true;
  }

  // REQUIRES: mutex_ is held. True, once: the caller must finish with `status`, without the mutex.
  bool TakeFinish(Status* status) {
    if (!ending_ || finished_ || writing_ || !outgoing_.empty()) return false;
    finished_ = true;
    *status = end_status_;
    return true;
  }

  void End(Status status) {
    bool finish = false;
    {
      std::lock_guard lock(mutex_);
      if (!ending_) {
        ending_ = true;
        end_status_ = std::move(status);
      }
      finish = TakeFinish(&status);
    }
    if (finish) Finish(ToGrpc(status));
  }

  // Tells the loop, once, that the stream is gone. Never called on the loop's thread.
  void ReportEnd() {
    {
      std::lock_guard lock(mutex_);
      if (!connected_ || reported_) return;
      reported_ = true;
    }
    parts_->loop->Post(AgentDisconnected{id_});
  }

  const SessionId id_;
  AgentSessions* const owner_;
  const RpcServer::Parts* const parts_;
  CancelGuard guard_;
  const Instant opened_ = SystemNow().instant;
  v1::AgentMessage incoming_;
  v1::ControllerMessage writing_message_;

  std::mutex mutex_;
  std::deque<v1::ControllerMessage> outgoing_;
  ServerId server_;
  Status end_status_;
  bool connected_ = false;  // hello was said
  bool reported_ = false;   // the loop knows that the stream is gone
  bool writing_ = false;
  bool ending_ = false;     // nothing more is queued; finish when the queue is empty
  bool finished_ = false;
};

namespace {

// Answers a stream that can't be served.
class RefusedSession : public grpc::ServerBidiReactor<v1::AgentMessage, v1::ControllerMessage> {
 public:
  explicit RefusedSession(const Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerBidiReactor<v1::AgentMessage, v1::ControllerMessage>* AgentSessions::Session(
    grpc::CallbackServerContext* context) {
  const RpcServer::Parts* parts = parts_.load();
  if (parts == nullptr) return new RefusedSession(Unavailable("the controller is starting"));
  std::shared_ptr<AgentSession> session;
  {
    std::lock_guard lock(mutex_);
    if (cancelled_) return new RefusedSession(Unavailable("the controller is stopping"));
    CancelMute(SystemNow().instant);
    if (sessions_.size() >= options_.sessions_max) {
      return new RefusedSession(ResourceExhausted("servers_max: too many agents are connected"));
    }
    const SessionId id(++newest_);
    session = std::make_shared<AgentSession>(id, this, parts, context);
    sessions_[id] = session;
  }
  ++count_;
  session->Begin();
  return session.get();
}

void AgentSessions::CancelMute(Instant now) {
  if (now - swept_ < kSweepInterval) return;
  swept_ = now;
  for (const auto& [id, session] : sessions_) {
    if (session->MuteSince(now - kHelloTimeout)) session->Cancel();
  }
}

std::shared_ptr<AgentSession> AgentSessions::Find(SessionId id) {
  std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second;
}

void AgentSessions::Remove(SessionId id) {
  std::shared_ptr<AgentSession> removed;
  {
    std::lock_guard lock(mutex_);
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    removed = std::move(found->second);
    sessions_.erase(found);
  }
  --count_;
}

void AgentSessions::Send(const SendCommand& effect) {
  const auto session = Find(effect.session);
  if (session == nullptr) return;  // its end has been, or will be, told
  if (std::holds_alternative<Welcome>(effect.command)) {
    session->SendWelcome(effect);
  } else {
    session->Send(ToMessage(effect.header, effect.command));
  }
}

void AgentSessions::Close(const CloseSession& effect) {
  if (const auto session = Find(effect.session)) session->Close();
}

void AgentSessions::CancelAll() {
  std::map<SessionId, std::shared_ptr<AgentSession>> sessions;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    sessions = sessions_;
  }
  for (const auto& [id, session] : sessions) session->Cancel();
}

}  // namespace everstep
