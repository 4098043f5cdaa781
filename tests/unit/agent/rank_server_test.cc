// The agent's unix socket, with a client of raw frames in the same process.
#include "worker/io/rank_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace everstep {
namespace {

class RankServerTest : public ::testing::Test {
 protected:
  RankServerTest() : loop_(EventLoop::Create().value()) {
    directory_ = (std::filesystem::temp_directory_path() / "everstep-socket-XXXXXX").string();
    EVERSTEP_CHECK(mkdtemp(directory_.data()) != nullptr);
    server_ = RankServer::Create(*loop_, directory_ + "/agent.sock", [this](AgentEvent event) {
                events_.push_back(std::move(event));
              }).value();
  }
  ~RankServerTest() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }

  UniqueFd Connect() {
    UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, (directory_ + "/agent.sock").c_str());
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  bool RunUntil(const std::function<bool()>& done) {
    bool late = false;
    const auto timer = loop_->At(BootTimeNow() + Seconds(20), [&late] { late = true; });
    loop_->RunWhile([&] { return !late && !done(); });
    loop_->Cancel(timer);
    return !late;
  }
  template <typename T>
  size_t Count() const {
    size_t count = 0;
    for (const AgentEvent& event : events_) count += std::holds_alternative<T>(event) ? 1 : 0;
    return count;
  }
  void SendAll(const UniqueFd& fd, std::string_view bytes) {
    ASSERT_EQ(write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  std::unique_ptr<EventLoop> loop_;
  std::string directory_;
  std::vector<AgentEvent> events_;
  std::unique_ptr<RankServer> server_;
};

TEST_F(RankServerTest, NamesThePeerAndDeliversFramesThatArriveInPieces) {
  const UniqueFd fd = Connect();
  ASSERT_TRUE(RunUntil([this] { return Count<RankSocketOpened>() == 1; }));
  EXPECT_EQ(std::get<RankSocketOpened>(events_[0]).peer_pid, getpid());
  EXPECT_EQ(std::get<RankSocketOpened>(events_[0]).peer_group, getpgid(0));
  RankHello hello;
  hello.process = ProcessId(5);
  hello.mesh_address = "127.0.0.1:9";
  const std::string bytes = EncodeFrame(RankToAgent(hello)) + EncodeFrame(RankToAgent(RankJoin{}));
  SendAll(fd, bytes.substr(0, 7));
  SendAll(fd, bytes.substr(7));
  ASSERT_TRUE(RunUntil([this] { return Count<RankMessageArrived>() == 2; }));
  const auto& first = std::get<RankMessageArrived>(events_[1]).message;
  ASSERT_TRUE(std::holds_alternative<RankHello>(first));
  EXPECT_EQ(std::get<RankHello>(first).process, ProcessId(5));
  EXPECT_TRUE(std::holds_alternative<RankJoin>(std::get<RankMessageArrived>(events_[2]).message));
}

TEST_F(RankServerTest, ClosesAConnectionThatSendsGarbage) {
  for (const std::string& garbage : {std::string(64, '\xff'), std::string("\x03\0\0\0\x77\x77\x77", 7)}) {
    events_.clear();
    const UniqueFd fd = Connect();
    SendAll(fd, garbage);
    ASSERT_TRUE(RunUntil([this] { return Count<RankSocketClosed>() == 1; }));
    EXPECT_EQ(Count<RankMessageArrived>(), 0u);
    char byte = 0;
    EXPECT_LE(read(fd.get(), &byte, 1), 0);
  }
}

TEST_F(RankServerTest, PassesADescriptorWithItsMessage) {
  const UniqueFd fd = Connect();
  ASSERT_TRUE(RunUntil([this] { return Count<RankSocketOpened>() == 1; }));
  const Connection connection = std::get<RankSocketOpened>(events_[0]).connection;
  UniqueFd memory(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(write(memory.get(), "state", 5), 5);
  SnapshotProvided provided;
  provided.bytes = 5;
  provided.from = "s03 staged";
  server_->Send(connection, FenceRank{Generation(3)}, UniqueFd());
  server_->Send(connection, provided, std::move(memory));
  FrameReader reader;
  std::vector<AgentToRank> messages;
  int received = -1;
  while (messages.size() < 2) {
    char bytes[4096];
    iovec data{bytes, sizeof(bytes)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd.get(), &header, 0);
    ASSERT_GT(got, 0);
    if (const cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr) memcpy(&received, CMSG_DATA(item), sizeof(int));
    reader.Append(std::string_view(bytes, static_cast<size_t>(got)));
    for (;;) {
      auto frame = reader.Next();
      ASSERT_TRUE(frame.ok());
      if (!frame->has_value()) break;
      messages.push_back(DecodeAgentToRank(**frame).value());
    }
  }
  EXPECT_TRUE(std::holds_alternative<FenceRank>(messages[0]));
  ASSERT_TRUE(std::holds_alternative<SnapshotProvided>(messages[1]));
  ASSERT_GE(received, 0);
  char content[5];
  EXPECT_EQ(pread(received, content, 5, 0), 5);
  EXPECT_EQ(std::string(content, 5), "state");
  close(received);
}

TEST_F(RankServerTest, WritesWhatWasSentBeforeItCloses) {
  const UniqueFd fd = Connect();
  ASSERT_TRUE(RunUntil([this] { return Count<RankSocketOpened>() == 1; }));
  const Connection connection = std::get<RankSocketOpened>(events_[0]).connection;
  // More than a socket buffer holds, so that the close has to wait for the reader.
  const std::string text(60'000, 'x');
  constexpr int kMessages = 40;
  for (int i = 0; i < kMessages; ++i) server_->Send(connection, StopRank{text}, UniqueFd());
  server_->Close(connection);
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  FrameReader reader;
  int frames = 0;
  bool ended = false;
  ASSERT_TRUE(RunUntil([&] {
    char bytes[65536];
    ssize_t got = 0;
    while ((got = read(fd.get(), bytes, sizeof(bytes))) > 0) {
      reader.Append(std::string_view(bytes, static_cast<size_t>(got)));
      while (reader.Next().value().has_value()) ++frames;
    }
    ended = got == 0;
    return ended;
  }));
  EXPECT_EQ(frames, kMessages);
  EXPECT_EQ(Count<RankSocketClosed>(), 0u);
}

TEST_F(RankServerTest, DropsAReaderThatIsTooSlow) {
  const UniqueFd fd = Connect();
  ASSERT_TRUE(RunUntil([this] { return Count<RankSocketOpened>() == 1; }));
  const Connection connection = std::get<RankSocketOpened>(events_[0]).connection;
  const StopRank message{std::string(60'000, 'x')};
  for (int i = 0; i < 2000 && Count<RankSocketClosed>() == 0; ++i) server_->Send(connection, message, UniqueFd());
  EXPECT_EQ(Count<RankSocketClosed>(), 1u);
}

TEST_F(RankServerTest, DrainsWhatArrivedBeforeADeath) {
  {
    const UniqueFd fd = Connect();
    SendAll(fd, EncodeFrame(RankToAgent(RankFinished{})));
  }
  ASSERT_TRUE(RunUntil([this] { return Count<RankSocketOpened>() == 1; }));
  server_->DrainAll();
  EXPECT_EQ(Count<RankMessageArrived>(), 1u);
  EXPECT_EQ(Count<RankSocketClosed>(), 1u);
}

}  // namespace
}  // namespace everstep
