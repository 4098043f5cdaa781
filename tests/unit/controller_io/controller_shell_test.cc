// The whole controller in this process, spoken to over real sockets by a client that plays the agent and the operator.
#include "controller/io/shell/controller_shell.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "controller/io/config/controller_config.h"
#include "controller/io/loop/controller_loop.h"
#include "everstep/v1/admin.grpc.pb.h"
#include "everstep/v1/agent.grpc.pb.h"
#include "proto/convert/agent_convert.h"
#include "proto/convert/job_convert.h"
#include "proto/model/heartbeat_codec.h"

namespace everstep {
namespace {

namespace fs = std::filesystem;

// An agent as far as the controller sees it.
class PlayedAgent {
 public:
  PlayedAgent(const std::shared_ptr<grpc::Channel>& channel, const std::string& name, uint64_t nonce)
      : name_(name), nonce_(nonce), stub_(v1::AgentService::NewStub(channel)), stream_(stub_->Session(&context_)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_, 8), 0);
    socklen_t length = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    probe_address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~PlayedAgent() {
    context_.TryCancel();
    if (!finished_) stream_->Finish();
    ::close(listener_);
  }

  AgentHello Hello() const {
    AgentHello hello;
    hello.inventory.server = ServerId(name_);
    hello.inventory.host = "127.0.0.1";
    hello.inventory.failure_domain = "rack";
    hello.inventory.probe_address = probe_address_;
    hello.inventory.version = "test";
    hello.inventory.devices.push_back({DeviceIndex(0), DeviceKind::kCpuSlot, "cpu", 0, 1.0});
    hello.start_nonce = nonce_;
    return hello;
  }
  bool Say(const v1::AgentMessage& message) { return stream_->Write(message); }

  // The next command of type C; others before it are skipped.
  template <typename C>
  std::optional<C> Await() {
    v1::ControllerMessage message;
    while (stream_->Read(&message)) {
      auto received = FromMessage(message);
      EXPECT_TRUE(received.ok()) << received.status().ToString();
      if (received.ok() && std::holds_alternative<C>(received->command)) return std::get<C>(received->command);
    }
    return std::nullopt;
  }
  grpc::Status End() {
    v1::ControllerMessage message;
    while (stream_->Read(&message)) {
    }
    finished_ = true;
    return stream_->Finish();
  }

  void Cancel() { context_.TryCancel(); }

  void SendHeartbeat(const Welcome& welcome, uint64_t sequence) {
    Heartbeat heartbeat;
    heartbeat.server = ServerId(name_);
    heartbeat.incarnation = welcome.incarnation;
    heartbeat.sequence = sequence;
    heartbeat.loop_counter = sequence;
    const std::string bytes = EncodeHeartbeat(heartbeat, welcome.heartbeat_key_id, welcome.heartbeat_key);
    const int fd = ::socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(
        std::stoi(welcome.heartbeat_address.substr(welcome.heartbeat_address.rfind(':') + 1))));
    EXPECT_EQ(::sendto(fd, bytes.data(), bytes.size(), 0, reinterpret_cast<sockaddr*>(&to), sizeof(to)),
              static_cast<ssize_t>(bytes.size()));
    ::close(fd);
  }

 private:
  const std::string name_;
  const uint64_t nonce_;
  std::string probe_address_;
  int listener_ = -1;
  bool finished_ = false;
  grpc::ClientContext context_;
  std::unique_ptr<v1::AgentService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AgentMessage, v1::ControllerMessage>> stream_;
};

class ControllerShellTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/shellXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    StartShell();
  }
  void TearDown() override {
    shell_.reset();
    fs::remove_all(directory_);
  }
  void StartShell() {
    auto started = ControllerShell::Start({Config(), "test", "none", nullptr});
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    shell_ = std::move(*started);
    channel_ = grpc::CreateChannel(shell_->address(), grpc::InsecureChannelCredentials());
    admin_ = v1::AdminService::NewStub(channel_);
  }
  v1::ControllerConfig Config() const {
    v1::ControllerConfig config;
    config.set_data_directory(directory_ + "/data");
    config.set_listen("127.0.0.1:0");
    config.set_ops_listen("127.0.0.1:0");
    return WithDefaults(config);
  }

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::AdminService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return (admin_.get()->*method)(&context, request, response);
  }

  v1::SubmitJobRequest JobRequest(const std::string& request_id) const {
    v1::SubmitJobRequest request;
    request.set_request_id(request_id);
    request.mutable_spec()->set_name("train");
    request.mutable_spec()->set_program("/bin/true");
    return request;
  }

  std::string directory_;
  std::unique_ptr<ControllerShell> shell_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

TEST_F(ControllerShellTest, AnAgentRegistersBeatsAndIsListed) {
  PlayedAgent agent(channel_, "s01", 7);
  ASSERT_TRUE(agent.Say(ToMessage(agent.Hello())));
  const auto welcome = agent.Await<Welcome>();
  ASSERT_TRUE(welcome);
  EXPECT_EQ(welcome->incarnation, Incarnation(1));
  EXPECT_NE(welcome->heartbeat_key_id, 0u);
  EXPECT_EQ(welcome->heartbeat_address, shell_->heartbeat_address());
  agent.SendHeartbeat(*welcome, 1);
  v1::ListServersResponse servers;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::ListServers, v1::ListServersRequest(), &servers).ok());
  ASSERT_EQ(servers.servers_size(), 1);
  EXPECT_EQ(servers.servers(0).name(), "s01");
  EXPECT_EQ(servers.servers(0).status().inventory().devices_size(), 1);
  EXPECT_EQ(servers.servers(0).status().conditions(0).type(), "Ready");
}

TEST_F(ControllerShellTest, AFactIsAcknowledgedFast) {
  PlayedAgent agent(channel_, "s01", 7);
  ASSERT_TRUE(agent.Say(ToMessage(agent.Hello())));
  const auto welcome = agent.Await<Welcome>();
  ASSERT_TRUE(welcome);
  std::vector<Duration> times;
  for (uint64_t i = 1; i <= 200; ++i) {
    const Instant before = SystemNow().instant;
    ASSERT_TRUE(agent.Say(ToMessage(FactSequence(i), StorageTroubled{Reason::kStorageFailed, "slow"})));
    std::optional<AcknowledgeFacts> acknowledged;
    do {
      acknowledged = agent.Await<AcknowledgeFacts>();
      ASSERT_TRUE(acknowledged);
    } while (acknowledged->upto < FactSequence(i));
    times.push_back(SystemNow().instant - before);
  }
  std::sort(times.begin(), times.end());
  std::printf("fact to acknowledgement over gRPC: p50 %.0f us, p99 %.0f us\n", times[100].count() / 1e3,
              times[197].count() / 1e3);
  EXPECT_LT(times[100], Milliseconds(100));
}

TEST_F(ControllerShellTest, WhatAnAgentMayNotSayEndsItsStream) {
  {
    PlayedAgent agent(channel_, "s01", 7);
    ASSERT_TRUE(agent.Say(ToMessage(FactSequence(1), ProbeReturned{1})));
    const grpc::Status status = agent.End();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), "hello: must be the first message of a stream");
  }
  PlayedAgent agent(channel_, "bad name", 7);
  ASSERT_TRUE(agent.Say(ToMessage(agent.Hello())));
  const grpc::Status status = agent.End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message().rfind("hello.inventory.server: \"bad name\" is not a name", 0), 0u)
      << status.error_message();
}

TEST_F(ControllerShellTest, AMutationIsRepeatableByItsRequestId) {
  v1::SubmitJobResponse first, second;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SubmitJob, JobRequest("r1"), &first).ok());
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SubmitJob, JobRequest("r1"), &second).ok());
  EXPECT_FALSE(first.job_uid().empty());
  EXPECT_EQ(first.job_uid(), second.job_uid());
  EXPECT_EQ(first.message(), "job/train submitted");
  v1::SubmitJobResponse third;
  EXPECT_EQ(Call(&v1::AdminService::Stub::SubmitJob, JobRequest("r2"), &third).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  v1::GetJobRequest get;
  get.set_job("train");
  v1::GetJobResponse job;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::GetJob, get, &job).ok());
  EXPECT_EQ(job.job().uid(), first.job_uid());
  EXPECT_EQ(job.job().spec().program(), "/bin/true");
}

TEST_F(ControllerShellTest, BadRequestsNameTheirField) {
  v1::SubmitJobResponse response;
  v1::SubmitJobRequest request = JobRequest("");
  grpc::Status status = Call(&v1::AdminService::Stub::SubmitJob, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message().rfind("request_id: ", 0), 0u) << status.error_message();
  request = JobRequest("r1");
  request.mutable_spec()->set_servers_min(-3);
  status = Call(&v1::AdminService::Stub::SubmitJob, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message().rfind("servers_min: -3", 0), 0u) << status.error_message();
  v1::GetJobRequest get;
  get.set_job("none");
  v1::GetJobResponse job;
  EXPECT_EQ(Call(&v1::AdminService::Stub::GetJob, get, &job).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::GetRecoveryRequest recovery;
  recovery.set_id(999);
  v1::GetRecoveryResponse found;
  EXPECT_EQ(Call(&v1::AdminService::Stub::GetRecovery, recovery, &found).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::DrainServerRequest drain;
  drain.set_request_id("r3");
  drain.set_server("s99");
  v1::DrainServerResponse drained;
  EXPECT_EQ(Call(&v1::AdminService::Stub::DrainServer, drain, &drained).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ControllerShellTest, AWatchShowsTheJobThenItsOutcomeAndEnds) {
  v1::SubmitJobResponse submitted;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SubmitJob, JobRequest("r1"), &submitted).ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::WatchJobRequest request;
  request.set_job("train");
  auto stream = admin_->WatchJob(&context, request);
  v1::WatchJobResponse message;
  ASSERT_TRUE(stream->Read(&message));
  ASSERT_TRUE(message.has_job());
  EXPECT_EQ(message.job().uid(), submitted.job_uid());
  v1::CancelJobRequest cancel;
  cancel.set_request_id("r2");
  cancel.set_job("train");
  v1::CancelJobResponse cancelled;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::CancelJob, cancel, &cancelled).ok());
  EXPECT_EQ(cancelled.message(), "job/train cancelled");
  int events = 0;
  v1::WatchJobResponse last;
  while (stream->Read(&message)) {
    events += message.has_event();
    last = message;
  }
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_TRUE(last.has_outcome());
  EXPECT_EQ(last.outcome().state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(last.outcome().exit_code(), 73);
  EXPECT_GT(events, 0);

  // Of a job that has ended: the same end, at once.
  grpc::ClientContext again;
  stream = admin_->WatchJob(&again, request);
  ASSERT_TRUE(stream->Read(&message));
  ASSERT_TRUE(stream->Read(&message));
  EXPECT_TRUE(message.has_outcome());
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ControllerShellTest, AWatchOfAnUnknownJobSaysSo) {
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_job("nobody");
  auto stream = admin_->WatchJob(&context, request);
  v1::WatchJobResponse message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ControllerShellTest, ARestartedControllerKnowsItsJobsUnderAHigherTerm) {
  v1::SubmitJobResponse submitted;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::SubmitJob, JobRequest("r1"), &submitted).ok());
  v1::GetControllerInfoResponse before, after;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::GetControllerInfo, v1::GetControllerInfoRequest(), &before).ok());
  shell_.reset();
  StartShell();
  ASSERT_TRUE(Call(&v1::AdminService::Stub::GetControllerInfo, v1::GetControllerInfoRequest(), &after).ok());
  EXPECT_EQ(after.term(), before.term() + 1);
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(Call(&v1::AdminService::Stub::ListJobs, v1::ListJobsRequest(), &jobs).ok());
  ASSERT_EQ(jobs.jobs_size(), 1);
  EXPECT_EQ(jobs.jobs(0).uid(), submitted.job_uid());
}

TEST_F(ControllerShellTest, StopEndsOpenStreamsAndCalls) {
  PlayedAgent agent(channel_, "s01", 7);
  ASSERT_TRUE(agent.Say(ToMessage(agent.Hello())));
  ASSERT_TRUE(agent.Await<Welcome>());
  shell_->Stop();
  EXPECT_FALSE(agent.End().ok());
  v1::ListJobsResponse jobs;
  EXPECT_FALSE(Call(&v1::AdminService::Stub::ListJobs, v1::ListJobsRequest(), &jobs).ok());
}

TEST_F(ControllerShellTest, StopSurvivesStreamsThatEndAtTheSameMoment) {
  std::vector<std::unique_ptr<PlayedAgent>> agents;
  for (int i = 0; i < 100; ++i) {
    agents.push_back(std::make_unique<PlayedAgent>(channel_, "s" + std::to_string(i), 7));
    ASSERT_TRUE(agents.back()->Say(ToMessage(agents.back()->Hello())));
    ASSERT_TRUE(agents.back()->Await<Welcome>());
  }
  std::thread leaving([&] {
    for (auto& agent : agents) agent->Cancel();
  });
  shell_->Stop();
  leaving.join();
  for (auto& agent : agents) EXPECT_FALSE(agent->End().ok());
}

TEST_F(ControllerShellTest, ASecondControllerOnTheSameDirectoryOrPortIsRefused) {
  const auto same_directory = ControllerShell::Start({Config(), "test", "none", nullptr});
  EXPECT_EQ(same_directory.status().code(), StatusCode::kFailedPrecondition);
  v1::ControllerConfig config = Config();
  config.set_data_directory(directory_ + "/other");
  config.set_listen(shell_->address());
  const auto same_port = ControllerShell::Start({config, "test", "none", nullptr});
  EXPECT_EQ(same_port.status().message(), "listen address " + shell_->address() +
                                              " cannot be bound: it is in use or not of this machine; choose another "
                                              "with --listen");
}

TEST_F(ControllerShellTest, AnAddressBeyondLoopbackNeedsAWordOfConsent) {
  v1::ControllerConfig config = Config();
  config.set_data_directory(directory_ + "/other");
  config.set_listen("0.0.0.0:0");
  const auto refused = ControllerShell::Start({config, "test", "none", nullptr});
  EXPECT_EQ(refused.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.status().message().find("allow_insecure"), std::string::npos) << refused.status().message();
}

}  // namespace
}  // namespace everstep
