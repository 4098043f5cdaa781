// MeshListener: the one listening socket of a rank process, alive for as long as the process, so
// that its address is known before any generation exists. It reads the first message of each
// connection and hands the connection to the mesh that it names; strangers and stale generations
// are closed and counted and disturb nobody. A connection for a generation that this process has
// not heard of yet is parked for a while.
//
// Thread-safe; owns one thread (Asio) that only accepts and reads first messages.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "proto/base/time.h"
#include "worker/collective/host/descriptor.h"
#include "worker/collective/types.h"

namespace everstep::collective {

using MeshToken = std::array<std::byte, 16>;

inline constexpr size_t kJobUidBytesMax = 256;

// What happened to connections that were not handed to a mesh.
struct MeshListenerCounters {
  uint64_t accepted = 0;         // connections handed to a mesh
  uint64_t parked = 0;           // put aside for a generation that was not known yet
  uint64_t refused_stale = 0;    // generation below the newest one
  uint64_t refused_foreign = 0;  // another job, a wrong token, a wrong rank
  uint64_t refused_garbage = 0;  // not our protocol, or silent
  uint64_t refused_limit = 0;    // too many at once
};

// A mesh as the listener sees it: what it expects, and where its connections go. Thread-safe.
class MeshEndpoint {
 public:
  MeshEndpoint(JobUid job_uid, Generation generation, GroupId group, const MeshToken& token,
               int32_t rank, int32_t size);

  const JobUid job_uid;
  const Generation generation;
  const GroupId group;
  const int32_t rank;
  const int32_t size;

  bool TokenMatches(const MeshToken& token) const;  // in constant time
  // Takes over an accepted connection whose first message was checked, and acknowledges it. The
  // newest wins.
  void Offer(int32_t from, Descriptor connection);
  // The connection accepted from a peer, if there is one that is still open.
  Descriptor Take(int32_t from);
  // Readable when something was offered since the last ClearEvent.
  int event_fd() const { return event_.get(); }
  void ClearEvent();

 private:
  const MeshToken token_;
  Descriptor event_;
  std::mutex mutex_;
  std::map<int32_t, Descriptor> offered_;  // guarded by mutex_
};

class MeshListener {
 public:
  struct Options {
    // Where to listen: a numeric address or the name of an interface; port 0 lets the kernel
    // choose.
    std::string interface = "127.0.0.1";
    uint16_t port = 0;
    // The host that peers are told when it is not the listening one (which is so for 0.0.0.0).
    std::string advertised_host = "";
    Duration first_message_timeout = Seconds(5);
    Duration parked_timeout = Seconds(60);
    size_t waiting_max = 512;  // connections whose first message is not complete
    size_t parked_max = 1024;
  };
  // kInvalidArgument: no such interface or address. kUnavailable: cannot listen there.
  static Result<std::shared_ptr<MeshListener>> Create(const Options& options);
  ~MeshListener();

  const std::string& address() const { return address_; }  // "host:port"
  MeshListenerCounters counters() const;

  // Used by ConnectMesh. Registering a generation makes lower ones of the job stale.
  // kAborted: a higher generation of the job was registered. kAlreadyExists: this group of it is
  // registered.
  Status Register(std::shared_ptr<MeshEndpoint> endpoint);
  void Unregister(const MeshEndpoint& endpoint);

 private:
  class Acceptor;
  MeshListener() = default;

  std::string address_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace everstep::collective
