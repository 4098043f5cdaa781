// The keys of heartbeats: one per stream, handed out in Welcome. A key stays valid after its stream broke, so that a
// server whose stream is gone still proves that it lives, until the server gets a new one. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "proto/base/ids.h"
#include "proto/model/heartbeat_codec.h"

namespace everstep {

class HeartbeatKeys {
 public:
  struct Issued { uint64_t id = 0; HeartbeatKey key{}; };
  // A fresh random key for the server; its older key is forgotten. Bounded by `servers_max`: the key of the server that
  // was issued longest ago makes room.
  explicit HeartbeatKeys(size_t servers_max) : servers_max_(servers_max) {}
  Issued Issue(const ServerId& server);

  struct Entry { HeartbeatKey key{}; ServerId server; uint64_t issued = 0; };
  // Null when unknown. The entry is immutable and stays valid while held.
  std::shared_ptr<const Entry> Find(uint64_t id) const;

 private:
  const size_t servers_max_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<const Entry>> by_id_;  // guarded by mutex_
  std::map<ServerId, uint64_t> by_server_;                            // guarded by mutex_
  uint64_t issued_ = 0;                                               // guarded by mutex_
};

}  // namespace everstep
