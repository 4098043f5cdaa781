#include "worker/io/heartbeat_sender.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/model/heartbeat_codec.h"
#include "worker/io/socket_address.h"

namespace everstep {

HeartbeatSender::HeartbeatSender(EventLoop& loop, ServerId server, std::function<Heartbeat()> make)
    : loop_(loop), server_(std::move(server)), make_(std::move(make)) {}

HeartbeatSender::~HeartbeatSender() { Stop(); }

Status HeartbeatSender::Start(const Welcome& welcome) {
  Stop();
  EVERSTEP_ASSIGN_OR_RETURN(const SocketAddress to, ResolveAddress(welcome.heartbeat_address, SOCK_DGRAM));
  UniqueFd fd(socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || connect(fd.get(), to.get(), to.size) != 0) {
    return Unavailable("cannot send heartbeats to " + welcome.heartbeat_address + ": " + strerror(errno));
  }
  welcome_ = welcome;
  constexpr Duration kIntervalMin = Milliseconds(10);
  welcome_.heartbeat_interval = std::max(welcome_.heartbeat_interval, kIntervalMin);
  socket_ = std::move(fd);
  Beat();
  return OkStatus();
}

void HeartbeatSender::Stop() {
  if (timer_) loop_.Cancel(*timer_);
  timer_.reset();
  socket_.Reset();
}

void HeartbeatSender::Beat() {
  Heartbeat heartbeat = make_();
  heartbeat.server = server_;
  heartbeat.sequence = ++sequence_;
  heartbeat.loop_counter = loop_.turns();
  // More processes than fit take turns.
  if (heartbeat.votes.size() > kHeartbeatVotesMax) {
    first_vote_ = (first_vote_ + kHeartbeatVotesMax) % heartbeat.votes.size();
    std::rotate(heartbeat.votes.begin(), heartbeat.votes.begin() + static_cast<ptrdiff_t>(first_vote_),
                heartbeat.votes.end());
  }
  const std::string bytes = EncodeHeartbeat(heartbeat, welcome_.heartbeat_key_id, welcome_.heartbeat_key);
  // A refused or dropped datagram is what the controller's lease is for.
  [[maybe_unused]] const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  timer_ = loop_.At(BootTimeNow() + welcome_.heartbeat_interval, [this] { Beat(); });
}

}  // namespace everstep
