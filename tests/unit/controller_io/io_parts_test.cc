// Heartbeats, probes, metrics, the operations port, configuration and log lines: the parts around the loop.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "controller/io/config/controller_config.h"
#include "controller/io/heartbeat/heartbeat_receiver.h"
#include "controller/io/log/log.h"
#include "controller/io/ops/metrics.h"
#include "controller/io/ops/ops_server.h"
#include "controller/io/ops/status_page.h"
#include "controller/io/probe/prober.h"

namespace everstep {
namespace {

// A socket of the given type bound to a free loopback port.
class LoopbackSocket {
 public:
  explicit LoopbackSocket(int type) : fd_(::socket(AF_INET, type, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    socklen_t length = sizeof(address);
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
  }
  ~LoopbackSocket() { ::close(fd_); }
  int fd() const { return fd_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int fd_;
  int port_ = 0;
};

sockaddr_in AddressOf(const std::string& address) {
  sockaddr_in out{};
  out.sin_family = AF_INET;
  out.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  out.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  return out;
}

// ---- heartbeats

Heartbeat Beat(const std::string& server, uint64_t sequence) {
  Heartbeat out;
  out.server = ServerId(server);
  out.incarnation = Incarnation(1);
  out.sequence = sequence;
  return out;
}

class HeartbeatReceiverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = HeartbeatReceiver::Open("127.0.0.1:0", &keys_);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    receiver_ = std::move(*opened);
  }
  void SendBytes(const std::string& bytes) {
    const sockaddr_in to = AddressOf(receiver_->address());
    ASSERT_EQ(::sendto(sender_.fd(), bytes.data(), bytes.size(), 0, reinterpret_cast<const sockaddr*>(&to), sizeof(to)),
              static_cast<ssize_t>(bytes.size()));
  }

  HeartbeatKeys keys_{3};
  std::unique_ptr<HeartbeatReceiver> receiver_;
  LoopbackSocket sender_{SOCK_DGRAM};
};

TEST_F(HeartbeatReceiverTest, KeepsTheNewestOfEachServerWhateverTheOrder) {
  const auto a = keys_.Issue(ServerId("a"));
  const auto b = keys_.Issue(ServerId("b"));
  for (uint64_t sequence : {5, 9, 7}) SendBytes(EncodeHeartbeat(Beat("a", sequence), a.id, a.key));
  SendBytes(EncodeHeartbeat(Beat("b", 2), b.id, b.key));
  const std::vector<Heartbeat> taken = receiver_->Take(true);  // loopback: what was sent waits in the socket
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].server, ServerId("a"));
  EXPECT_EQ(taken[0].sequence, 9u);
  EXPECT_EQ(taken[1].sequence, 2u);
  EXPECT_EQ(receiver_->counters().received.load(), 4u);
  EXPECT_EQ(receiver_->counters().coalesced.load(), 2u);
  EXPECT_TRUE(receiver_->Take(true).empty());
}

TEST_F(HeartbeatReceiverTest, CountsAndDropsWhatIsNotAuthentic) {
  const auto a = keys_.Issue(ServerId("a"));
  const auto b = keys_.Issue(ServerId("b"));
  SendBytes(EncodeHeartbeat(Beat("a", 1), a.id, b.key));         // wrong key
  SendBytes(EncodeHeartbeat(Beat("b", 1), a.id, a.key));         // a speaks for b
  SendBytes(EncodeHeartbeat(Beat("a", 1), a.id ^ b.id, a.key));  // unknown key
  SendBytes("hello");
  SendBytes(std::string(kHeartbeatBytesMax + 500, 'x'));
  EXPECT_TRUE(receiver_->Take(true).empty());
  EXPECT_EQ(receiver_->counters().forged.load(), 2u);
  EXPECT_EQ(receiver_->counters().unknown_key.load(), 1u);
  EXPECT_EQ(receiver_->counters().malformed.load(), 2u);
}

TEST_F(HeartbeatReceiverTest, ANewKeyOfAServerReplacesItsOldOne) {
  const auto old = keys_.Issue(ServerId("a"));
  const auto fresh = keys_.Issue(ServerId("a"));
  EXPECT_EQ(keys_.Find(old.id), nullptr);
  EXPECT_NE(keys_.Find(fresh.id), nullptr);
  EXPECT_NE(old.key, fresh.key);
}

TEST_F(HeartbeatReceiverTest, KeysAreBoundedAndTheOldestGoes) {
  const auto a = keys_.Issue(ServerId("a"));
  const auto b = keys_.Issue(ServerId("b"));
  const auto c = keys_.Issue(ServerId("c"));
  const auto d = keys_.Issue(ServerId("d"));
  EXPECT_EQ(keys_.Find(a.id), nullptr);
  for (const auto& issued : {b, c, d}) EXPECT_NE(keys_.Find(issued.id), nullptr);
}

TEST_F(HeartbeatReceiverTest, TellsWhenSomethingArrived) {
  const auto a = keys_.Issue(ServerId("a"));
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  receiver_->Start([&] {
    std::lock_guard lock(mutex);
    ++arrived;
    changed.notify_all();
  });
  SendBytes(EncodeHeartbeat(Beat("a", 1), a.id, a.key));
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return arrived > 0; });
  EXPECT_EQ(receiver_->Take(false).size(), 1u);
  lock.unlock();
  receiver_->Stop();
}

TEST(HeartbeatReceiver, APortInUseIsNamedWithARemedy) {
  LoopbackSocket taken(SOCK_DGRAM);
  HeartbeatKeys keys(1);
  const auto opened = HeartbeatReceiver::Open(taken.address(), &keys);
  EXPECT_EQ(opened.status().message(), "heartbeat address " + taken.address() +
                                           " cannot be bound: Address already in use; choose another with "
                                           "--heartbeat-listen");
}

// ---- probes

ProbeOutcome ProbeAndWait(Prober& prober, const std::string& address, Duration timeout) {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ProbeOutcome> result;
  prober.Probe(address, timeout, [&](ProbeOutcome outcome) {
    std::lock_guard lock(mutex);
    result = outcome;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return result.has_value(); });
  return *result;
}

TEST(Prober, TellsAnOpenPortFromAClosedOne) {
  Prober prober;
  LoopbackSocket listening(SOCK_STREAM);
  ASSERT_EQ(::listen(listening.fd(), 1), 0);
  EXPECT_EQ(ProbeAndWait(prober, listening.address(), Seconds(10)), ProbeOutcome::kConnected);
  std::string closed;
  {
    LoopbackSocket gone(SOCK_STREAM);
    closed = gone.address();
  }
  EXPECT_EQ(ProbeAndWait(prober, closed, Seconds(10)), ProbeOutcome::kRefused);
}

TEST(Prober, SilenceAndNonsenseAreNoProof) {
  Prober prober;
  // A listener whose queue is full answers no further connection.
  LoopbackSocket full(SOCK_STREAM);
  ASSERT_EQ(::listen(full.fd(), 0), 0);
  const sockaddr_in to = AddressOf(full.address());
  std::vector<int> fillers;
  for (int i = 0; i < 4; ++i) {
    fillers.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    const int ignored = ::connect(fillers.back(), reinterpret_cast<const sockaddr*>(&to), sizeof(to));
    (void)ignored;
  }
  EXPECT_EQ(ProbeAndWait(prober, full.address(), Milliseconds(100)), ProbeOutcome::kTimedOut);
  for (int fd : fillers) ::close(fd);
  EXPECT_EQ(ProbeAndWait(prober, "nonsense", Seconds(1)), ProbeOutcome::kTimedOut);
  EXPECT_EQ(ProbeAndWait(prober, "host:port", Seconds(1)), ProbeOutcome::kTimedOut);
}

// ---- metrics

bool HasLine(const std::string& text, const std::string& line) {
  return ("\n" + text).find("\n" + line + "\n") != std::string::npos;
}

Measured Of(Measured::What what, Reason reason, const std::string& label, double seconds,
            RecoveryPhase phase = RecoveryPhase::kNone) {
  Measured out;
  out.what = what;
  out.reason = reason;
  out.label = label;
  out.seconds = seconds;
  out.phase = phase;
  return out;
}

TEST(Metrics, EachHasItsNameLabelsAndValueForAKnownEvent) {
  Metrics metrics("1.2.3", "abc");
  using W = Measured::What;
  metrics.Measure(Of(W::kHeartbeat, Reason::kNone, "", 0));
  metrics.Measure(Of(W::kHeartbeatDelay, Reason::kNone, "", 0.02));
  metrics.Measure(Of(W::kVerdict, Reason::kServerSilent, "dead", 0));
  metrics.Measure(Of(W::kPlan, Reason::kSpareTaken, "made", 0));
  metrics.Measure(Of(W::kPlanDuration, Reason::kNone, "", 0.0002));
  metrics.Measure(Of(W::kRecovery, Reason::kProcessKilled, "resumed", 0.3));
  metrics.Measure(Of(W::kRecoveryPhase, Reason::kNone, "", 0.04, RecoveryPhase::kCollect));
  metrics.Measure(Of(W::kSparePromoted, Reason::kNone, "", 0));
  metrics.Measure(Of(W::kStaleMessage, Reason::kNone, "generation", 0));
  metrics.Measure(Of(W::kCheckpointCommit, Reason::kNone, "committed", 0));
  metrics.StepTook(Microseconds(30));
  metrics.AppendTook(Milliseconds(2));
  metrics.QueueLengthIs(7);
  metrics.RpcHandled("GetJob", StatusCode::kNotFound);
  metrics.DatagramsDropped("heartbeat_forged", 2);
  metrics.DatagramsDropped("heartbeat_forged", 5);

  ClusterView view;
  ServerView server;
  server.state = ServerState::kActive;
  server.inventory.devices.resize(4);
  server.devices_free = 1;
  view.servers.push_back(server);
  server.state = ServerState::kDead;
  view.servers.push_back(server);
  JobView job;
  job.entry.spec.name = "train";
  job.entry.resumed = Generation(3);
  job.phase = RecoveryPhase::kRestore;
  job.entry.manifests.push_back({{}, 0, {}, WallTime{12'500'000}});
  view.jobs.push_back(job);
  job.entry.spec.name = "old";
  job.entry.ended = JobEnded{};
  view.jobs.push_back(job);

  const std::string text = metrics.Text(&view);
  for (const char* line : {
           "everstep_build_info{revision=\"abc\",version=\"1.2.3\"} 1",
           "everstep_servers{state=\"Active\"} 1",
           "everstep_servers{state=\"Dead\"} 1",
           "everstep_servers{state=\"Spare\"} 0",
           "everstep_devices{state=\"free\"} 1",
           "everstep_devices{state=\"used\"} 3",
           "everstep_devices{state=\"unavailable\"} 4",
           "everstep_job_generation{job=\"train\"} 3",
           "everstep_job_phase{job=\"train\",phase=\"restore\"} 1",
           "everstep_job_phase{job=\"train\",phase=\"none\"} 0",
           "everstep_heartbeats_received_total 1",
           "everstep_heartbeat_delay_seconds_bucket{le=\"0.05\"} 1",
           "everstep_heartbeat_delay_seconds_bucket{le=\"0.01\"} 0",
           "everstep_detector_verdicts_total{reason=\"ServerSilent\",verdict=\"dead\"} 1",
           "everstep_plans_total{outcome=\"made\",reason=\"SpareTaken\"} 1",
           "everstep_plan_duration_seconds_count 1",
           "everstep_recoveries_total{outcome=\"resumed\",reason=\"ProcessKilled\"} 1",
           "everstep_recovery_duration_seconds_bucket{le=\"0.5\"} 1",
           "everstep_recovery_duration_seconds_bucket{le=\"0.25\"} 0",
           "everstep_recovery_phase_duration_seconds_count{phase=\"collect\"} 1",
           "everstep_spares_promoted_total 1",
           "everstep_stale_messages_total{kind=\"generation\"} 1",
           "everstep_stale_messages_total{kind=\"heartbeat_forged\"} 5",
           "everstep_checkpoint_commits_total{outcome=\"committed\"} 1",
           "everstep_checkpoint_last_commit_timestamp_seconds{job=\"train\"} 12.5",
           "everstep_ledger_append_duration_seconds_count 1",
           "everstep_loop_queue_length 7",
           "everstep_loop_step_duration_seconds_count 1",
           "everstep_rpc_server_handled_total{code=\"NOT_FOUND\",method=\"GetJob\"} 1",
           "everstep_bugs_total{site=\"any\"} 0",
       }) {
    EXPECT_TRUE(HasLine(text, line)) << line << "\nin\n" << text;
  }
  EXPECT_EQ(text.find("job=\"old\""), std::string::npos) << "an ended job's labels must go";
  // The reference names exactly what is written, with help and type.
  for (const Metrics::Description& metric : Metrics::Describe()) {
    EXPECT_NE(text.find("# TYPE " + metric.name + " " + metric.type + "\n"), std::string::npos) << metric.name;
    EXPECT_NE(text.find("# HELP " + metric.name + " " + metric.help + "\n"), std::string::npos) << metric.name;
  }
}

// ---- operations port

std::string Http(const std::string& address, const std::string& request) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in to = AddressOf(address);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  EXPECT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string out;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0;) out.append(buffer, n);
  ::close(fd);
  return out;
}

std::string Get(const std::string& address, const std::string& target) {
  return Http(address, "GET " + target + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
}

TEST(OpsServer, BeforeItServesItIsAliveButNotReady) {
  Metrics metrics("1", "r");
  auto server = OpsServer::Open("127.0.0.1:0", &metrics);
  ASSERT_TRUE(server.ok()) << server.status().ToString();
  const std::string address = (*server)->address();
  EXPECT_EQ(Get(address, "/livez").rfind("HTTP/1.1 200", 0), 0u);
  const std::string ready = Get(address, "/readyz?verbose");
  EXPECT_EQ(ready.rfind("HTTP/1.1 503", 0), 0u) << ready;
  EXPECT_NE(ready.find("[-] ledger replayed"), std::string::npos) << ready;
  EXPECT_EQ(Get(address, "/").rfind("HTTP/1.1 503", 0), 0u);
  EXPECT_NE(Get(address, "/metrics").find("everstep_build_info{revision=\"r\",version=\"1\"} 1"), std::string::npos);
  EXPECT_EQ(Get(address, "/healthz").rfind("HTTP/1.1 404", 0), 0u);
}

TEST(OpsServer, RefusesOtherMethodsAndWhatIsTooLong) {
  Metrics metrics("1", "r");
  auto server = OpsServer::Open("127.0.0.1:0", &metrics);
  ASSERT_TRUE(server.ok());
  const std::string address = (*server)->address();
  EXPECT_EQ(Http(address, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                .rfind("HTTP/1.1 405", 0), 0u);
  EXPECT_EQ(Http(address, "GET /" + std::string(20'000, 'a') + " HTTP/1.1\r\n\r\n").find("200 OK"), std::string::npos);
  const std::string head = Http(address, "HEAD /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(head.rfind("HTTP/1.1 200", 0), 0u);
  EXPECT_EQ(head.substr(head.find("\r\n\r\n")), "\r\n\r\n");
}

TEST(OpsServer, APortInUseIsNamedWithARemedy) {
  Metrics metrics("1", "r");
  auto first = OpsServer::Open("127.0.0.1:0", &metrics);
  ASSERT_TRUE(first.ok());
  const auto second = OpsServer::Open((*first)->address(), &metrics);
  EXPECT_EQ(second.status().message(), "ops address " + (*first)->address() +
                                           " cannot be bound: Address already in use; choose another with --ops-listen");
}

TEST(StatusPage, NothingInItBecomesMarkup) {
  ClusterView view;
  JobView job;
  job.entry.spec.name = "train";
  job.message = "<script>alert('x')</script>";
  view.jobs.push_back(job);
  const std::string page = StatusPage(view, WallTime{});
  EXPECT_EQ(page.find("<script>"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;alert(&#39;x&#39;)"), std::string::npos);
}

// ---- configuration

TEST(ControllerConfig, DefaultsAreLegalAndEqualThePolicy) {
  v1::ControllerConfig config;
  config.set_data_directory("/var/lib/everstep");
  config = WithDefaults(config);
  EXPECT_EQ(Validate(config), std::vector<std::string>{});
  EXPECT_EQ(DescribePolicy(PolicyOf(config)), DescribePolicy(Policy()));
}

TEST(ControllerConfig, EveryFieldIsExplainedInTheReference) {
  const std::vector<ConfigField> fields = ConfigReference();
  EXPECT_GE(fields.size(), 20u);
  for (const ConfigField& field : fields) {
    EXPECT_NE(field.legal, "") << field.name;
    EXPECT_NE(field.meaning, "") << field.name;
    EXPECT_NE(field.standard, "") << field.name;
  }
}

TEST(ControllerConfig, ReadsAFileAndKeepsWhatItSays) {
  const LoadedConfig loaded = ParseControllerConfig(
      "data_directory: /data\nlisten: 127.0.0.1:0\nlog: {format: json, level: debug}\n"
      "ledger: {snapshot_records: 50}\npolicy:\n  lease: 3s\n  servers_max: 12\n  mass_silence_hold: 9s\n"
      "  adoption_grace: 7s\n", "c.yaml");
  ASSERT_EQ(loaded.problems, std::vector<std::string>{});
  const v1::ControllerConfig config = WithDefaults(loaded.config);
  EXPECT_EQ(Validate(config), std::vector<std::string>{});
  const Policy policy = PolicyOf(config);
  EXPECT_EQ(policy.lease, Seconds(3));
  EXPECT_EQ(policy.servers_max, 12);
  EXPECT_EQ(policy.heartbeat_interval, Policy().heartbeat_interval);
  EXPECT_EQ(config.log().format(), v1::LOG_FORMAT_JSON);
  EXPECT_EQ(config.ledger().snapshot_records(), 50);
}

TEST(ControllerConfig, ReportsAllProblemsWithTheirLines) {
  const LoadedConfig loaded = ParseControllerConfig(
      "listen: 0.0.0.0:70\nops_listen: nowhere\npolicy:\n  lease: 400ms\n  jobs_max: 0\n", "c.yaml");
  ASSERT_EQ(loaded.problems, std::vector<std::string>{});
  const std::vector<std::string> problems =
      WithLines(Validate(WithDefaults(loaded.config)), "c.yaml", loaded.lines);
  const auto has = [&](const std::string& start) {
    return std::any_of(problems.begin(), problems.end(), [&](const auto& p) { return p.rfind(start, 0) == 0; });
  };
  EXPECT_TRUE(has("c.yaml: data_directory: is missing"));
  EXPECT_TRUE(has("c.yaml:1: listen: 0.0.0.0:70 is not loopback"));
  EXPECT_TRUE(has("c.yaml:2: ops_listen: \"nowhere\" is not host:port"));
  EXPECT_TRUE(has("c.yaml: heartbeat_address: is missing"));
  EXPECT_TRUE(has("c.yaml:4: policy.lease: 400ms is below four heartbeat intervals"));
  EXPECT_TRUE(has("c.yaml:5: policy.jobs_max: 0 is outside"));
}

TEST(ControllerConfig, AMisspeltFieldInsideASectionIsFound) {
  EXPECT_EQ(ParseControllerConfig("policy:\n  leese: 3s\n", "c.yaml").problems,
            std::vector<std::string>{"c.yaml:2: policy: unknown field \"leese\"; did you mean \"lease\"?"});
  EXPECT_EQ(ParseControllerConfig("log: {format: xml}\n", "c.yaml").problems,
            std::vector<std::string>{"c.yaml:1: log.format: \"xml\" is not one of json, text"});
}

// ---- log

TEST(Log, ALineIsItsMessageThenKeys) {
  const LogKeys keys = {{"server", "s03"}, {"err", "a \"b\"\nc"}, {"empty", ""}};
  EXPECT_EQ(FormatLogLine({}, LogLevel::kInfo, "Server declared dead", keys),
            "info Server declared dead server=s03 err=\"a \\\"b\\\"\\nc\" empty=\"\"");
  EXPECT_EQ(FormatLogLine({LogLevel::kInfo, true}, LogLevel::kError, "Ledger failed", {{"err", "x\x01\xff"}}),
            "\"level\":\"error\",\"msg\":\"Ledger failed\",\"err\":\"x\\u0001?\"");
}

}  // namespace
}  // namespace everstep
