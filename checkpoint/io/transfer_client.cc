#include "checkpoint/io/transfer_client.h"

#include "checkpoint/io/tcp.h"  // first of all that includes Asio

#include <unistd.h>

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "checkpoint/store/digest.h"

namespace everstep::checkpoint {
namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr size_t kPartBytes = 1u << 20;  // hashed while it is still in the cache

// One connection whose operations block, each with its own deadline.
class Connection {
 public:
  Connection(std::string address, std::stop_token stop)
      : address_(std::move(address)), stop_(std::move(stop)), socket_(io_), timer_(io_) {}

  Status Connect(Duration timeout, Duration user_timeout) {
    EVERSTEP_ASSIGN_OR_RETURN(const tcp::endpoint endpoint, ResolveEndpoint(address_));
    EVERSTEP_ASSIGN_OR_RETURN(const int fd, OpenTcpSocket(endpoint.protocol()));
    error_code error;
    socket_.assign(endpoint.protocol(), fd, error);
    if (error) {
      close(fd);
      return Unavailable(fmt::format("connect to {}: {}", address_, error.message()));
    }
    TuneTcpSocket(fd, user_timeout);
    return Await(timeout, "connect to", [&](auto done) {
      socket_.async_connect(endpoint, [done](error_code result) { done(result); });
    });
  }

  Status Write(std::string_view bytes, Duration timeout) {
    return Await(timeout, "write to", [&](auto done) {
      asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()),
                        [done](error_code result, size_t) { done(result); });
    });
  }

  Status Read(void* out, size_t bytes, Duration timeout) {
    return Await(timeout, "read from", [&](auto done) {
      asio::async_read(socket_, asio::buffer(out, bytes), [done](error_code result, size_t) { done(result); });
    });
  }

 private:
  // Starts an operation and waits for it; the deadline and the stop token end it by closing the socket, so that the
  // operation always completes before this returns.
  template <typename Start>
  Status Await(Duration timeout, const char* what, Start start) {
    if (stop_.stop_requested()) return Status(StatusCode::kCancelled, "stopped");
    bool finished = false;
    bool late = false;
    error_code outcome;
    timer_.expires_after(timeout);
    timer_.async_wait([&](error_code error) {
      if (error || finished) return;
      late = true;
      Close();
    });
    start([&](error_code error) {
      outcome = error;
      finished = true;
      timer_.cancel();
    });
    {
      const std::stop_callback on_stop(stop_, [this] { asio::post(io_, [this] { Close(); }); });
      io_.restart();
      io_.run();
    }
    if (stop_.stop_requested()) return Status(StatusCode::kCancelled, "stopped");
    if (late) {
      return DeadlineExceeded(fmt::format("{} {}: nothing for {} ms", what, address_,
                                          static_cast<int64_t>(ToMilliseconds(timeout))));
    }
    if (outcome) return Unavailable(fmt::format("{} {}: {}", what, address_, outcome.message()));
    return OkStatus();
  }

  void Close() {
    error_code ignored;
    socket_.close(ignored);
  }

  const std::string address_;
  const std::stop_token stop_;
  asio::io_context io_{1};
  tcp::socket socket_;
  asio::steady_timer timer_;
};

Result<TransferResponse> ReadResponse(Connection& connection, const std::string& address, SnapshotTier tier,
                                      const FetchOptions& options) {
  std::array<char, kTransferFrameBytes> frame{};
  const Duration timeout = tier == SnapshotTier::kStored ? options.stored_answer_timeout : options.answer_timeout;
  EVERSTEP_RETURN_IF_ERROR(connection.Read(frame.data(), frame.size(), timeout));
  const Result<size_t> body_bytes = DecodeResponseFrame({frame.data(), frame.size()});
  if (!body_bytes.ok()) return Internal(fmt::format("{}: {}", address, body_bytes.status().message()));
  std::string body(*body_bytes, '\0');
  EVERSTEP_RETURN_IF_ERROR(connection.Read(body.data(), body.size(), options.stall_timeout));
  Result<TransferResponse> response = DecodeResponseBody(body);
  if (!response.ok()) return Internal(fmt::format("{}: {}", address, response.status().message()));
  return response;
}

}  // namespace

Result<FetchedSnapshot> FetchSnapshot(const std::string& address, const TransferRequest& request,
                                      const FetchOptions& options, std::stop_token stop,
                                      FetchProgress* progress) {
  Connection connection(address, std::move(stop));
  EVERSTEP_RETURN_IF_ERROR(connection.Connect(options.connect_timeout, options.stall_timeout));
  if (progress != nullptr) progress->connected = true;
  EVERSTEP_RETURN_IF_ERROR(connection.Write(EncodeTransferRequest(request), options.stall_timeout));
  EVERSTEP_ASSIGN_OR_RETURN(TransferResponse response, ReadResponse(connection, address, request.tier, options));
  if (!response.status.ok()) return response.status;
  const SnapshotInfo& info = response.info;
  if (info.state != request.state || info.shard != request.shard) {
    return Internal(fmt::format("{} answered with another snapshot than the one asked for", address));
  }
  if (request.digest != Digest128{} && info.digest != request.digest) {
    return FailedPrecondition(fmt::format("{} holds another content of step {}: digest {} instead of {}", address,
                                          info.state.step.value, DigestText(info.digest),
                                          DigestText(request.digest)));
  }
  if (info.bytes > options.bytes_max) {
    return ResourceExhausted(fmt::format("{} offers a snapshot of {} bytes, at most {} are taken", address,
                                         info.bytes, options.bytes_max));
  }
  EVERSTEP_ASSIGN_OR_RETURN(std::shared_ptr<MemoryRegion> region, MemoryRegion::Create(info.bytes));
  const std::span<std::byte> out = region->writable();
  Digester digester;
  for (size_t at = 0; at < out.size(); at += kPartBytes) {
    const std::span<std::byte> part = out.subspan(at, std::min(kPartBytes, out.size() - at));
    EVERSTEP_RETURN_IF_ERROR(connection.Read(part.data(), part.size(), options.stall_timeout));
    digester.Add(part);
  }
  if (digester.Finish() != info.digest) {
    return DataLoss(fmt::format("step {} from {} does not match its digest", info.state.step.value, address));
  }
  EVERSTEP_RETURN_IF_ERROR(region->Seal());
  return FetchedSnapshot{info, std::move(response.tensors), std::move(region)};
}

}  // namespace everstep::checkpoint
