// SocketTransport: the links of one communicator and how messages and streams move over them, by
// the thread that asks: try the socket, and only when it would block, poll it together with two
// more descriptors: the abort event, and an epoll set that watches *all* links for their end, so
// that any peer's death is seen at once.
//
// How a link ends says why. A rank that leaves in good order, or that aborts with nothing
// half-sent, sends one urgent byte before it closes; a peer that just vanishes sends none.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "worker/collective/abort_source.h"
#include "worker/collective/host/mesh_connector.h"
#include "worker/collective/transport.h"

namespace everstep::collective {

class SocketTransport : public Transport {
 public:
  // `links` are those made so far; others are made through `connector` on demand.
  SocketTransport(int32_t rank, int32_t size, Duration operation_timeout,
                  std::unique_ptr<MeshConnector> connector, std::map<int32_t, Descriptor> links);
  ~SocketTransport() override;

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  void Begin(MessageTag tag) override;
  Status Exchange(const Outgoing& out, const Incoming& in) override;
  Status Stream(const StreamPlan& plan) override;
  Status CheckHealth() override;
  void Shutdown() override;
  void Leave() override;
  std::optional<int32_t> failed_peer() const override;

  // Readable after Shutdown; cancels a group creation.
  int shutdown_fd() const { return shutdown_.fd(); }

 private:
  struct Link;
  struct Header;
  class StreamRun;

  Status LinkTo(int32_t peer, Link*& link);
  Status Adopt(int32_t peer, Descriptor socket);
  Header MakeHeader(Link& link, size_t bytes) const;
  Status CheckHeader(const Header& header, Link& link, size_t bytes) const;
  Status SendSome(Link& link, const void* header, size_t header_bytes, const void* data,
                  size_t bytes, size_t& sent);
  Status ReceiveSome(Link& link, void* data, size_t bytes, size_t& got);
  Status Wait(const Link* readable, const Link* writable);
  Status DrainWatch();
  Status LinkFailed(Link& link, const char* what);

  const int32_t rank_;
  const int32_t size_;
  const Duration operation_timeout_;
  std::unique_ptr<MeshConnector> connector_;
  AbortSource shutdown_;
  Descriptor watch_;  // epoll set of all links, for their end only
  MessageTag tag_;
  Duration deadline_{};  // zero until the operation first waits
  std::vector<std::byte> scratch_;

  // Guards the list against Shutdown; only the operation's thread changes it. Links are never moved
  // or closed while the transport lives, so that a descriptor number in use cannot be reused.
  mutable std::mutex links_mutex_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null: none yet
  std::atomic<int32_t> failed_peer_{kNobody};
};

}  // namespace everstep::collective
