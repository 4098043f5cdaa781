#include "controller/core/controller_core.h"

#include <algorithm>
#include <utility>

#include "controller/core/controller_impl.h"
#include "proto/base/check.h"

namespace everstep {

ControllerCore::ControllerCore(ControllerOptions options, LedgerState ledger)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(ledger))) {}
ControllerCore::~ControllerCore() = default;
Effects ControllerCore::Start(Now now) { return impl_->Start(now); }
Effects ControllerCore::Step(const Event& event, Now now) { return impl_->Step(event, now); }
Instant ControllerCore::NextDeadline() const { return impl_->NextDeadline(); }
const LedgerState& ControllerCore::ledger() const { return impl_->ledger(); }
ClusterView ControllerCore::MakeView(Now now) const { return impl_->MakeView(now); }

ControllerCore::Impl::Impl(ControllerOptions options, LedgerState ledger)
    : options_(std::move(options)), policy_(options_.policy), ledger_(std::move(ledger)), prng_(options_.seed) {}

Effects ControllerCore::Impl::Start(Now now) {
  now_ = now;
  effects_.clear();
  Append(TermStarted{ledger_.term.Next()});
  bool anything = false;
  for (const auto& [uid, entry] : ledger_.jobs) {
    JobRow& job = jobs_[uid];
    job.uid = uid;
    job.submitted_at = now_.instant;
    if (entry.ended) {
      job.stage = JobStage::kEnded;
      continue;
    }
    anything = true;
    BeginAdoption(job);
  }
  for (const auto& [id, entry] : ledger_.servers) {
    if (entry.newest <= entry.dead_upto) continue;
    // It may be alive: it has the grace period to report, then its silence counts.
    ServerRow& server = servers_[id];
    server.inventory.server = id;
    server.inventory.failure_domain = entry.failure_domain;
    server.incarnation = entry.newest;
    server.start_nonce = entry.start_nonce;
    server.liveness = ServerLiveness(now_.instant + policy_.adoption_grace - policy_.lease, entry.newest);
    server.reason = Reason::kStreamBroken;
    server.registered = now_.wall;
    server.registered_at = now_.instant;
  }
  if (anything) adoption_deadline_ = now_.instant + policy_.adoption_grace;
  registered_by_ = now_.instant + policy_.adoption_grace;
  next_judgement_ = servers_.empty() ? kNever : now_.instant + policy_.adoption_grace;
  Note(NoticeLevel::kInfo, Reason::kNone, "Controller started", {}, nullptr,
       {{"term", std::to_string(ledger_.term.value)}, {"jobs", std::to_string(jobs_.size())}});
  return std::exchange(effects_, {});
}

Effects ControllerCore::Impl::Step(const Event& event, Now now) {
  now_ = now;
  effects_.clear();
  struct Dispatch {
    Impl& impl;
    void operator()(const AgentConnected& e) { impl.OnAgentConnected(e); }
    void operator()(const AgentDisconnected& e) { impl.OnAgentDisconnected(e); }
    void operator()(const FactReceived& e) { impl.OnFact(e); }
    void operator()(const HeartbeatReceived& e) { impl.OnHeartbeat(e.heartbeat); }
    void operator()(const ProbeFinished& e) { impl.OnProbe(e); }
    void operator()(const OperatorCalled& e) { impl.OnOperator(e); }
    void operator()(const FenceBecameDurable& e) { impl.OnFenceDurable(e); }
    void operator()(const LoopLagged& e) {
      for (auto& [id, server] : impl.servers_) {
        server.liveness.OnLoopLag(e.lag);
        if (server.silent_since != kNever) server.silent_since += e.lag;  // the hold is not spent asleep
      }
    }
    void operator()(const TimeAdvanced&) {}
  };
  std::visit(Dispatch{*this}, event);

  if (now_.instant >= next_judgement_) JudgeServers();
  for (auto& [uid, job] : jobs_) {
    if (now_.instant >= job.deadline || now_.instant >= job.complaint_deadline) OnStageDeadline(job);
    if (now_.instant >= job.regrow_at) dirty_ = true;
    if (now_.instant >= job.drain_at) {
      job.drain_at = kNever;
      dirty_ = true;
    }
    if (now_.instant >= job.standby_check) CheckStandbys(job);
    if (job.standby_at > Instant{} && now_.instant >= job.standby_at) {
      job.standby_at = Instant{};
      dirty_ = true;
    }
  }
  if (adoption_deadline_ != kNever) {
    const bool final = now_.instant >= adoption_deadline_;
    bool open = false;
    for (auto& [uid, job] : jobs_) {
      if (job.stage == JobStage::kAdopting) CheckAdoption(job, final);
      open |= job.stage == JobStage::kAdopting;
    }
    if (!open || final) adoption_deadline_ = kNever;
  }
  if (dirty_) Reconcile();
  return std::exchange(effects_, {});
}

Instant ControllerCore::Impl::NextDeadline() const {
  Instant next = std::min(next_judgement_, adoption_deadline_);
  for (const auto& [uid, job] : jobs_) {
    next = std::min({next, job.deadline, job.complaint_deadline, job.regrow_at, job.standby_check, job.drain_at});
    if (job.stage != JobStage::kEnded && job.standby_at > now_.instant) next = std::min(next, job.standby_at);
  }
  return next;
}

void ControllerCore::Impl::Append(Record record) {
  const LedgerSequence sequence = ledger_.applied.Next();
  Apply(ledger_, sequence, record);
  effects_.push_back({LedgerSequence(0), AppendRecord{sequence, std::move(record)}});
}

void ControllerCore::Impl::Push(EffectBody body) { effects_.push_back({ledger_.applied, std::move(body)}); }

void ControllerCore::Impl::Send(ServerRow& server, Command command) {
  if (!server.session) return;  // sent again when it reconnects: ResendTo
  server.commands_sent = server.commands_sent.Next();
  Push(SendCommand{*server.session, {ledger_.term, server.commands_sent}, std::move(command)});
}

void ControllerCore::Impl::SendTo(const ServerId& id, Command command) {
  if (ServerRow* server = FindServer(id)) Send(*server, std::move(command));
}

void ControllerCore::Impl::Note(NoticeLevel level, Reason reason, std::string what, const ServerId& server,
                                const JobRow* job, std::vector<std::pair<std::string, std::string>> keys) {
  Notice notice{level, reason, std::move(what), server, job ? job->uid : JobUid(),
                job ? Entry(*job).spec.name : std::string(), std::move(keys)};
  if (level != NoticeLevel::kDebug) {
    events_.push_back({++event_sequence_, now_.wall, notice});
    while (events_.size() > static_cast<size_t>(policy_.events_kept)) events_.pop_front();
  }
  Push(std::move(notice));
}

const JobEntry& ControllerCore::Impl::Entry(const JobRow& job) const {
  auto it = ledger_.jobs.find(job.uid);
  EVERSTEP_CHECK(it != ledger_.jobs.end());
  return it->second;
}

JobRow* ControllerCore::Impl::FindJob(const JobUid& uid) {
  auto it = jobs_.find(uid);
  return it == jobs_.end() ? nullptr : &it->second;
}

std::vector<ProcessRow*> ControllerCore::Impl::ProcessesOf(const JobUid& job) {
  std::vector<ProcessRow*> rows;
  auto it = job_processes_.find(job);
  if (it == job_processes_.end()) return rows;
  for (ProcessId id : it->second) rows.push_back(&processes_.at(id));
  return rows;
}

std::vector<const ProcessRow*> ControllerCore::Impl::ProcessesOf(const JobUid& job) const {
  std::vector<const ProcessRow*> rows;
  auto it = job_processes_.find(job);
  if (it == job_processes_.end()) return rows;
  for (ProcessId id : it->second) rows.push_back(&processes_.at(id));
  return rows;
}

ProcessRow& ControllerCore::Impl::NewProcess(const JobUid& job, const ServerId& server, DeviceIndex device) {
  const ProcessId id((ledger_.term.value << 40) | ++process_counter_);
  ProcessRow& row = processes_[id];
  row.id = id;
  row.job = job;
  row.server = server;
  row.device = device;
  if (ServerRow* s = FindServer(server)) row.incarnation = s->incarnation;
  job_processes_[job].insert(id);
  server_processes_[server].insert(id);
  return row;
}

}  // namespace everstep
