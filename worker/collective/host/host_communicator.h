// The host backend: collectives over TCP sockets between processes, on the thread that asks for
// them. ConnectMesh makes the world communicator of one generation; called by the rank's training
// thread, cancelled from any thread through an AbortSource.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/collective/abort_source.h"
#include "worker/collective/communicator.h"
#include "worker/collective/host/mesh_listener.h"

namespace everstep::collective {

// Which connections a mesh makes at once. Others are made when an operation first needs them, by
// both its ends.
enum class LinkSet : uint8_t {
  kChord,  // peers at distance 2^k: all that rings, trees, recursive doubling, the barrier and the
           // vote need
  kFullMesh,  // everybody
  kNone,      // nothing: all on demand
};

struct MeshOptions {
  JobUid job_uid;
  Generation generation;
  MeshToken token{};
  Rank rank{0};
  std::vector<std::string>
      addresses;  // listener of each rank, "host:port"; its length is the world size
  std::shared_ptr<MeshListener> listener;
  Duration deadline = Seconds(10);  // for connecting
  Duration operation_timeout =
      Seconds(300);  // backstop of every operation, and of connecting on demand
  LinkSet links = LinkSet::kChord;
  std::vector<std::pair<Rank, Rank>>
      extra_links;  // pairs to connect at once besides; the same list on all ranks
  GroupId group{0};
  AbortSource* abort = nullptr;  // ends a pending ConnectMesh; must outlive the call
};

// Connects to all peers of the link set in parallel and retries until the deadline, so ranks may
// come in any order. On OK all links of this rank carry both ways; that says nothing about links
// between others (use Barrier). kInvalidArgument: options make no sense. kAborted: the abort source
// was triggered, or the listener knows a higher generation. kDeadlineExceeded: the message names
// the missing ranks. kAlreadyExists: this mesh exists already.
Result<std::unique_ptr<Communicator>> ConnectMesh(const MeshOptions& options);

}  // namespace everstep::collective
