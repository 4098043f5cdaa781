// The UDP socket of heartbeats: a thread reads datagrams in batches, checks and decodes them, and keeps the newest per
// server until the loop takes them. Take may be called from the loop while the thread reads. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "controller/io/heartbeat/heartbeat_keys.h"
#include "controller/io/loop/loop_ports.h"
#include "proto/base/status.h"

namespace everstep {

class HeartbeatReceiver : public HeartbeatSource {
 public:
  // Binds `address` (host:port, port 0: any). kFailedPrecondition: it can't be bound; the message names it.
  static Result<std::unique_ptr<HeartbeatReceiver>> Open(const std::string& address, const HeartbeatKeys* keys);
  ~HeartbeatReceiver() override;

  // Starts reading; `arrived` is called on the reading thread when there is something to take.
  void Start(std::function<void()> arrived);
  void Stop();

  std::vector<Heartbeat> Take(bool drain) override;
  // host:port as bound.
  const std::string& address() const { return address_; }

  // What was thrown away, for metrics.
  struct Counters {
    std::atomic<uint64_t> received{0};      // authentic
    std::atomic<uint64_t> unknown_key{0};   // no evidence of anything: the sender needs a new key
    std::atomic<uint64_t> forged{0};        // wrong code, or a key that belongs to another server
    std::atomic<uint64_t> malformed{0};
    std::atomic<uint64_t> coalesced{0};     // overtaken by a newer one of the same server before the loop came
  };
  const Counters& counters() const { return counters_; }

 private:
  HeartbeatReceiver(int socket, int stop_event, std::string address, const HeartbeatKeys* keys);
  void Run();
  // Reads what waits in the socket; true when there was something. REQUIRES: mutex_ is held.
  bool ReadAll();
  void Accept(std::string_view bytes);

  const int socket_;
  const int stop_event_;
  const std::string address_;
  const HeartbeatKeys* const keys_;
  std::function<void()> arrived_;
  std::thread thread_;
  Counters counters_;
  std::mutex mutex_;
  std::map<ServerId, Heartbeat> newest_;  // guarded by mutex_
};

}  // namespace everstep
