#include "worker/io/controller_link.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "everstep/v1/agent.grpc.pb.h"

namespace everstep {
namespace {

// The one place that decides how the agent authenticates the controller.
std::shared_ptr<grpc::ChannelCredentials> Credentials() { return grpc::InsecureChannelCredentials(); }

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target) {
  grpc::ChannelArguments arguments;
  // Each attempt is a connection of its own; waiting between attempts is ours to decide.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);  // also the limit of one connection attempt
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Keepalive only clears dead connections away; failures are detected by heartbeats. The controller allows it.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(target, Credentials(), arguments);
}

}  // namespace

// One stream. Lives until gRPC reports it done; the link waits for that.
class ControllerLink::Session : public grpc::ClientBidiReactor<v1::AgentMessage, v1::ControllerMessage> {
 public:
  Session(EventLoop& loop, ControllerLink* link, uint64_t serial, const std::string& target)
      : loop_(loop), link_(link), serial_(serial), stub_(v1::AgentService::NewStub(MakeChannel(target))) {}

  void Start() {
    stub_->async()->Session(&context_, this);
    AddHold();  // reads and writes are started by the loop: OnDone must wait until no more can be
    StartRead(&incoming_);
    StartCall();
  }

  void Send(v1::AgentMessage message) {
    std::lock_guard lock(mutex_);
    if (broken_) return;
    queue_.push_back(std::move(message));
    if (queue_.size() == 1) StartWrite(&queue_.front());
  }

  void Cancel() { context_.TryCancel(); }

  // Called by the loop after it acted on the message before: at most one is in flight.
  void ReadNext() {
    std::lock_guard lock(mutex_);
    if (broken_) return;
    reading_ = true;
    StartRead(&incoming_);
  }

  // The loop will call ReadNext no more.
  void Abandon() {
    context_.TryCancel();
    std::lock_guard lock(mutex_);
    if (!reading_) Break();
  }

  void WaitDone() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  bool WaitWritten(Duration limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return done_ || broken_ || queue_.empty(); });
  }

 private:
  void OnReadDone(bool ok) override {
    {
      std::lock_guard lock(mutex_);
      reading_ = false;
      if (!ok) Break();
    }
    if (!ok) return;
    auto message = std::make_shared<v1::ControllerMessage>(std::move(incoming_));
    incoming_.Clear();
    loop_.Post([link = link_, serial = serial_, message] { link->OnMessage(serial, *message); });
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    queue_.pop_front();
    // After a failed write the read fails too, and that ends the stream.
    if (!ok || broken_) {
      queue_.clear();
    } else if (!queue_.empty()) {
      StartWrite(&queue_.front());
    }
    changed_.notify_all();
  }

  // No operation is started from here on. REQUIRES: mutex_ held.
  void Break() {
    if (broken_) return;
    broken_ = true;
    RemoveHold();
    changed_.notify_all();
  }

  void OnDone(const grpc::Status& status) override {
    loop_.Post([link = link_, serial = serial_,
                message = status.ok() ? std::string("the controller ended the stream") : status.error_message()] {
      link->OnDone(serial, message);
    });
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  EventLoop& loop_;
  ControllerLink* const link_;
  const uint64_t serial_;
  std::unique_ptr<v1::AgentService::Stub> stub_;
  grpc::ClientContext context_;
  v1::ControllerMessage incoming_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::AgentMessage> queue_;  // guarded by mutex_; the front is being written
  bool reading_ = true;                 // guarded by mutex_; a read is under way
  bool broken_ = false;                 // guarded by mutex_
  bool done_ = false;                   // guarded by mutex_
};

ControllerLink::ControllerLink(EventLoop& loop, ControllerLinkOptions options, Handler handler)
    : loop_(loop),
      options_(std::move(options)),
      handler_(std::move(handler)),
      scatter_(options_.seed),
      backoff_(options_.reconnect_first) {}

ControllerLink::~ControllerLink() {
  if (retry_) loop_.Cancel(*retry_);
  if (session_) {
    session_->Abandon();
    session_->WaitDone();
  }
}

void ControllerLink::Open() {
  wanted_ = true;
  if (!session_ && !retry_) Attempt();
}

void ControllerLink::Attempt() {
  retry_.reset();
  if (!wanted_ || session_) return;
  ++serial_;
  session_ = std::make_shared<Session>(loop_, this, serial_, options_.controller);
  session_->Start();
  handler_.on_up();
}

void ControllerLink::Close(bool reopen) {
  wanted_ = reopen;
  if (retry_ && !reopen) {
    loop_.Cancel(*retry_);
    retry_.reset();
  }
  if (session_) session_->Cancel();
}

void ControllerLink::Send(v1::AgentMessage message) {
  if (session_) session_->Send(std::move(message));
}

void ControllerLink::Finish(Duration limit) {
  wanted_ = false;
  if (session_) session_->WaitWritten(limit);
}

void ControllerLink::OnMessage(uint64_t serial, const v1::ControllerMessage& message) {
  if (serial != serial_ || !session_) return;
  backoff_ = options_.reconnect_first;
  const std::shared_ptr<Session> session = session_;
  handler_.on_message(message);
  session->ReadNext();
}

void ControllerLink::OnDone(uint64_t serial, std::string message) {
  if (serial != serial_ || !session_) return;
  session_->WaitDone();  // it is only setting a flag
  session_.reset();
  if (!wanted_) return;
  handler_.on_down(std::move(message));
  // Scattered, so that the agents of a cluster don't all come back in the same instant.
  const Duration wait = backoff_ + Duration(static_cast<int64_t>(scatter_.UpTo(static_cast<uint64_t>(backoff_.count() / 4))));
  backoff_ = std::min(backoff_ * 2, options_.reconnect_max);
  retry_ = loop_.At(BootTimeNow() + wait, [this] { Attempt(); });
}

}  // namespace everstep
