// A whole agent against a controller that this test plays: real stream, datagrams, processes and sockets.
#include "worker/io/agent_shell.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "everstep/v1/agent.grpc.pb.h"
#include "proto/convert/agent_convert.h"
#include "proto/model/heartbeat_codec.h"
#include "worker/io/logging.h"

namespace everstep {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);

// One stream at a time; what arrives is kept until somebody waits for it.
class PlayedController : public v1::AgentService::Service {
 public:
  explicit PlayedController(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    EVERSTEP_CHECK(server_ != nullptr);
  }
  ~PlayedController() override { server_->Shutdown(std::chrono::system_clock::now()); }
  int port() const { return port_; }

  grpc::Status Session(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::ControllerMessage, v1::AgentMessage>* stream) override {
    {
      std::lock_guard lock(mutex_);
      stream_ = stream;
      sequence_ = 0;
    }
    v1::AgentMessage message;
    while (stream->Read(&message)) {
      auto parsed = FromMessage(message);
      EXPECT_TRUE(parsed.ok()) << parsed.status().ToString();
      std::lock_guard lock(mutex_);
      if (parsed.ok()) arrived_.push_back(std::move(parsed).value());
      changed_.notify_all();
    }
    std::lock_guard lock(mutex_);
    stream_ = nullptr;
    return grpc::Status::OK;
  }

  void Send(const Command& command) {
    std::lock_guard lock(mutex_);
    ASSERT_NE(stream_, nullptr);
    stream_->Write(ToMessage(CommandHeader{Term(3), CommandSequence(++sequence_)}, command));
  }

  // Takes the first message of this kind that arrives; nullopt after kPatience.
  template <typename T>
  std::optional<T> Wait() {
    std::unique_lock lock(mutex_);
    std::optional<T> found;
    changed_.wait_for(lock, kPatience, [&] {
      for (auto it = arrived_.begin(); it != arrived_.end(); ++it) {
        if constexpr (std::is_same_v<T, AgentHello>) {
          if (auto* hello = std::get_if<AgentHello>(&*it)) found = *hello;
        } else if (auto* sequenced = std::get_if<SequencedFact>(&*it)) {
          if (auto* fact = std::get_if<T>(&sequenced->fact)) found = *fact;
        }
        if (found) {
          arrived_.erase(it);
          return true;
        }
      }
      return false;
    });
    return found;
  }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  grpc::ServerReaderWriter<v1::ControllerMessage, v1::AgentMessage>* stream_ = nullptr;
  uint64_t sequence_ = 0;
  std::vector<FromAgent> arrived_;
};

class AgentShellTest : public ::testing::Test {
 protected:
  AgentShellTest() {
    StartLogging("warn", false);
    root_ = (std::filesystem::temp_directory_path() / "everstep-shell-XXXXXX").string();
    EVERSTEP_CHECK(mkdtemp(root_.data()) != nullptr);
    heartbeats_.Reset(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EVERSTEP_CHECK(bind(heartbeats_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    socklen_t size = sizeof(address);
    getsockname(heartbeats_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    heartbeat_port_ = ntohs(address.sin_port);
    timeval limit{30, 0};
    setsockopt(heartbeats_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    for (size_t i = 0; i < key_.size(); ++i) key_[i] = static_cast<uint8_t>(i * 7);
    controller_ = std::make_unique<PlayedController>();
  }
  ~AgentShellTest() override {
    if (thread_.joinable()) {
      shell_->RequestStop();
      shell_->RequestStop();
      thread_.join();
    }
    shell_.reset();
    controller_.reset();
    std::filesystem::remove_all(root_);
  }

  void StartAgent() {
    AgentShellOptions options;
    options.controller = "127.0.0.1:" + std::to_string(controller_->port());
    options.inventory.server = ServerId("s01");
    options.inventory.failure_domain = "rack1";
    options.inventory.host = "127.0.0.1";
    options.inventory.version = "test";
    options.inventory.devices.resize(1);
    options.root = root_;
    options.seed = 5;
    auto created = AgentShell::Create(std::move(options));
    ASSERT_TRUE(created.ok()) << created.status().ToString();
    shell_ = std::move(created).value();
    thread_ = std::thread([this] { exit_code_ = shell_->Run(); });
  }
  void Greet(std::vector<ProcessId> keep = {}) {
    Welcome welcome;
    welcome.incarnation = Incarnation(4);
    welcome.heartbeat_interval = Milliseconds(20);
    welcome.heartbeat_address = "127.0.0.1:" + std::to_string(heartbeat_port_);
    welcome.heartbeat_key_id = 9;
    welcome.heartbeat_key = key_;
    welcome.keep = std::move(keep);
    controller_->Send(welcome);
  }
  SpawnProcess Spawn(uint64_t process, const std::string& program, std::vector<std::string> arguments = {}) {
    SpawnProcess spawn;
    spawn.job = JobUid("job");
    spawn.process = ProcessId(process);
    spawn.spec.name = "train";
    spawn.spec.program = program;
    spawn.spec.arguments = std::move(arguments);
    spawn.spec.termination_grace = Seconds(1);
    return spawn;
  }
  std::optional<Heartbeat> ReceiveHeartbeat() {
    char bytes[2048];
    const ssize_t got = recv(heartbeats_.get(), bytes, sizeof(bytes), 0);
    if (got <= 0) return std::nullopt;
    auto decoded = DecodeHeartbeat(std::string_view(bytes, static_cast<size_t>(got)),
                                   [this](uint64_t id) { return id == 9 ? &key_ : nullptr; });
    EXPECT_TRUE(decoded.ok()) << decoded.status().ToString();
    if (!decoded.ok()) return std::nullopt;
    return decoded->heartbeat;
  }

  std::string root_;
  UniqueFd heartbeats_;
  int heartbeat_port_ = 0;
  HeartbeatKey key_{};
  std::unique_ptr<PlayedController> controller_;
  std::unique_ptr<AgentShell> shell_;
  std::thread thread_;
  int exit_code_ = -1;
};

TEST_F(AgentShellTest, RegistersRunsAProcessAndReportsItsEnd) {
  StartAgent();
  const auto hello = controller_->Wait<AgentHello>();
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->inventory.server, ServerId("s01"));
  EXPECT_FALSE(hello->inventory.probe_address.empty());
  EXPECT_NE(hello->start_nonce, 0u);
  Greet();
  controller_->Send(Spawn(1, "/bin/sh", {"-c", "echo hello; exit 3"}));
  const auto started = controller_->Wait<ProcessStarted>();
  ASSERT_TRUE(started);
  EXPECT_GT(started->pid, 0);
  const auto exited = controller_->Wait<ProcessExited>();
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->exit_code, 3);
  EXPECT_EQ(exited->last_lines, (std::vector<std::string>{"hello"}));
  const auto printed = controller_->Wait<LinesPrinted>();
  ASSERT_TRUE(printed);
  EXPECT_EQ(printed->lines, (std::vector<std::string>{"hello"}));
  controller_->Send(Spawn(2, "/no/such/program"));
  const auto failed = controller_->Wait<ProcessStartFailed>();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->reason, Reason::kProgramMissing);
}

TEST_F(AgentShellTest, BeatsWithTheKeyOfItsWelcome) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  uint64_t sequence = 0, turns = 0;
  for (int i = 0; i < 5; ++i) {
    const auto heartbeat = ReceiveHeartbeat();
    ASSERT_TRUE(heartbeat);
    EXPECT_EQ(heartbeat->server, ServerId("s01"));
    EXPECT_EQ(heartbeat->incarnation, Incarnation(4));
    EXPECT_GT(heartbeat->sequence, sequence);
    EXPECT_GT(heartbeat->loop_counter, turns);
    sequence = heartbeat->sequence;
    turns = heartbeat->loop_counter;
  }
  controller_->Send(Probe{5});
  ASSERT_TRUE(controller_->Wait<ProbeReturned>());
  std::optional<Heartbeat> heartbeat;
  do {
    heartbeat = ReceiveHeartbeat();
    ASSERT_TRUE(heartbeat);
  } while (heartbeat->acted < CommandSequence(2));
}

TEST_F(AgentShellTest, CarriesARankThroughAWholeGeneration) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  controller_->Send(Spawn(1, FAKE_RANK));
  const auto joined = controller_->Wait<ProcessJoined>();
  ASSERT_TRUE(joined);
  EXPECT_EQ(joined->mesh_address, "127.0.0.1:4000");
  controller_->Send(FenceProcesses{JobUid("job"), Generation(2), {ProcessId(1)}});
  const auto collected = controller_->Wait<ProcessCollected>();
  ASSERT_TRUE(collected);
  EXPECT_EQ(collected->answer.report.applied.step, Step(6));
  AssignProcesses assign;
  assign.assignment.job = JobUid("job");
  assign.assignment.generation = Generation(2);
  assign.assignment.ranks.resize(1);
  assign.assignment.ranks[0].rank = Rank(0);
  assign.assignment.ranks[0].server = ServerId("s01");
  assign.assignment.ranks[0].process = ProcessId(1);
  controller_->Send(assign);
  ASSERT_TRUE(controller_->Wait<ProcessConnected>());
  ASSERT_TRUE(controller_->Wait<ProcessReady>());
  controller_->Send(ResumeProcesses{JobUid("job"), Generation(2), Step(0)});
  ASSERT_TRUE(controller_->Wait<MetricObserved>());
  std::optional<Heartbeat> heartbeat;
  do {
    heartbeat = ReceiveHeartbeat();
    ASSERT_TRUE(heartbeat);
  } while (heartbeat->votes.empty());
  EXPECT_EQ(heartbeat->votes[0].process, ProcessId(1));
  EXPECT_EQ(heartbeat->votes[0].generation, Generation(2));
  EXPECT_EQ(heartbeat->votes[0].step, Step(7));
  kill(static_cast<pid_t>(joined->pid), SIGKILL);
  const auto exited = controller_->Wait<ProcessExited>();
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->signal, SIGKILL);
  EXPECT_EQ(exited->progress.vote_passed, Step(7));
  EXPECT_EQ(exited->progress.applied, (StateId{Step(7), Generation(2)}));
}

TEST_F(AgentShellTest, AReleasedRankFinishes) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  controller_->Send(Spawn(1, FAKE_RANK));
  ASSERT_TRUE(controller_->Wait<ProcessJoined>());
  controller_->Send(ReleaseJob{JobUid("job")});
  ASSERT_TRUE(controller_->Wait<ProcessExited>());
}

TEST_F(AgentShellTest, KeepsItsRanksWhileTheControllerIsAwayAndReportsWhatHappened) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  controller_->Send(Spawn(1, FAKE_RANK));
  const auto staying = controller_->Wait<ProcessJoined>();
  ASSERT_TRUE(staying);
  controller_->Send(Spawn(2, FAKE_RANK));
  const auto dying = controller_->Wait<ProcessJoined>();
  ASSERT_TRUE(dying);
  const int port = controller_->port();
  controller_.reset();
  kill(static_cast<pid_t>(dying->pid), SIGKILL);
  controller_ = std::make_unique<PlayedController>(port);
  const auto hello = controller_->Wait<AgentHello>();
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->incarnation, Incarnation(4));
  EXPECT_EQ(hello->highest_term, Term(3));
  const auto listed = std::find_if(hello->processes.begin(), hello->processes.end(),
                                   [](const ProcessStatus& s) { return s.process == ProcessId(1); });
  ASSERT_NE(listed, hello->processes.end());
  EXPECT_EQ(listed->pid, staying->pid);
  EXPECT_TRUE(listed->joined);
  Greet({ProcessId(1)});
  const auto exited = controller_->Wait<ProcessExited>();
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->process, ProcessId(2));
  EXPECT_EQ(kill(static_cast<pid_t>(staying->pid), 0), 0);
}

TEST_F(AgentShellTest, ExitsWithTwoWhenTheControllerRefusesItForGood) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  controller_->Send(Refuse{"the name s01 is taken", true});
  thread_.join();
  EXPECT_EQ(exit_code_, 2);
  EXPECT_EQ(shell_->exit_message(), "the name s01 is taken");
}

TEST_F(AgentShellTest, StopsItsRanksWhenAskedToStop) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  controller_->Send(Spawn(1, FAKE_RANK));
  const auto joined = controller_->Wait<ProcessJoined>();
  ASSERT_TRUE(joined);
  shell_->RequestStop();
  thread_.join();
  EXPECT_EQ(exit_code_, 0);
  EXPECT_NE(kill(static_cast<pid_t>(joined->pid), 0), 0);
  EXPECT_TRUE(controller_->Wait<ProcessExited>());
}

TEST_F(AgentShellTest, TellsOfADeathWithinItsTarget) {
  StartAgent();
  ASSERT_TRUE(controller_->Wait<AgentHello>());
  Greet();
  std::vector<double> milliseconds;
  constexpr uint64_t kDeaths = 21;
  for (uint64_t i = 1; i <= kDeaths; ++i) {
    controller_->Send(Spawn(i, FAKE_RANK));
    const auto joined = controller_->Wait<ProcessJoined>();
    ASSERT_TRUE(joined);
    const Instant before = BootTimeNow();
    kill(static_cast<pid_t>(joined->pid), SIGKILL);
    ASSERT_TRUE(controller_->Wait<ProcessExited>());
    milliseconds.push_back(ToMilliseconds(BootTimeNow() - before));
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::printf("from kill to fact: median %.2f ms, worst %.2f ms\n", milliseconds[kDeaths / 2], milliseconds.back());
  RecordProperty("median_microseconds", static_cast<int>(milliseconds[kDeaths / 2] * 1000));
  EXPECT_LT(milliseconds[kDeaths / 2], 100.0);
}

}  // namespace
}  // namespace everstep
