#include "controller/io/shell/controller_shell.h"

#include <fmt/format.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "controller/io/config/controller_config.h"
#include "controller/io/heartbeat/heartbeat_receiver.h"
#include "controller/io/log/log.h"
#include "controller/io/loop/controller_loop.h"
#include "controller/io/loop/replay.h"
#include "controller/io/loop/watch.h"
#include "controller/io/ops/metrics.h"
#include "controller/io/ops/ops_server.h"
#include "controller/io/probe/prober.h"
#include "controller/io/rpc/rpc_server.h"
#include "controller/io/store/rocksdb_backend.h"
#include "controller/io/store/threaded_store.h"
#include "proto/base/reason.h"
#include "proto/convert/reader.h"

namespace everstep {
namespace {

constexpr Duration kStopPatience = Seconds(2);

uint64_t RandomSeed() {
  uint64_t seed = 0;
  EVERSTEP_CHECK(RAND_bytes(reinterpret_cast<uint8_t*>(&seed), sizeof(seed)) == 1);
  return seed;
}

LogLevel LevelOf(NoticeLevel level) {
  switch (level) {
    case NoticeLevel::kDebug: return LogLevel::kDebug;
    case NoticeLevel::kInfo: return LogLevel::kInfo;
    case NoticeLevel::kError: return LogLevel::kError;
  }
  return LogLevel::kInfo;
}

void EndProcess(const Status& status) {
  Log(LogLevel::kError, "Ledger failed, controller ends so that it promises nothing; running jobs continue",
      {{"reason", std::string(ReasonName(Reason::kLedgerFailed))}, {"err", status.ToString()}});
  FlushLog();
  std::_Exit(1);
}

class ShellImpl : public ControllerShell, private LoopOutputs {
 public:
  explicit ShellImpl(ShellOptions options)
      : options_(std::move(options)),
        metrics_(options_.version, options_.revision),
        keys_(static_cast<size_t>(options_.config.policy().servers_max())),
        started_(SystemNow().wall) {}

  ~ShellImpl() override { Stop(); }

  Status Begin() {
    const v1::ControllerConfig& config = options_.config;
    EVERSTEP_ASSIGN_OR_RETURN(directory_, DataDirectory::Open(config.data_directory()));
    // The doors are bound before the ledger is replayed: whoever knocks early hears "not ready", not silence.
    RpcOptions rpc;
    rpc.address = config.listen();
    rpc.allow_insecure = config.allow_insecure();
    rpc.sessions_max = static_cast<size_t>(config.policy().servers_max()) + 16;
    EVERSTEP_ASSIGN_OR_RETURN(rpc_, RpcServer::Open(rpc));
    EVERSTEP_RETURN_IF_ERROR(OpenHeartbeats());
    EVERSTEP_ASSIGN_OR_RETURN(ops_, OpsServer::Open(config.ops_listen(), &metrics_));

    EVERSTEP_ASSIGN_OR_RETURN(std::unique_ptr<LedgerBackend> backend, OpenRocksDbLedger(config.data_directory()));
    store_ = std::make_unique<ThreadedLedgerStore>(std::move(backend));
    EVERSTEP_ASSIGN_OR_RETURN(const StoredLedger stored, store_->Load());
    EVERSTEP_ASSIGN_OR_RETURN(LedgerState state, ReplayLedger(stored));
    Log(LogLevel::kInfo, "Ledger replayed",
        {{"path", config.data_directory()},
         {"records", std::to_string(stored.records.size())},
         {"sequence", std::to_string(state.applied.value)},
         {"servers", std::to_string(state.servers.size())},
         {"jobs", std::to_string(state.jobs.size())}});
    StartLoop(std::move(state));
    EVERSTEP_RETURN_IF_ERROR(WriteEndpoints());
    if (config.allow_insecure()) {
      Log(LogLevel::kInfo, "Connections are neither encrypted nor authenticated, as allow_insecure says",
          {{"listen", rpc_->address()}});
    }
    Log(LogLevel::kInfo, "Controller listens",
        {{"listen", rpc_->address()}, {"ops", ops_->address()}, {"heartbeats", receiver_->address()},
         {"version", options_.version}});
    return OkStatus();
  }

  void Stop() override {
    if (std::exchange(stopped_, true)) return;
    if (loop_) loop_->Stop(kStopPatience);
    if (rpc_) rpc_->Stop();
    if (receiver_) receiver_->Stop();
    prober_.Stop();
    if (ops_) ops_->Stop();
    if (store_) store_->Close();
  }

  const std::string& address() const override { return rpc_->address(); }
  const std::string& ops_address() const override { return ops_->address(); }
  const std::string& heartbeat_address() const override { return heartbeat_address_; }

 private:
  Status OpenHeartbeats() {
    const v1::ControllerConfig& config = options_.config;
    const bool chosen = !config.heartbeat_listen().empty();
    auto opened = HeartbeatReceiver::Open(chosen ? config.heartbeat_listen() : rpc_->address(), &keys_);
    if (!opened.ok() && !chosen) {
      // Nobody asked for this very port.
      const std::string host = rpc_->address().substr(0, rpc_->address().rfind(':'));
      opened = HeartbeatReceiver::Open(host + ":0", &keys_);
    }
    if (!opened.ok()) return opened.status();
    receiver_ = std::move(opened).value();
    heartbeat_address_ = config.heartbeat_address().empty() ? receiver_->address() : config.heartbeat_address();
    return OkStatus();
  }

  void StartLoop(LedgerState state) {
    ControllerOptions core;
    core.policy = PolicyOf(options_.config);
    core.heartbeat_address = heartbeat_address_;
    core.seed = RandomSeed();
    LoopOptions loop;
    loop.snapshot_records = options_.config.ledger().snapshot_records();
    loop.snapshot_bytes = options_.config.ledger().snapshot_bytes();
    ControllerLoop::Parts parts;
    parts.core = std::make_unique<RealCore>(std::move(core), std::move(state));
    parts.store = store_.get();
    parts.outputs = this;
    parts.heartbeats = receiver_.get();
    parts.on_ledger_failure = options_.on_ledger_failure ? options_.on_ledger_failure : EndProcess;
    loop_ = std::make_unique<ControllerLoop>(loop, std::move(parts));
    loop_->Start();
    receiver_->Start([this] { loop_->Wake(); });

    RpcServer::Parts rpc;
    rpc.loop = loop_.get();
    rpc.keys = &keys_;
    rpc.watches = &watches_;
    rpc.describe_config = [this](v1::GetConfigResponse* out) {
      *out->mutable_config() = options_.config;
      for (const auto& [name, value] : DescribeConfig(options_.config)) {
        v1::KeyValue* entry = out->add_effective();
        entry->set_key(name);
        entry->set_value(value);
      }
    };
    rpc.describe_controller = [this](v1::GetControllerInfoResponse* out) { Describe(out); };
    rpc.handled = [this](const char* method, StatusCode code) { metrics_.RpcHandled(method, code); };
    rpc_->Serve(std::move(rpc));
    ops_->Serve(loop_.get(), [this] {
      const HeartbeatReceiver::Counters& counters = receiver_->counters();
      metrics_.DatagramsDropped("heartbeat_unknown_key", counters.unknown_key.load());
      metrics_.DatagramsDropped("heartbeat_forged", counters.forged.load());
      metrics_.DatagramsDropped("heartbeat_malformed", counters.malformed.load());
    });
  }

  void Describe(v1::GetControllerInfoResponse* out) {
    out->set_version(options_.version);
    WriteTime(started_, out->mutable_started());
    out->set_pid(::getpid());
    out->set_protocol_version(kProtocolVersion);
    out->set_listen(rpc_->address());
    out->set_ops_listen(ops_->address());
    out->set_heartbeat_listen(receiver_->address());
    out->set_data_directory(ToUtf8(options_.config.data_directory()));
    out->set_agents_connected(rpc_->agents_connected());
  }

  // For programs that started the controller with port 0.
  Status WriteEndpoints() {
    const std::string path = options_.config.data_directory() + "/endpoint";
    const std::string unfinished = path + ".new";
    {
      std::ofstream file(unfinished, std::ios::trunc);
      file << fmt::format("listen: \"{}\"\nops_listen: \"{}\"\nheartbeat_listen: \"{}\"\npid: {}\n", rpc_->address(),
                          ops_->address(), receiver_->address(), ::getpid());
      file.flush();
      if (!file) return FailedPrecondition(fmt::format("{} cannot be written: {}", path, strerror(errno)));
    }
    if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
      return FailedPrecondition(fmt::format("{} cannot be written: {}", path, strerror(errno)));
    }
    return OkStatus();
  }

  // ---- effects, on the loop's thread

  void Send(const SendCommand& effect) override { rpc_->Send(effect); }
  void Close(const CloseSession& effect) override { rpc_->Close(effect); }
  void Reply(const ReplyToOperator& effect) override { rpc_->Reply(effect); }
  void Probe(const StartProbe& effect) override {
    prober_.Probe(effect.address, effect.timeout,
                  [this, server = effect.server, incarnation = effect.incarnation](ProbeOutcome outcome) {
                    loop_->Post(ProbeFinished{server, incarnation, outcome});
                  });
  }
  void Notify(const Notice& effect, WallTime wall) override {
    LogKeys keys;
    if (effect.reason != Reason::kNone) keys.emplace_back("reason", ReasonName(effect.reason));
    if (!effect.server.empty()) keys.emplace_back("server", effect.server.value);
    if (!effect.job_name.empty()) keys.emplace_back("job", effect.job_name);
    keys.insert(keys.end(), effect.keys.begin(), effect.keys.end());
    Log(LevelOf(effect.level), effect.what, keys);
    if (!effect.job.empty()) watches_.Publish(effect.job, WatchedNotice{effect, wall});
  }
  void Forward(const ForwardLines& effect) override { watches_.Publish(effect.job, effect); }
  void Forward(const ForwardMetric& effect) override { watches_.Publish(effect.job, effect); }
  void Measure(const Measured& effect) override { metrics_.Measure(effect); }
  void Stepped(Duration duration) override { metrics_.StepTook(duration); }
  void Turned(size_t queue_length) override { metrics_.QueueLengthIs(queue_length); }
  void Appended(Duration duration) override { metrics_.AppendTook(duration); }

  const ShellOptions options_;
  Metrics metrics_;
  HeartbeatKeys keys_;
  WatchHub watches_;
  const WallTime started_;
  std::string heartbeat_address_;
  bool stopped_ = false;
  // In the order of their making; they end in Stop, whose order differs.
  std::unique_ptr<DataDirectory> directory_;
  std::unique_ptr<ThreadedLedgerStore> store_;
  std::unique_ptr<RpcServer> rpc_;
  std::unique_ptr<HeartbeatReceiver> receiver_;
  std::unique_ptr<OpsServer> ops_;
  std::unique_ptr<ControllerLoop> loop_;
  Prober prober_;
};

}  // namespace

Result<std::unique_ptr<ControllerShell>> ControllerShell::Start(ShellOptions options) {
  auto shell = std::make_unique<ShellImpl>(std::move(options));
  const Status status = shell->Begin();
  if (!status.ok()) return status;
  return std::unique_ptr<ControllerShell>(std::move(shell));
}

}  // namespace everstep
