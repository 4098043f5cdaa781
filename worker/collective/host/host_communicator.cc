#include "worker/collective/host/host_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "worker/collective/engine_communicator.h"
#include "worker/collective/host/mesh_connector.h"
#include "worker/collective/host/socket_transport.h"

namespace everstep::collective {
namespace {

constexpr size_t kWorldSizeMax = 65536;

std::vector<int32_t> PeersOf(const MeshOptions& options) {
  const int32_t rank = options.rank.value;
  const auto size = static_cast<int32_t>(options.addresses.size());
  std::set<int32_t> peers;
  switch (options.links) {
    case LinkSet::kNone: break;
    case LinkSet::kFullMesh:
      for (int32_t peer = 0; peer < size; ++peer) peers.insert(peer);
      break;
    case LinkSet::kChord:
      for (int32_t distance = 1; distance < size; distance *= 2) {
        peers.insert((rank + distance) % size);
        peers.insert((rank - distance + size) % size);
      }
      break;
  }
  for (const auto& [a, b] : options.extra_links) {
    if (a.value == rank) peers.insert(b.value);
    if (b.value == rank) peers.insert(a.value);
  }
  peers.erase(rank);
  return {peers.begin(), peers.end()};
}

Status Validate(const MeshOptions& options) {
  const auto in_world = [&](Rank rank) {
    return rank.value >= 0 && rank.value < static_cast<int32_t>(options.addresses.size());
  };
  if (options.addresses.empty() || options.addresses.size() > kWorldSizeMax)
    return InvalidArgument("bad world size");
  if (!in_world(options.rank))
    return InvalidArgument(fmt::format("rank {} is not in the world", options.rank.value));
  if (options.listener == nullptr) return InvalidArgument("no listener");
  if (options.job_uid.value.size() > kJobUidBytesMax)
    return InvalidArgument("the job uid is too long");
  for (const auto& [a, b] : options.extra_links) {
    if (!in_world(a) || !in_world(b))
      return InvalidArgument("an extra link names a rank that is not in the world");
  }
  return OkStatus();
}

Result<std::unique_ptr<Communicator>> Connect(const MeshOptions& options,
                                              std::vector<int> abort_fds);

class HostCommunicator : public EngineCommunicator {
 public:
  HostCommunicator(MeshOptions options, std::unique_ptr<SocketTransport> transport)
      : EngineCommunicator({options.generation, options.group, {.deterministic = true}},
                           std::move(transport)),
        options_(std::move(options)) {}

  Result<std::unique_ptr<Communicator>> CreateGroup(std::span<const Rank> ranks,
                                                    GroupId id) override {
    MeshOptions options = options_;
    options.addresses.clear();
    options.extra_links.clear();
    options.group = id;
    options.links = LinkSet::kChord;
    bool member = false;
    std::set<Rank> seen;
    for (const Rank rank : ranks) {
      if (rank.value < 0 || rank.value >= world_size() || !seen.insert(rank).second) {
        return InvalidArgument("a group is a list of different ranks of its parent");
      }
      if (rank == this->rank()) {
        member = true;
        options.rank = Rank(static_cast<int32_t>(options.addresses.size()));
      }
      options.addresses.push_back(options_.addresses[static_cast<size_t>(rank.value)]);
    }
    if (!member || id.value == 0)
      return InvalidArgument("a group is created by its members, with an id of its own");
    if (aborted()) return Aborted("communicator aborted: " + abort_reason().message());
    return Connect(options, {static_cast<SocketTransport&>(transport()).shutdown_fd()});
  }

 private:
  const MeshOptions options_;
};

Result<std::unique_ptr<Communicator>> Connect(const MeshOptions& options,
                                              std::vector<int> abort_fds) {
  EVERSTEP_RETURN_IF_ERROR(Validate(options));
  EVERSTEP_ASSIGN_OR_RETURN(std::unique_ptr<MeshConnector> connector,
                            MeshConnector::Create(options));
  const std::vector<int32_t> peers = PeersOf(options);
  using Links = std::map<int32_t, Descriptor>;
  EVERSTEP_ASSIGN_OR_RETURN(Links links, connector->Connect(peers, options.deadline, abort_fds));
  auto transport = std::make_unique<SocketTransport>(
      options.rank.value, static_cast<int32_t>(options.addresses.size()), options.operation_timeout,
      std::move(connector), std::move(links));
  MeshOptions kept = options;
  kept.abort = nullptr;
  return std::unique_ptr<Communicator>(
      std::make_unique<HostCommunicator>(std::move(kept), std::move(transport)));
}

}  // namespace

Result<std::unique_ptr<Communicator>> ConnectMesh(const MeshOptions& options) {
  if (options.abort == nullptr) return Connect(options, {});
  if (options.abort->triggered())
    return Aborted("connecting was aborted: " + options.abort->reason().message());
  return Connect(options, {options.abort->fd()});
}

}  // namespace everstep::collective
