// How the host mesh forms, and whom it keeps out.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "tests/unit/collective/world.h"
#include "worker/collective/host/first_message.h"
#include "worker/collective/host/socket_util.h"

namespace everstep::collective {
namespace {

Descriptor Dial(const std::string& address) {
  const SocketAddress target = *ParseAddress(address);
  Descriptor socket(::socket(target.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&target.storage), target.bytes), 0);
  return socket;
}

void SendAll(const Descriptor& socket, const void* data, size_t bytes) {
  ASSERT_EQ(::send(socket.get(), data, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
}

// Waits for the other side to close; true unless it sent something or ten seconds passed.
bool ClosesWithoutAnswer(const Descriptor& socket) {
  pollfd polled{socket.get(), POLLIN, 0};
  if (::poll(&polled, 1, 10'000) != 1) return false;
  char byte;
  return ::recv(socket.get(), &byte, 1, 0) <= 0;
}

MeshHello GoodHello(uint64_t generation = 1) {
  return {.job_uid = JobUid("job-1"),
          .generation = Generation(generation),
          .group = GroupId(0),
          .from = 1,
          .to = 0,
          .token = TestToken()};
}

TEST(MeshListener, KnowsItsAddressBeforeAnyGeneration) {
  const auto listener = NewListener();
  EXPECT_TRUE(listener->address().starts_with("127.0.0.1:"));
  EXPECT_FALSE(listener->address().ends_with(":0"));
  EXPECT_TRUE((*MeshListener::Create({.interface = "lo"}))->address().starts_with("127.0.0.1:"));
  EXPECT_TRUE((*MeshListener::Create({.interface = "0.0.0.0", .advertised_host = "10.1.2.3"}))
                  ->address()
                  .starts_with("10.1.2.3:"));
  EXPECT_EQ(MeshListener::Create({.interface = "no-such-interface"}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(MeshFirstMessage, SurvivesEncodingAndRefusesOtherVersions) {
  const MeshHello hello = GoodHello(77);
  HelloBytes bytes = EncodeHello(hello);
  const auto decoded = DecodeHello(bytes);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->job_uid, hello.job_uid);
  EXPECT_EQ(decoded->generation, hello.generation);
  EXPECT_EQ(decoded->from, 1);
  EXPECT_EQ(decoded->to, 0);
  EXPECT_EQ(decoded->token, hello.token);
  bytes[8] = std::byte{2};
  EXPECT_FALSE(DecodeHello(bytes).has_value());
}

TEST(HostMesh, RanksThatComeLateAreWaitedFor) {
  HostWorld world(4);
  std::vector<std::unique_ptr<Communicator>> ranks(4);
  // Rank 0 enters only after rank 3's connection has been parked at its listener.
  OnRanks(4, [&](int32_t rank) {
    while (rank == 0 && world.listener(0).counters().parked == 0) std::this_thread::yield();
    auto made = ConnectMesh(world.Options(rank));
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ((*made)->Barrier(), OkStatus());
    ranks[static_cast<size_t>(rank)] = std::move(*made);
  });
  EXPECT_GE(world.listener(0).counters().parked, 1u);
}

TEST(HostMesh, SixteenRanksConnectInParallel) {
  HostWorld world(16);
  const auto start = std::chrono::steady_clock::now();
  auto ranks = world.Connect();
  const auto took = std::chrono::steady_clock::now() - start;
  std::printf("16-rank mesh, threads of one process: %.1f ms\n", ToMilliseconds(took));
  OnRanks(16, [&](int32_t rank) {
    EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus());
  });
  EXPECT_LT(took, Seconds(5));
}

TEST(HostMesh, StaleGenerationIsRefusedAndCounted) {
  HostWorld world(2);
  auto ranks = world.Connect([](MeshOptions& options) { options.generation = Generation(5); });
  const MeshHello stale = GoodHello(4);
  Descriptor intruder = Dial(world.listener(0).address());
  const HelloBytes bytes = EncodeHello(stale);
  SendAll(intruder, bytes.data(), bytes.size());
  EXPECT_TRUE(ClosesWithoutAnswer(intruder));
  EXPECT_EQ(world.listener(0).counters().refused_stale, 1u);

  // A rank that wakes in an old generation cannot even register.
  EXPECT_EQ(ConnectMesh(world.Options(0, 4)).status().code(), StatusCode::kAborted);
  OnRanks(
      2, [&](int32_t rank) { EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus()); });
}

TEST(HostMesh, ParkedConnectionOfAnOldGenerationIsClosedWhenANewerOneStarts) {
  HostWorld world(2);
  Descriptor early = Dial(world.listener(0).address());
  const HelloBytes bytes = EncodeHello(GoodHello(3));
  SendAll(early, bytes.data(), bytes.size());
  while (world.listener(0).counters().parked == 0) std::this_thread::yield();
  auto ranks = world.Connect([](MeshOptions& options) { options.generation = Generation(4); });
  EXPECT_TRUE(ClosesWithoutAnswer(early));
  EXPECT_EQ(world.listener(0).counters().refused_stale, 1u);
  OnRanks(
      2, [&](int32_t rank) { EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus()); });
}

TEST(HostMesh, WrongTokenWrongJobAndWrongRanksAreRefused) {
  HostWorld world(2);
  auto ranks = world.Connect();
  std::vector<MeshHello> strangers(5, GoodHello());
  strangers[0].token = TestToken(8);
  strangers[1].job_uid = JobUid("job-2");
  strangers[2].to = 1;
  strangers[3].from = 2;
  strangers[4].from = 0;
  for (const MeshHello& stranger : strangers) {
    Descriptor socket = Dial(world.listener(0).address());
    const HelloBytes bytes = EncodeHello(stranger);
    SendAll(socket, bytes.data(), bytes.size());
    EXPECT_TRUE(ClosesWithoutAnswer(socket));
  }
  EXPECT_EQ(world.listener(0).counters().refused_foreign, 5u);
  EXPECT_EQ(world.listener(0).counters().accepted, 1u);
  OnRanks(
      2, [&](int32_t rank) { EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus()); });
}

TEST(HostMesh, RankWithAWrongTokenNeverConnects) {
  HostWorld world(2);
  OnRanks(2, [&](int32_t rank) {
    MeshOptions options = world.Options(rank);
    options.deadline = Milliseconds(300);
    if (rank == 1) options.token = TestToken(9);
    const Status status = ConnectMesh(options).status();
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.ToString();
    EXPECT_NE(status.message().find(std::to_string(1 - rank)), std::string::npos)
        << status.ToString();
  });
  EXPECT_GE(world.listener(0).counters().refused_foreign, 1u);
}

TEST(HostMesh, PortScannersDoNotDisturb) {
  HostWorld world(3);
  std::vector<Descriptor> scanners;
  for (int i = 0; i < 20; ++i) scanners.push_back(Dial(world.listener(0).address()));  // silent
  for (const char* text : {"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01", "ES", "ESMESH1\n"}) {
    scanners.push_back(Dial(world.listener(0).address()));
    SendAll(scanners.back(), text, std::strlen(text));
  }
  std::vector<char> noise(4096, '\x5a');
  scanners.push_back(Dial(world.listener(0).address()));
  SendAll(scanners.back(), noise.data(), noise.size());
  auto ranks = world.Connect();
  OnRanks(
      3, [&](int32_t rank) { EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus()); });
  EXPECT_TRUE(ClosesWithoutAnswer(scanners.back()));
  scanners.clear();
  while (world.listener(0).counters().refused_garbage < 25) std::this_thread::yield();
}

TEST(HostMesh, ConnectionsThatStaySilentAreClosedAndTheirNumberIsLimited) {
  auto listener =
      *MeshListener::Create({.first_message_timeout = Milliseconds(50), .waiting_max = 2});
  const Descriptor a = Dial(listener->address());
  const Descriptor b = Dial(listener->address());
  const Descriptor c = Dial(listener->address());
  EXPECT_TRUE(ClosesWithoutAnswer(a));
  EXPECT_TRUE(ClosesWithoutAnswer(b));
  EXPECT_TRUE(ClosesWithoutAnswer(c));
  EXPECT_EQ(listener->counters().refused_limit, 1u);
}

TEST(HostMesh, ConnectsAgainInTheNextGenerationOverTheSameListeners) {
  HostWorld world(3);
  for (uint64_t generation = 1; generation <= 5; ++generation) {
    auto ranks =
        world.Connect([&](MeshOptions& options) { options.generation = Generation(generation); });
    OnRanks(3, [&](int32_t rank) {
      EXPECT_EQ(ranks[static_cast<size_t>(rank)]->Barrier(), OkStatus());
    });
    ranks[1]->Abort(Aborted("next generation"));
  }
}

TEST(HostMesh, TheSameMeshCannotBeConnectedTwice) {
  HostWorld world(1);
  auto first = ConnectMesh(world.Options(0));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ConnectMesh(world.Options(0)).status().code(), StatusCode::kAlreadyExists);
}

TEST(HostMesh, OnlyChordLinksAreMadeAtFirst) {
  HostWorld world(8);
  auto ranks = world.Connect();
  // Rank 0 accepts from all its chord peers: distances 1, 2, 4 both ways, which are five.
  EXPECT_EQ(world.listener(0).counters().accepted, 5u);
  OnRanks(8, [&](int32_t rank) {
    if (rank == 0) {
      EXPECT_EQ(ranks[0]->Send(&rank, 4, DataType::kU8, Rank(3)), OkStatus());
    }
    int32_t got = -1;
    if (rank == 3) {
      EXPECT_EQ(ranks[3]->Receive(&got, 4, DataType::kU8, Rank(0)), OkStatus());
    }
  });
  EXPECT_EQ(world.listener(0).counters().accepted, 6u);
}

TEST(HostMesh, PendingConnectIsAbortedFromAnotherThread) {
  HostWorld world(3);
  AbortSource abort;
  Status status;
  std::chrono::steady_clock::time_point left;
  std::thread waiting([&] {
    MeshOptions options = world.Options(1);  // nobody else ever comes
    options.deadline = Seconds(100);
    options.abort = &abort;
    status = ConnectMesh(options).status();
    left = std::chrono::steady_clock::now();
  });
  while (world.listener(0).counters().parked == 0) std::this_thread::yield();
  const auto aborted = std::chrono::steady_clock::now();
  abort.Trigger(Aborted("generation 2"));
  waiting.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  std::printf("pending connect left %.2f ms after the abort\n", ToMilliseconds(left - aborted));
  EXPECT_LT(left - aborted, Seconds(1));
}

}  // namespace
}  // namespace everstep::collective
