// Serves snapshots to other agents. Owns a small thread pool; asks a TransferSource for each request. Started by
// SnapshotKeeper. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/io/transfer_protocol.h"
#include "proto/base/status.h"
#include "proto/base/time.h"

namespace everstep::checkpoint {

// Bytes that stay mapped while they are served.
class PinnedBytes {
 public:
  virtual ~PinnedBytes() = default;
  virtual std::span<const std::byte> bytes() const = 0;
  // OK while the bytes are what they were when the transfer began, and may be served. Called before and after each
  // part. Thread-safe.
  virtual Status Check() const = 0;
};

struct OpenedTransfer {
  TransferResponse response;
  std::shared_ptr<PinnedBytes> pin;  // null unless response.status is OK
};

class TransferSource {
 public:
  virtual ~TransferSource() = default;
  // Calls `done` at most once, on any thread, now or later; what it never calls it must destroy before the server is
  // destroyed. Called on the server's threads.
  virtual void OpenTransfer(const TransferRequest& request, std::function<void(OpenedTransfer)> done) = 0;
};

class TransferServer {
 public:
  struct Options {
    std::string address = "127.0.0.1:0";  // port 0: chosen by the kernel
    size_t threads = 1;
    size_t sessions_max = 64;             // one more is closed at once; its reader tries again
    size_t part_bytes = 1u << 20;         // sent between two checks of the pin
    Duration request_timeout = Seconds(5);
    Duration stall_timeout = Seconds(10); // for one part
  };
  // INVALID_ARGUMENT: a bad address. FAILED_PRECONDITION: the port is in use. UNAVAILABLE: it can't be bound.
  static Result<std::unique_ptr<TransferServer>> Start(const Options& options, TransferSource& source);
  ~TransferServer();

  // Ends all transfers; idempotent. No call of the source begins or runs afterwards.
  void Stop();

  uint16_t port() const;
  uint64_t bytes_sent() const;
  uint64_t requests_refused() const;  // garbage, stale generations, too many sessions

 private:
  class Impl;
  explicit TransferServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace everstep::checkpoint
