#include "controller/io/ops/metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <map>
#include <mutex>
#include <sstream>

#include "proto/base/check.h"
#include "proto/base/reason.h"
#include "proto/model/names.h"

namespace everstep {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::ClientMetric;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Buckets = Histogram::BucketBoundaries;

const Buckets kShort = {0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5};
const Buckets kRecovery = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
const Buckets kDelay = {0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 3, 10};

struct MetricText {
  const char* name;
  const char* type;
  const char* labels;
  const char* help;
};

// The one table of names: the registry below takes its names and helps from here.
enum MetricIndex {
  kBuildInfo, kServers, kDevices, kJobGeneration, kJobPhase, kHeartbeats, kHeartbeatDelay, kVerdicts, kPlans,
  kPlanDuration, kRecoveries, kRecoveryDuration, kRecoveryPhaseDuration, kSparesPromoted, kStaleMessages,
  kCheckpointCommits, kCheckpointLastCommit, kLedgerAppend, kLoopQueue, kLoopStep, kRpcHandled, kBugs,
};
constexpr MetricText kMetrics[] = {
    {"everstep_build_info", "gauge", "version,revision", "Always 1; which build this is"},
    {"everstep_servers", "gauge", "state", "Servers in each state"},
    {"everstep_devices", "gauge", "state", "Devices: free and used on servers that take ranks, unavailable on others"},
    {"everstep_job_generation", "gauge", "job", "Newest generation that all ranks of the job were told to step in"},
    {"everstep_job_phase", "gauge", "job,phase", "1 for the recovery phase the job is in, 0 for the others"},
    {"everstep_heartbeats_received_total", "counter", "", "Heartbeats that the core took"},
    {"everstep_heartbeat_delay_seconds", "histogram", "", "Time since the server was last heard of, at each heartbeat"},
    {"everstep_detector_verdicts_total", "counter", "verdict,reason", "Verdicts on servers"},
    {"everstep_plans_total", "counter", "outcome,reason", "Plans made or refused"},
    {"everstep_plan_duration_seconds", "histogram", "", "Time of the step of the core that made or refused a plan"},
    {"everstep_recoveries_total", "counter", "outcome,reason", "Recoveries that ended"},
    {"everstep_recovery_duration_seconds", "histogram", "", "From the first evidence to Resume"},
    {"everstep_recovery_phase_duration_seconds", "histogram", "phase", "Time spent in each phase of a recovery"},
    {"everstep_spares_promoted_total", "counter", "", "Spares that took the place of a lost rank"},
    {"everstep_stale_messages_total", "counter", "kind", "Messages refused because they were stale or not authentic"},
    {"everstep_checkpoint_commits_total", "counter", "outcome", "Manifests committed, and copies of snapshots that failed"},
    {"everstep_checkpoint_last_commit_timestamp_seconds", "gauge", "job", "When the job's newest manifest was committed"},
    {"everstep_ledger_append_duration_seconds", "histogram", "", "From handing records to the store until they are durable"},
    {"everstep_loop_queue_length", "gauge", "", "Events taken in the loop's last turn"},
    {"everstep_loop_step_duration_seconds", "histogram", "", "Time of one step of the core with its effects"},
    {"everstep_rpc_server_handled_total", "counter", "method,code", "Admin calls answered"},
    {"everstep_bugs_total", "counter", "site", "Survivable surprises inside the controller; each deserves a report"},
};

Family<Counter>& CounterFamily(prometheus::Registry& registry, MetricIndex index) {
  return BuildCounter().Name(kMetrics[index].name).Help(kMetrics[index].help).Register(registry);
}
Family<Histogram>& HistogramFamily(prometheus::Registry& registry, MetricIndex index) {
  return BuildHistogram().Name(kMetrics[index].name).Help(kMetrics[index].help).Register(registry);
}
Family<Gauge>& GaugeFamily(prometheus::Registry& registry, MetricIndex index) {
  return BuildGauge().Name(kMetrics[index].name).Help(kMetrics[index].help).Register(registry);
}

MetricFamily NewFamily(MetricIndex index, MetricType type) {
  MetricFamily family;
  family.name = kMetrics[index].name;
  family.help = kMetrics[index].help;
  family.type = type;
  return family;
}

void Add(MetricFamily& family, std::vector<ClientMetric::Label> labels, double value) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (family.type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
}

std::string Word(std::string_view view) { return std::string(view); }

constexpr ServerState kServerStates[] = {ServerState::kJoining, ServerState::kChecking, ServerState::kSpare,
                                         ServerState::kActive,  ServerState::kSuspect,  ServerState::kDead,
                                         ServerState::kDraining, ServerState::kQuarantined};

void AddServers(const ClusterView& view, std::vector<MetricFamily>& out) {
  std::map<ServerState, int> servers;
  double free = 0, used = 0, unavailable = 0;
  for (const ServerView& server : view.servers) {
    ++servers[server.state];
    const auto devices = static_cast<double>(server.inventory.devices.size());
    if (server.state == ServerState::kSpare || server.state == ServerState::kActive) {
      free += server.devices_free;
      used += devices - server.devices_free;
    } else {
      unavailable += devices;
    }
  }
  MetricFamily by_state = NewFamily(kServers, MetricType::Gauge);
  for (ServerState state : kServerStates) {
    Add(by_state, {{"state", Word(ServerStateName(state))}}, servers[state]);
  }
  out.push_back(std::move(by_state));
  MetricFamily devices = NewFamily(kDevices, MetricType::Gauge);
  Add(devices, {{"state", "free"}}, free);
  Add(devices, {{"state", "used"}}, used);
  Add(devices, {{"state", "unavailable"}}, unavailable);
  out.push_back(std::move(devices));
}

void AddJobs(const ClusterView& view, std::vector<MetricFamily>& out) {
  MetricFamily generation = NewFamily(kJobGeneration, MetricType::Gauge);
  MetricFamily phase = NewFamily(kJobPhase, MetricType::Gauge);
  MetricFamily commit = NewFamily(kCheckpointLastCommit, MetricType::Gauge);
  for (const JobView& job : view.jobs) {
    if (job.entry.ended) continue;
    const std::string& name = job.entry.spec.name;
    Add(generation, {{"job", name}}, static_cast<double>(job.entry.resumed.value));
    for (int p = 0; p <= static_cast<int>(RecoveryPhase::kResume); ++p) {
      const auto candidate = static_cast<RecoveryPhase>(p);
      Add(phase, {{"job", name}, {"phase", Word(RecoveryPhaseName(candidate))}}, candidate == job.phase ? 1 : 0);
    }
    if (!job.entry.manifests.empty()) {
      Add(commit, {{"job", name}}, static_cast<double>(job.entry.manifests.back().committed.unix_microseconds) / 1e6);
    }
  }
  for (MetricFamily* family : {&generation, &phase, &commit}) {
    if (!family->metric.empty()) out.push_back(std::move(*family));
  }
}

}  // namespace

class Metrics::Impl {
 public:
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  Counter& heartbeats = CounterFamily(*registry, kHeartbeats).Add({});
  Histogram& heartbeat_delay = HistogramFamily(*registry, kHeartbeatDelay).Add({}, kDelay);
  Family<Counter>& verdicts = CounterFamily(*registry, kVerdicts);
  Family<Counter>& plans = CounterFamily(*registry, kPlans);
  Histogram& plan_duration = HistogramFamily(*registry, kPlanDuration).Add({}, kShort);
  Family<Counter>& recoveries = CounterFamily(*registry, kRecoveries);
  Histogram& recovery_duration = HistogramFamily(*registry, kRecoveryDuration).Add({}, kRecovery);
  Family<Histogram>& recovery_phase = HistogramFamily(*registry, kRecoveryPhaseDuration);
  Counter& spares_promoted = CounterFamily(*registry, kSparesPromoted).Add({});
  Family<Counter>& stale_messages = CounterFamily(*registry, kStaleMessages);
  Family<Counter>& checkpoint_commits = CounterFamily(*registry, kCheckpointCommits);
  Histogram& append = HistogramFamily(*registry, kLedgerAppend).Add({}, kShort);
  Gauge& queue = GaugeFamily(*registry, kLoopQueue).Add({});
  Histogram& step = HistogramFamily(*registry, kLoopStep).Add({}, kShort);
  Family<Counter>& rpc = CounterFamily(*registry, kRpcHandled);
  std::mutex mutex;
  std::map<std::string, uint64_t> datagrams;  // guarded by mutex: totals already counted
};

Metrics::Metrics(const std::string& version, const std::string& revision) : impl_(std::make_unique<Impl>()) {
  GaugeFamily(*impl_->registry, kBuildInfo).Add({{"version", version}, {"revision", revision}}).Set(1);
}

Metrics::~Metrics() = default;

void Metrics::Measure(const Measured& m) {
  const std::string reason(ReasonName(m.reason));
  switch (m.what) {
    case Measured::What::kHeartbeat: impl_->heartbeats.Increment(); break;
    case Measured::What::kHeartbeatDelay: impl_->heartbeat_delay.Observe(m.seconds); break;
    case Measured::What::kVerdict: impl_->verdicts.Add({{"verdict", m.label}, {"reason", reason}}).Increment(); break;
    case Measured::What::kPlan: impl_->plans.Add({{"outcome", m.label}, {"reason", reason}}).Increment(); break;
    case Measured::What::kPlanDuration: impl_->plan_duration.Observe(m.seconds); break;
    case Measured::What::kRecovery:
      impl_->recoveries.Add({{"outcome", m.label}, {"reason", reason}}).Increment();
      impl_->recovery_duration.Observe(m.seconds);
      break;
    case Measured::What::kRecoveryPhase:
      impl_->recovery_phase.Add({{"phase", Word(RecoveryPhaseName(m.phase))}}, kRecovery).Observe(m.seconds);
      break;
    case Measured::What::kSparePromoted: impl_->spares_promoted.Increment(); break;
    case Measured::What::kStaleMessage: impl_->stale_messages.Add({{"kind", m.label}}).Increment(); break;
    case Measured::What::kCheckpointCommit: impl_->checkpoint_commits.Add({{"outcome", m.label}}).Increment(); break;
  }
}

void Metrics::StepTook(Duration duration) { impl_->step.Observe(ToSeconds(duration)); }
void Metrics::AppendTook(Duration duration) { impl_->append.Observe(ToSeconds(duration)); }
void Metrics::QueueLengthIs(size_t length) { impl_->queue.Set(static_cast<double>(length)); }

void Metrics::RpcHandled(const char* method, StatusCode code) {
  impl_->rpc.Add({{"method", method}, {"code", StatusCodeName(code)}}).Increment();
}

void Metrics::DatagramsDropped(const char* kind, uint64_t total) {
  uint64_t more = 0;
  {
    std::lock_guard lock(impl_->mutex);
    uint64_t& counted = impl_->datagrams[kind];
    more = total - counted;
    counted = total;
  }
  if (more > 0) impl_->stale_messages.Add({{"kind", kind}}).Increment(static_cast<double>(more));
}

std::string Metrics::Text(const ClusterView* view) const {
  std::vector<MetricFamily> families = impl_->registry->Collect();
  MetricFamily bugs = NewFamily(kBugs, MetricType::Counter);
  Add(bugs, {{"site", "any"}}, static_cast<double>(g_bug_count.load(std::memory_order_relaxed)));
  families.push_back(std::move(bugs));
  if (view != nullptr) {
    AddServers(*view, families);
    AddJobs(*view, families);
  }
  std::erase_if(families, [](const MetricFamily& family) { return family.metric.empty(); });
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

std::vector<Metrics::Description> Metrics::Describe() {
  std::vector<Description> out;
  for (const MetricText& metric : kMetrics) out.push_back({metric.name, metric.type, metric.labels, metric.help});
  return out;
}

}  // namespace everstep
