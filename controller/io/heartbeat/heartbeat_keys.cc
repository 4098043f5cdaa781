#include "controller/io/heartbeat/heartbeat_keys.h"

#include <openssl/rand.h>

#include <algorithm>
#include <cstring>

#include "proto/base/check.h"

namespace everstep {

HeartbeatKeys::Issued HeartbeatKeys::Issue(const ServerId& server) {
  Issued out;
  // Without randomness there is no authentication: better no controller than a guessable one.
  EVERSTEP_CHECK(RAND_bytes(out.key.data(), static_cast<int>(out.key.size())) == 1);
  std::lock_guard lock(mutex_);
  do {
    uint8_t bytes[8];
    EVERSTEP_CHECK(RAND_bytes(bytes, sizeof(bytes)) == 1);
    std::memcpy(&out.id, bytes, sizeof(bytes));
  } while (out.id == 0 || by_id_.contains(out.id));
  const auto old = by_server_.find(server);
  if (old != by_server_.end()) {
    by_id_.erase(old->second);
  } else if (by_server_.size() >= servers_max_) {
    const auto oldest = std::min_element(by_server_.begin(), by_server_.end(), [this](const auto& a, const auto& b) {
      return by_id_.at(a.second)->issued < by_id_.at(b.second)->issued;
    });
    by_id_.erase(oldest->second);
    by_server_.erase(oldest);
  }
  by_id_[out.id] = std::make_shared<const Entry>(Entry{out.key, server, ++issued_});
  by_server_[server] = out.id;
  return out;
}

std::shared_ptr<const HeartbeatKeys::Entry> HeartbeatKeys::Find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

}  // namespace everstep
