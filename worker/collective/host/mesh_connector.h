// MeshConnector: makes the TCP links of one mesh, all at once and without blocking on any one of
// them, and later the links that operations need on demand. Of each pair the higher rank connects
// and the lower one accepts. Thread-compatible: the rank's thread.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "worker/collective/host/host_communicator.h"
#include "worker/collective/host/socket_util.h"

namespace everstep::collective {

class MeshConnector {
 public:
  // Registers with the listener. kAborted, kAlreadyExists: as MeshListener::Register.
  // kInvalidArgument: an address.
  static Result<std::unique_ptr<MeshConnector>> Create(const MeshOptions& options);
  ~MeshConnector();

  // Links to all `peers`, acknowledged. Gives up when a descriptor of `abort_fds` gets readable
  // (kAborted) or after `timeout` (kDeadlineExceeded).
  Result<std::map<int32_t, Descriptor>> Connect(std::span<const int32_t> peers, Duration timeout,
                                                std::span<const int> abort_fds);

 private:
  struct Attempt;
  MeshConnector() = default;
  void Start(Attempt& attempt);
  void Advance(Attempt& attempt);
  void Retry(Attempt& attempt);

  std::shared_ptr<MeshListener> listener_;
  std::shared_ptr<MeshEndpoint> endpoint_;
  std::vector<SocketAddress> addresses_;
  MeshToken token_{};
  Duration user_timeout_{};
};

}  // namespace everstep::collective
