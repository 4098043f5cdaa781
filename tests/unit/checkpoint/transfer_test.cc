// Both ends of a transfer over real sockets, and each end against one that misbehaves.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/io/transfer_client.h"
#include "checkpoint/io/transfer_server.h"
#include "checkpoint/store/record_codec.h"
#include "tests/unit/checkpoint/snapshot_samples.h"

namespace everstep::checkpoint {
namespace {

const JobUid kJob("job-1");

class BytesPin final : public PinnedBytes {
 public:
  explicit BytesPin(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  std::span<const std::byte> bytes() const override { return bytes_; }
  Status Check() const override {
    ++checks;
    return checks > changes_after ? Aborted("changed") : OkStatus();
  }
  mutable std::atomic<int> checks{0};
  int changes_after = 1 << 30;

 private:
  std::vector<std::byte> bytes_;
};

// Serves one sample with the fences of an agent that knows generation 5.
class FakeSource final : public TransferSource {
 public:
  explicit FakeSource(Sample sample) : sample(std::move(sample)) {
    pin = std::make_shared<BytesPin>(this->sample.bytes);
  }
  void OpenTransfer(const TransferRequest& request, std::function<void(OpenedTransfer)> done) override {
    {
      const std::lock_guard lock(mutex);
      requests.push_back(request);
    }
    OpenedTransfer opened;
    opened.response.generation = Generation(5);
    if (request.generation.value != 0 && request.generation.value < 5) {
      opened.response.status = Aborted("generation 5 is known here");
    } else if (request.generation.value > 5) {
      opened.response.status = Unavailable("generation 5 is known here");
    } else if (request.state != sample.info.state) {
      opened.response.status = NotFound("no such snapshot");
    } else {
      opened.response.info = sample.info;
      opened.response.tensors = sample.tensors;
      opened.pin = pin;
    }
    done(std::move(opened));
  }
  Sample sample;
  std::shared_ptr<BytesPin> pin;
  std::mutex mutex;
  std::vector<TransferRequest> requests;
};

TransferRequest RequestFor(const Sample& sample, uint64_t generation = 5) {
  return {kJob, Generation(generation), sample.info.state, sample.info.shard, SnapshotTier::kStaged, {}};
}

FetchOptions Quick() {
  FetchOptions options;
  options.connect_timeout = Seconds(2);
  options.answer_timeout = Seconds(2);
  options.stall_timeout = Seconds(2);
  return options;
}

class TransferTest : public testing::Test {
 protected:
  void Serve(TransferServer::Options options = {}) {
    auto started = TransferServer::Start(options, source_);
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    server_ = std::move(*started);
  }
  std::string address() const { return fmt::format("127.0.0.1:{}", server_->port()); }

  FakeSource source_{SampleOf(10, RandomBytes(1, 3 * kChunkBytes + 11))};
  std::unique_ptr<TransferServer> server_;
};

TEST_F(TransferTest, DeliversASnapshotWholeAndSealed) {
  Serve();
  const auto fetched = FetchSnapshot(address(), RequestFor(source_.sample), Quick());
  ASSERT_TRUE(fetched.ok()) << fetched.status().ToString();
  EXPECT_EQ(fetched->info, source_.sample.info);
  EXPECT_EQ(fetched->tensors, source_.sample.tensors);
  EXPECT_TRUE(std::equal(fetched->region->bytes().begin(), fetched->region->bytes().end(),
                         source_.sample.bytes.begin(), source_.sample.bytes.end()));
  EXPECT_TRUE(fetched->region->sealed());
  EXPECT_NE(write(fetched->region->fd().get(), "x", 1), 1);  // the kernel refuses
  EXPECT_EQ(server_->bytes_sent(), source_.sample.bytes.size());
  const std::lock_guard lock(source_.mutex);
  ASSERT_EQ(source_.requests.size(), 1u);
  EXPECT_EQ(source_.requests[0], RequestFor(source_.sample));
}

TEST_F(TransferTest, DeliversAnEmptySnapshot) {
  source_.sample = SampleOf(10, {});
  source_.pin = std::make_shared<BytesPin>(std::vector<std::byte>());
  Serve();
  const auto fetched = FetchSnapshot(address(), RequestFor(source_.sample), Quick());
  ASSERT_TRUE(fetched.ok()) << fetched.status().ToString();
  EXPECT_TRUE(fetched->region->bytes().empty());
}

TEST_F(TransferTest, AStaleGenerationIsFinalAndAHigherOneTriesAgain) {
  Serve();
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample, 4), Quick()).status().code(), StatusCode::kAborted);
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample, 6), Quick()).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(server_->requests_refused(), 2u);
}

TEST_F(TransferTest, SaysWhatItDoesNotHold) {
  Serve();
  TransferRequest request = RequestFor(source_.sample);
  request.state.step = Step(11);
  EXPECT_EQ(FetchSnapshot(address(), request, Quick()).status().code(), StatusCode::kNotFound);
}

TEST_F(TransferTest, AChangeOfTheSourceEndsTheTransfer) {
  source_.pin->changes_after = 2;
  Serve();
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample), Quick()).status().code(), StatusCode::kUnavailable);
  EXPECT_LT(server_->bytes_sent(), source_.sample.bytes.size());
}

TEST_F(TransferTest, AFlippedBitIsFoundByTheReader) {
  std::vector<std::byte> bytes = source_.sample.bytes;
  bytes[kChunkBytes + 3] ^= std::byte{4};
  source_.pin = std::make_shared<BytesPin>(bytes);
  Serve();
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample), Quick()).status().code(), StatusCode::kDataLoss);
}

TEST_F(TransferTest, ASizeThatIsNotTheOneAnnouncedIsNotASnapshot) {
  std::vector<std::byte> bytes = source_.sample.bytes;
  bytes.pop_back();
  source_.pin = std::make_shared<BytesPin>(bytes);
  Serve();
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample), Quick()).status().code(), StatusCode::kUnavailable);
}

TEST_F(TransferTest, RefusesMoreBytesThanAllowed) {
  Serve();
  FetchOptions options = Quick();
  options.bytes_max = 1000;
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample), options).status().code(),
            StatusCode::kResourceExhausted);
}

TEST_F(TransferTest, AnUnexpectedDigestIsNotTaken) {
  Serve();
  TransferRequest request = RequestFor(source_.sample);
  request.digest = {1, 2};
  EXPECT_EQ(FetchSnapshot(address(), request, Quick()).status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(TransferTest, ManyReadersAtOnceAllGetTheirBytes) {
  TransferServer::Options options;
  options.threads = 2;
  Serve(options);
  std::atomic<int> good{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 8; ++i) {
    readers.emplace_back([&] { good += FetchSnapshot(address(), RequestFor(source_.sample), Quick()).ok(); });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(good.load(), 8);
}

TEST_F(TransferTest, OneReaderTooManyIsToldToTryAgain) {
  TransferServer::Options options;
  options.sessions_max = 0;
  Serve(options);
  EXPECT_EQ(FetchSnapshot(address(), RequestFor(source_.sample), Quick()).status().code(), StatusCode::kUnavailable);
  EXPECT_GE(server_->requests_refused(), 1u);
}

TEST_F(TransferTest, AKilledServerEndsItsTransfers) {
  Serve();
  const std::string where = address();
  server_.reset();
  EXPECT_EQ(FetchSnapshot(where, RequestFor(source_.sample), Quick()).status().code(), StatusCode::kUnavailable);
}

TEST_F(TransferTest, APortInUseIsSaid) {
  Serve();
  TransferServer::Options options;
  options.address = address();
  const auto second = TransferServer::Start(options, source_);
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(address()), std::string::npos);
}

TEST_F(TransferTest, BadAddressesAreRefused) {
  for (const char* bad : {"", "host", "127.0.0.1:", "127.0.0.1:99999", ":80", "127.0.0.1:80x"}) {
    EXPECT_EQ(FetchSnapshot(bad, RequestFor(source_.sample), Quick()).status().code(), StatusCode::kInvalidArgument)
        << bad;
  }
}

TEST_F(TransferTest, NoDescriptorIsInheritedByChildren) {
  Serve();
  const auto fetched = FetchSnapshot(address(), RequestFor(source_.sample), Quick());
  ASSERT_TRUE(fetched.ok());
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    if (fd <= 2) continue;
    const int flags = fcntl(fd, F_GETFD);
    if (flags < 0) continue;  // the directory's own, closed by now
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.find("socket:") == std::string::npos && target.find("memfd:") == std::string::npos) continue;
    EXPECT_NE(flags & FD_CLOEXEC, 0) << target;
  }
}

// ---- against a peer that misbehaves

// A listener that hands each accepted connection to a function on its own thread.
class RawServer {
 public:
  explicit RawServer(std::function<void(int)> serve) : serve_(std::move(serve)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&any), sizeof(any)), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    socklen_t size = sizeof(any);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&any), &size), 0);
    port_ = ntohs(any.sin_port);
    thread_ = std::thread([this] {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) return;
      serve_(fd);
      close(fd);
    });
  }
  ~RawServer() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }

 private:
  std::function<void(int)> serve_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::thread thread_;
};

void SendAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}
void ReadSome(int fd) {
  char buffer[4096];
  (void)!read(fd, buffer, sizeof(buffer));
}
// Waits until the other side closes.
void ReadToEnd(int fd) {
  char buffer[4096];
  while (read(fd, buffer, sizeof(buffer)) > 0) {
  }
}

Status FetchFrom(const RawServer& server, const Sample& sample, FetchOptions options = Quick()) {
  return FetchSnapshot(server.address(), RequestFor(sample), options).status();
}

TEST(TransferClient, GarbageForAnAnswerIsAProtocolError) {
  const Sample sample = SampleOf(10, RandomBytes(1, 1000));
  RawServer server([](int fd) {
    ReadSome(fd);
    SendAll(fd, "HTTP/1.1 400 Bad Request\r\n\r\n");
    ReadToEnd(fd);
  });
  EXPECT_EQ(FetchFrom(server, sample).code(), StatusCode::kInternal);
}

TEST(TransferClient, AnAnswerThatClaimsTooMuchIsRefusedBeforeItIsRead) {
  const Sample sample = SampleOf(10, RandomBytes(1, 1000));
  RawServer server([](int fd) {
    ReadSome(fd);
    RecordWriter frame;
    frame.Put(uint32_t{0x52535645});
    frame.Put(kTransferVersion);
    frame.Put(uint32_t{0xfffffff0});
    SendAll(fd, frame.bytes());
    ReadToEnd(fd);
  });
  EXPECT_EQ(FetchFrom(server, sample).code(), StatusCode::kInternal);
}

TEST(TransferClient, AnAnswerAboutAnotherSnapshotIsRefused) {
  const Sample sample = SampleOf(10, RandomBytes(1, 1000));
  RawServer server([&](int fd) {
    ReadSome(fd);
    TransferResponse response;
    response.info = sample.info;
    response.info.state.step = Step(11);
    SendAll(fd, EncodeTransferResponse(response));
    ReadToEnd(fd);
  });
  EXPECT_EQ(FetchFrom(server, sample).code(), StatusCode::kInternal);
}

TEST(TransferClient, APeerThatDiesInTheMiddleIsUnavailable) {
  const Sample sample = SampleOf(10, RandomBytes(1, 3 * kChunkBytes));
  RawServer server([&](int fd) {
    ReadSome(fd);
    TransferResponse response;
    response.info = sample.info;
    response.tensors = sample.tensors;
    SendAll(fd, EncodeTransferResponse(response));
    SendAll(fd, {reinterpret_cast<const char*>(sample.bytes.data()), kChunkBytes + 100});
  });
  EXPECT_EQ(FetchFrom(server, sample).code(), StatusCode::kUnavailable);
}

TEST(TransferClient, APeerThatFallsSilentMeetsItsDeadline) {
  const Sample sample = SampleOf(10, RandomBytes(1, 1000));
  RawServer server([](int fd) { ReadToEnd(fd); });
  FetchOptions options = Quick();
  options.answer_timeout = Milliseconds(50);
  EXPECT_EQ(FetchFrom(server, sample, options).code(), StatusCode::kDeadlineExceeded);
}

TEST(TransferClient, CanBeStopped) {
  const Sample sample = SampleOf(10, RandomBytes(1, 1000));
  std::stop_source stop;
  RawServer server([&](int fd) {
    ReadSome(fd);
    stop.request_stop();
    ReadToEnd(fd);
  });
  FetchOptions options = Quick();
  options.answer_timeout = Seconds(60);
  EXPECT_EQ(FetchSnapshot(server.address(), RequestFor(sample), options, stop.get_token()).status().code(),
            StatusCode::kCancelled);
}

// ---- a server against a client that misbehaves

int Connect(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  peer.sin_port = htons(port);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  return fd;
}

TEST_F(TransferTest, GarbageRequestsAreDroppedAndTheServerGoesOn) {
  Serve();
  const std::string good = EncodeTransferRequest(RequestFor(source_.sample));
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Prng random(seed);
    std::string bad = good;
    for (uint64_t flips = 1 + random.UpTo(8); flips-- > 0;) {
      bad[random.UpTo(bad.size() - 1)] ^= static_cast<char>(1 + random.UpTo(254));
    }
    const int fd = Connect(server_->port());
    SendAll(fd, bad == good ? "x" : bad);
    shutdown(fd, SHUT_WR);
    ReadToEnd(fd);  // returns: the server closed
    close(fd);
  }
  EXPECT_GE(server_->requests_refused(), 50u);
  const std::lock_guard lock(source_.mutex);
  EXPECT_TRUE(source_.requests.empty());
}

TEST_F(TransferTest, ASilentClientIsClosedAtItsDeadline) {
  TransferServer::Options options;
  options.request_timeout = Milliseconds(50);
  Serve(options);
  const int fd = Connect(server_->port());
  ReadToEnd(fd);
  close(fd);
  EXPECT_TRUE(FetchSnapshot(address(), RequestFor(source_.sample), Quick()).ok());
}

TEST_F(TransferTest, AClientThatNeverReadsDoesNotHoldItsSourceForever) {
  source_.sample = SampleOf(10, RandomBytes(1, 16 * kChunkBytes));
  source_.pin = std::make_shared<BytesPin>(source_.sample.bytes);
  TransferServer::Options options;
  options.stall_timeout = Milliseconds(100);
  Serve(options);
  const int fd = Connect(server_->port());
  SendAll(fd, EncodeTransferRequest(RequestFor(source_.sample)));
  // The pin is let go when the session ends: the source's own and this one remain.
  const std::weak_ptr<BytesPin> watched = source_.pin;
  while (source_.pin->checks == 0) std::this_thread::yield();
  source_.pin.reset();
  while (!watched.expired()) std::this_thread::yield();
  EXPECT_LT(server_->bytes_sent(), source_.sample.bytes.size());
  close(fd);
}

TEST(TransferProtocol, ReadsBackWhatItWroteAndRefusesNoise) {
  const Sample sample = SampleOf(3, RandomBytes(1, 100));
  TransferRequest request = RequestFor(sample);
  request.digest = {5, 6};
  const std::string bytes = EncodeTransferRequest(request);
  const auto size = DecodeRequestFrame(bytes.substr(0, kTransferFrameBytes));
  ASSERT_TRUE(size.ok());
  ASSERT_EQ(*size, bytes.size() - kTransferFrameBytes);
  const auto back = DecodeRequestBody(bytes.substr(kTransferFrameBytes));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(*back, request);

  TransferResponse response;
  response.status = DataLoss("bad copy");
  response.generation = Generation(9);
  const std::string answer = EncodeTransferResponse(response);
  const auto answered = DecodeResponseBody(answer.substr(kTransferFrameBytes));
  ASSERT_TRUE(answered.ok());
  EXPECT_EQ(*answered, response);

  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string bad = bytes;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    const auto frame = DecodeRequestFrame(bad.substr(0, kTransferFrameBytes));
    const bool whole = frame.ok() && *frame == bad.size() - kTransferFrameBytes;
    EXPECT_FALSE(whole && DecodeRequestBody(bad.substr(kTransferFrameBytes)).ok()) << "bit " << bit;
  }
}

TEST(TransferProtocol, ARequestWithoutGenerationOrDigestIsInvalid) {
  TransferRequest request = RequestFor(SampleOf(3, RandomBytes(1, 100)), 0);
  EXPECT_EQ(DecodeRequestBody(EncodeTransferRequest(request).substr(kTransferFrameBytes)).status().code(),
            StatusCode::kInvalidArgument);
  request.digest = {1, 1};
  EXPECT_TRUE(DecodeRequestBody(EncodeTransferRequest(request).substr(kTransferFrameBytes)).ok());
}

}  // namespace
}  // namespace everstep::checkpoint
