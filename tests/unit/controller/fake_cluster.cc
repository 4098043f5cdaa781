#include "tests/unit/controller/fake_cluster.h"

#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace everstep::testing {

namespace {

std::string Describe(const Record& record) {
  struct Text {
    std::string operator()(const TermStarted& r) { return fmt::format("TermStarted {}", r.term.value); }
    std::string operator()(const ServerRegistered& r) {
      return fmt::format("ServerRegistered {} {}", r.server.value, r.incarnation.value);
    }
    std::string operator()(const ServerDied& r) {
      return fmt::format("ServerDied {} {} {}", r.server.value, r.incarnation.value, ReasonName(r.reason));
    }
    std::string operator()(const ServerDrainSet& r) { return fmt::format("ServerDrainSet {} {}", r.server.value, r.draining); }
    std::string operator()(const JobSubmitted& r) { return fmt::format("JobSubmitted {}", r.spec.name); }
    std::string operator()(const GenerationFenced& r) {
      return fmt::format("GenerationFenced {} {}{}", r.generation.value, ReasonName(r.reason), r.planned ? " planned" : "");
    }
    std::string operator()(const RecoveryPointDecided& r) {
      return fmt::format("RecoveryPointDecided {} ({},{})", r.generation.value, r.point.step.value, r.point.generation.value);
    }
    std::string operator()(const PlanMade& r) {
      return fmt::format("PlanMade {} {} ranks {}", r.generation.value, r.slots.size(), ReasonName(r.reason));
    }
    std::string operator()(const AssignmentMade& r) { return fmt::format("AssignmentMade {}", r.assignment.generation.value); }
    std::string operator()(const GenerationResumed& r) { return fmt::format("GenerationResumed {}", r.generation.value); }
    std::string operator()(const FinishReached& r) { return fmt::format("FinishReached {}", r.generation.value); }
    std::string operator()(const FailureCounted& r) {
      return fmt::format("FailureCounted step {} exit {} signal {}", r.step.value, r.exit_code, r.signal);
    }
    std::string operator()(const RecoveryEnded& r) { return fmt::format("RecoveryEnded {}", r.recovery.outcome); }
    std::string operator()(const ManifestCommitted& r) {
      return fmt::format("ManifestCommitted ({},{})", r.manifest.state.step.value, r.manifest.state.generation.value);
    }
    std::string operator()(const ManifestDropped& r) {
      return fmt::format("ManifestDropped ({},{})", r.state.step.value, r.state.generation.value);
    }
    std::string operator()(const JobEnded& r) { return fmt::format("JobEnded {} {}", ReasonName(r.reason), r.exit_code); }
    std::string operator()(const JobForgotten&) { return "JobForgotten"; }
  };
  return std::visit(Text{}, record);
}

std::string Describe(const Command& command) {
  struct Text {
    std::string operator()(const Welcome& c) { return fmt::format("Welcome {} keep {}", c.incarnation.value, c.keep.size()); }
    std::string operator()(const Refuse& c) { return c.permanent ? "Refuse for good" : "Refuse"; }
    std::string operator()(const SpawnProcess& c) { return fmt::format("Spawn{}", c.standby ? " standby" : ""); }
    std::string operator()(const KillProcess&) { return "Kill"; }
    std::string operator()(const FenceProcesses& c) { return fmt::format("Fence {}", c.generation.value); }
    std::string operator()(const PrepareProcesses& c) { return fmt::format("Prepare {}", c.generation.value); }
    std::string operator()(const AssignProcesses& c) { return fmt::format("Assign {}", c.assignment.generation.value); }
    std::string operator()(const ResumeProcesses& c) { return fmt::format("Resume {}", c.generation.value); }
    std::string operator()(const ProtectedStepRaised& c) { return fmt::format("Protected {}", c.step.value); }
    std::string operator()(const CopySnapshot& c) {
      return fmt::format("Copy ({},{}) shard {} from {}", c.source.state.step.value, c.source.state.generation.value,
                         c.source.shard.value, c.source.server.value);
    }
    std::string operator()(const DropSnapshots&) { return "Drop"; }
    std::string operator()(const ReleaseJob&) { return "Release"; }
    std::string operator()(const AcknowledgeFacts& c) { return fmt::format("Acknowledge {}", c.upto.value); }
    std::string operator()(const Probe&) { return "Probe"; }
  };
  return std::visit(Text{}, command);
}

std::string Key(const char* what, const JobUid& job, Generation generation) {
  return fmt::format("{} {} {}", what, job.value, generation.value);
}

}  // namespace

FakeCluster::FakeCluster(Policy policy, uint64_t seed) {
  options_.policy = policy;
  options_.seed = seed;
  options_.heartbeat_address = "127.0.0.1:1";
  core_ = std::make_unique<ControllerCore>(options_, LedgerState{});
  Perform(core_->Start(Time()));
}

// ---- the world

FakeAgent& FakeCluster::AddServer(const std::string& name, int devices, const std::string& domain) {
  FakeAgent& agent = agents_[ServerId(name)];
  agent.inventory.server = ServerId(name);
  agent.inventory.failure_domain = domain;
  agent.inventory.host = name + ".test";
  agent.inventory.probe_address = name + ".test:1";
  agent.inventory.transfer_address = name + ".test:2";
  for (int i = 0; i < devices; ++i) agent.inventory.devices.push_back({DeviceIndex(i), DeviceKind::kCpuSlot, "cpu", 0, 1.0});
  agent.nonce = ++nonce_counter_;
  Connect(name);
  return agent;
}

void FakeCluster::AddServers(int count, int devices) {
  for (int i = 1; i <= count; ++i) AddServer(fmt::format("s{}", i), devices);
}

void FakeCluster::Connect(const std::string& name, uint32_t protocol_version) {
  FakeAgent& agent = Agent(name);
  agent.session = SessionId(++session_counter_);
  agent.refused = false;
  sessions_[*agent.session] = {agent.inventory.server, 0};
  AgentHello hello;
  hello.protocol_version = protocol_version;
  hello.inventory = agent.inventory;
  hello.start_nonce = agent.nonce;
  hello.incarnation = agent.incarnation;
  for (const auto& [id, p] : agent.processes) {
    ProcessStatus status;
    status.job = p.spawn.job;
    status.process = id;
    status.device = p.spawn.device;
    status.pid = p.pid;
    status.joined = p.joined;
    status.mesh_address = fmt::format("{}:{}", agent.inventory.host, p.pid);
    status.promised = p.promised;
    status.collected = p.collected;
    if (p.collected) status.report = p.Report();
    status.assigned = p.assigned;
    hello.processes.push_back(status);
  }
  hello.snapshots = agent.snapshots;
  Feed(AgentConnected{*agent.session, hello});
}

void FakeCluster::Disconnect(const std::string& name) {
  FakeAgent& agent = Agent(name);
  ASSERT_TRUE(agent.session.has_value());
  const SessionId session = *agent.session;
  agent.session.reset();
  agent.held.clear();
  Feed(AgentDisconnected{session});
}

void FakeCluster::RestartAgent(const std::string& name) {
  FakeAgent& agent = Agent(name);
  if (agent.session) Disconnect(name);
  agent.nonce = ++nonce_counter_;
  agent.incarnation = Incarnation(0);
  agent.processes.clear();
  agent.unacknowledged.clear();
  agent.snapshots.clear();
  agent.facts = 0;
  agent.heartbeats = 0;
  Connect(name);
}

void FakeCluster::Vanish(const std::string& name) {
  for (const auto& [id, p] : Agent(name).processes) occupied_.erase(id);
  Agent(name).processes.clear();
}

void FakeCluster::FreezeServer(const std::string& name) {
  FakeAgent& agent = Agent(name);
  agent.beats = agent.hears = false;
  agent.probe = ProbeOutcome::kTimedOut;
}

void FakeCluster::Wake(const std::string& name) {
  FakeAgent& agent = Agent(name);
  agent.beats = agent.hears = true;
  agent.probe = ProbeOutcome::kConnected;
  for (const Command& command : std::exchange(agent.held, {})) Obey(agent, command);
  Pump();
}

void FakeCluster::RestartController() {
  for (auto& [id, agent] : agents_) agent.session.reset();
  sessions_.clear();
  queue_.clear();
  timers_.clear();
  core_ = std::make_unique<ControllerCore>(options_, replay_);
  Perform(core_->Start(Time()));
  Pump();
}

void FakeCluster::ConnectAll() {
  for (auto& [id, agent] : agents_) {
    if (!agent.session && agent.hears) Connect(id.value);
  }
}

void FakeCluster::Beat(const std::string& name) {
  FakeAgent& agent = Agent(name);
  Heartbeat beat;
  beat.server = agent.inventory.server;
  beat.incarnation = agent.incarnation;
  beat.sequence = ++agent.heartbeats;
  for (const auto& [id, p] : agent.processes) {
    if (p.resumed.value != 0) beat.votes.push_back({id, p.resumed, p.vote_passed, RankPhase::kComputing});
  }
  Feed(HeartbeatReceived{beat});
}

void FakeCluster::Advance(Duration by) {
  const Instant target = now_ + by;
  while (true) {
    Instant next = std::min({core_->NextDeadline(), next_beat_, target});
    for (const auto& [at, event] : timers_) next = std::min(next, at);
    now_ = std::max(now_, next);
    for (size_t i = 0; i < timers_.size();) {
      if (timers_[i].first > now_) {
        ++i;
        continue;
      }
      const Event event = timers_[i].second;
      timers_.erase(timers_.begin() + static_cast<std::ptrdiff_t>(i));
      Feed(event);
    }
    if (core_->NextDeadline() <= now_) {
      Feed(TimeAdvanced{});
      ASSERT_GT(core_->NextDeadline(), now_) << "a deadline that its own event does not clear spins the loop";
    }
    if (next_beat_ <= now_) {
      next_beat_ = now_ + options_.policy.heartbeat_interval;
      for (auto& [id, agent] : agents_) {
        if (agent.beats && agent.incarnation.value != 0) Beat(id.value);
      }
    }
    if (now_ >= target && core_->NextDeadline() > now_) return;
  }
}

// ---- facts

void FakeCluster::Say(FakeAgent& agent, Fact fact) {
  if (const auto* exited = std::get_if<ProcessExited>(&fact)) occupied_.erase(exited->process);
  if (const auto* failed = std::get_if<ProcessStartFailed>(&fact)) occupied_.erase(failed->process);
  const FactSequence sequence(++agent.facts);
  agent.unacknowledged.emplace_back(sequence, fact);
  if (agent.session) queue_.emplace_back(Event{FactReceived{*agent.session, sequence, std::move(fact)}});
}

void FakeCluster::Exit(ProcessId id, int exit_code, int signal, bool finished) {
  for (auto& [name, agent] : agents_) {
    auto it = agent.processes.find(id);
    if (it == agent.processes.end()) continue;
    const FakeProcess& p = it->second;
    ProcessExited exited{p.spawn.job, id, exit_code, signal, finished, {}, {}, {}};
    exited.progress.memory_valid = p.memory_valid;
    exited.progress.applied = p.applied;
    exited.progress.generation = p.resumed;
    exited.progress.vote_passed = p.vote_passed;
    exited.progress.phase = p.resumed.value != 0 ? RankPhase::kComputing : RankPhase::kJoining;
    agent.processes.erase(it);
    Say(agent, exited);
    Pump();
    return;
  }
  FAIL() << "no process " << id.value;
}

void FakeCluster::StepTo(const JobUid& job, int64_t step) {
  std::set<std::string> servers;
  for (const Located& m : Members(job)) {
    ASSERT_EQ(m.process->resumed, Entry(job).resumed) << "a member is not stepping";
    m.process->applied = {Step(step), m.process->resumed};
    m.process->vote_passed = Step(step);
    m.process->gradients = Generation(0);
    servers.insert(m.server);
  }
  for (const std::string& server : servers) {
    if (Agent(server).beats) Beat(server);
  }
}

void FakeCluster::Hold(const std::string& server, const JobUid& job, StateId state, int shard, SnapshotTier tier) {
  FakeAgent& agent = Agent(server);
  SnapshotInfo info{state, ShardIndex(shard), tier, ServerId(server), 1000, {uint64_t(state.step.value), uint64_t(shard)}};
  agent.snapshots.emplace_back(job, info);
  Say(agent, SnapshotHeld{job, info});
  Pump();
}

void FakeCluster::LeaveAtBoundary(const JobUid& job, int64_t step) {
  const Generation pending = Entry(job).fenced;
  for (const Located& m : Members(job)) {
    m.process->applied = {Step(step), m.process->resumed};
    m.process->vote_passed = Step(step);
    m.process->gradients = Generation(0);
    m.process->promised = pending;
    m.process->collected = true;
    Say(Agent(m.server), ProcessCollected{job, m.id, {pending, m.process->Report(), true}});
  }
  Pump();
}

void FakeCluster::Feed(const Event& event) {
  queue_.emplace_back(event);
  Pump();
}

// ---- operators

ReplyToOperator FakeCluster::Call(OperatorRequest request, const std::string& request_id, bool dry_run) {
  const CallId id(++call_counter_);
  Feed(OperatorCalled{id, RequestId(request_id), "tester", dry_run, std::move(request)});
  for (const ReplyToOperator& reply : replies_) {
    if (reply.call == id) return reply;
  }
  ADD_FAILURE() << "the call was not answered";
  return {};
}

ReplyToOperator FakeCluster::Submit(JobSpec spec, const std::string& request) { return Call(SubmitJob{std::move(spec)}, request); }

JobUid FakeCluster::Run(JobSpec spec) {
  const ReplyToOperator reply = Submit(std::move(spec));
  EXPECT_TRUE(reply.status.ok()) << reply.status.ToString();
  return reply.job;
}

ReplyToOperator FakeCluster::Cancel(const std::string& job) { return Call(CancelJob{job}); }
ReplyToOperator FakeCluster::Drain(const std::string& server, bool draining) {
  return Call(SetDrain{ServerId(server), draining});
}

// ---- what became of it

FakeCluster::Located FakeCluster::RankOf(const JobUid& job, int rank) {
  for (const Located& m : Members(job)) {
    if (m.process->rank.value == rank) return m;
  }
  ADD_FAILURE() << "no live process of rank " << rank;
  static FakeProcess none;
  return {ProcessId(0), "", &none};
}

std::vector<FakeCluster::Located> FakeCluster::Members(const JobUid& job) {
  std::set<ProcessId> named;
  const JobEntry& entry = Entry(job);
  if (entry.assignment) {
    for (const RankAssignment& r : entry.assignment->ranks) named.insert(r.process);
  } else if (entry.plan) {
    for (const PlannedSlot& s : entry.plan->slots) named.insert(s.process);
  }
  std::vector<Located> found;
  for (auto& [id, agent] : agents_) {
    for (auto& [pid, p] : agent.processes) {
      if (named.contains(pid)) found.push_back({pid, id.value, &p});
    }
  }
  std::sort(found.begin(), found.end(), [](const Located& a, const Located& b) { return a.process->rank < b.process->rank; });
  return found;
}

JobView FakeCluster::View(const JobUid& job) const {
  for (const JobView& view : core_->MakeView(Time()).jobs) {
    if (view.entry.uid == job) return view;
  }
  ADD_FAILURE() << "no such job";
  return {};
}

ServerView FakeCluster::Server(const std::string& name) const {
  for (const ServerView& view : core_->MakeView(Time()).servers) {
    if (view.server.value == name) return view;
  }
  ADD_FAILURE() << "no such server";
  return {};
}

std::map<int, std::string> FakeCluster::Places(const JobUid& job) {
  std::map<int, std::string> places;
  const JobEntry& entry = Entry(job);
  if (entry.spec.opaque) {
    if (entry.plan) for (const PlannedSlot& s : entry.plan->slots) places[s.rank.value] = s.server.value;
  } else if (entry.assignment) {
    for (const RankAssignment& r : entry.assignment->ranks) places[r.rank.value] = r.server.value;
  }
  return places;
}

std::vector<std::string> FakeCluster::Lines(const std::string& word) const {
  std::vector<std::string> lines;
  for (const std::string& line : trace_) {
    if (line.find(word) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

void FakeCluster::Forget() {
  trace_.clear();
  sent_.clear();
  replies_.clear();
}

std::vector<std::string> FakeCluster::Orders() const {
  std::vector<std::string> lines;
  for (const std::string& line : trace_) {
    if (line.starts_with("notice") || line.find("Acknowledge") != std::string::npos) continue;
    lines.push_back(line);
  }
  return lines;
}

// ---- effects, with the checks

void FakeCluster::Perform(const Effects& effects) {
  for (const Effect& effect : effects) {
    ASSERT_LE(effect.after, replay_.applied) << "an effect waits for a record that comes after it";
    if (const auto* append = std::get_if<AppendRecord>(&effect.body)) {
      ASSERT_EQ(append->sequence.value, replay_.applied.value + 1);
      Apply(replay_, append->sequence, append->record);
      log_.push_back(append->record);
      trace_.push_back("append " + Describe(append->record));
      const LedgerSequence at = append->sequence;
      if (const auto* r = std::get_if<GenerationFenced>(&append->record)) {
        ASSERT_GT(r->generation, highest_[r->job]) << "generations rise";
        highest_[r->job] = r->generation;
        made_[Key("fenced", r->job, r->generation)] = at;
      } else if (const auto* r = std::get_if<RecoveryPointDecided>(&append->record)) {
        made_[Key("point", r->job, r->generation)] = at;
      } else if (const auto* r = std::get_if<PlanMade>(&append->record)) {
        ASSERT_TRUE(made_.contains(Key("point", r->job, r->generation))) << "a plan before its recovery point";
        std::set<Rank> ranks;
        std::set<std::pair<ServerId, DeviceIndex>> devices;
        for (const PlannedSlot& slot : r->slots) {
          planned_[slot.process] = at;
          ASSERT_TRUE(ranks.insert(slot.rank).second);
          ASSERT_TRUE(devices.insert({slot.server, slot.device}).second) << "a device planned twice";
        }
      } else if (const auto* r = std::get_if<AssignmentMade>(&append->record)) {
        ASSERT_TRUE(made_.contains(Key("point", r->assignment.job, r->assignment.generation)));
        ASSERT_FALSE(made_.contains(Key("assigned", r->assignment.job, r->assignment.generation)))
            << "one plan per generation number";
        made_[Key("assigned", r->assignment.job, r->assignment.generation)] = at;
      } else if (const auto* r = std::get_if<GenerationResumed>(&append->record)) {
        made_[Key("resumed", r->job, r->generation)] = at;
      } else if (const auto* r = std::get_if<JobEnded>(&append->record)) {
        made_[Key("ended", r->job, Generation(0))] = at;
      } else if (const auto* r = std::get_if<JobSubmitted>(&append->record)) {
        made_[Key("submitted", r->job, Generation(0))] = at;
      } else if (const auto* r = std::get_if<ServerRegistered>(&append->record)) {
        made_[fmt::format("registered {} {}", r->server.value, r->incarnation.value)] = at;
      } else if (const auto* r = std::get_if<ServerDied>(&append->record)) {
        made_[fmt::format("died {} {}", r->server.value, r->incarnation.value)] = at;
        std::erase_if(occupied_, [&](const auto& o) { return o.second.server == r->server; });
      }
    } else if (const auto* send = std::get_if<SendCommand>(&effect.body)) {
      CheckCommand(effect, *send);
    } else if (const auto* close = std::get_if<CloseSession>(&effect.body)) {
      auto it = sessions_.find(close->session);
      if (it != sessions_.end()) trace_.push_back(it->second.first.value + " closed");
    } else if (const auto* probe = std::get_if<StartProbe>(&effect.body)) {
      trace_.push_back(probe->server.value + " port probed");
      ASSERT_FALSE(probe->address.empty());
      auto agent = agents_.find(probe->server);
      if (agent == agents_.end()) continue;
      const Event done = ProbeFinished{probe->server, probe->incarnation, agent->second.probe};
      if (agent->second.probe == ProbeOutcome::kTimedOut) {
        timers_.emplace_back(now_ + probe->timeout, done);
      } else {
        queue_.emplace_back(done);
      }
    } else if (const auto* confirm = std::get_if<ConfirmFence>(&effect.body)) {
      const Event durable = FenceBecameDurable{confirm->job, confirm->generation};
      if (sync > Duration(0)) {
        timers_.emplace_back(now_ + sync, durable);
      } else {
        queue_.emplace_back(durable);
      }
    } else if (const auto* reply = std::get_if<ReplyToOperator>(&effect.body)) {
      replies_.push_back(*reply);
    } else if (const auto* notice = std::get_if<Notice>(&effect.body)) {
      std::string line = "notice " + notice->what + " " + std::string(ReasonName(notice->reason));
      if (!notice->server.empty()) line += " " + notice->server.value;
      for (const auto& [key, value] : notice->keys) line += " " + key + "=" + value;
      trace_.push_back(std::move(line));
    }
  }
  const bool appended = std::any_of(effects.begin(), effects.end(), [](const Effect& effect) {
    return std::holds_alternative<AppendRecord>(effect.body);
  });
  if (appended && ++appended_steps_ % compare_every == 0) {
    ASSERT_TRUE(replay_ == core_->ledger()) << "replay equals live";
  }
}

void FakeCluster::CheckCommand(const Effect& effect, const SendCommand& send) {
  auto session = sessions_.find(send.session);
  ASSERT_NE(session, sessions_.end());
  const ServerId server = session->second.first;
  ASSERT_EQ(send.header.sequence.value, ++session->second.second) << "command sequences rise by one within a stream";
  ASSERT_EQ(send.header.term, replay_.term);
  trace_.push_back(server.value + " " + Describe(send.command));
  sent_.push_back({server, effect.after, send.command});
  auto requires_record = [&](const std::string& key) {
    auto made = made_.find(key);
    ASSERT_NE(made, made_.end()) << Describe(send.command) << " without record " << key;
    ASSERT_GE(effect.after, made->second) << Describe(send.command) << " leaves before its record is durable";
  };
  auto current = [&](const JobUid& job, Generation generation) {
    ASSERT_EQ(generation, replay_.jobs.at(job).fenced) << Describe(send.command) << " of an older generation";
  };
  if (const auto* c = std::get_if<Welcome>(&send.command)) {
    ASSERT_EQ(send.header.sequence.value, 1u) << "nothing is obeyed before Welcome";
    requires_record(fmt::format("registered {} {}", server.value, c->incarnation.value));
  } else if (const auto* c = std::get_if<FenceProcesses>(&send.command)) {
    requires_record(Key("fenced", c->job, c->generation));
    current(c->job, c->generation);
  } else if (const auto* c = std::get_if<PrepareProcesses>(&send.command)) {
    requires_record(Key("fenced", c->job, c->generation));
    current(c->job, c->generation);
  } else if (const auto* c = std::get_if<AssignProcesses>(&send.command)) {
    requires_record(Key("assigned", c->assignment.job, c->assignment.generation));
    current(c->assignment.job, c->assignment.generation);
    ASSERT_TRUE(replay_.jobs.at(c->assignment.job).assignment == c->assignment);
  } else if (const auto* c = std::get_if<ResumeProcesses>(&send.command)) {
    requires_record(Key("resumed", c->job, c->generation));
    current(c->job, c->generation);
  } else if (const auto* c = std::get_if<ReleaseJob>(&send.command)) {
    requires_record(Key("ended", c->job, Generation(0)));
  } else if (const auto* c = std::get_if<SpawnProcess>(&send.command)) {
    requires_record(Key("submitted", c->job, Generation(0)));
    if (auto plan = planned_.find(c->process); plan != planned_.end() && !c->standby) {
      ASSERT_GE(effect.after, plan->second) << "a planned process is started before the plan is durable";
    }
    for (const auto& [other, device] : occupied_) {
      ASSERT_TRUE(other == c->process || device.server != server || device.device != c->device)
          << server.value << " device " << c->device.value << " is used again before its process is reaped";
    }
    occupied_[c->process] = {server, c->device};
  } else if (const auto* c = std::get_if<KillProcess>(&send.command)) {
    requires_record(Key("submitted", c->job, Generation(0)));
  }
  queue_.emplace_back(Delivery{server, send.session, send.command});
}

void FakeCluster::Pump() {
  for (int turns = 0; !queue_.empty(); ++turns) {
    ASSERT_LT(turns, 20000) << "the cluster keeps itself busy without anything happening";
    const auto next = queue_.front();
    queue_.pop_front();
    if (const auto* event = std::get_if<Event>(&next)) {
      Perform(core_->Step(*event, Time()));
      continue;
    }
    const auto& delivery = std::get<Delivery>(next);
    FakeAgent& agent = agents_.at(delivery.server);
    if (agent.session != delivery.session) continue;  // its stream is gone
    if (agent.hears) {
      Obey(agent, delivery.command);
    } else {
      agent.held.push_back(delivery.command);
    }
  }
}

void FakeCluster::Reap(FakeAgent& agent, ProcessId id) {
  auto it = agent.processes.find(id);
  if (it == agent.processes.end()) return;
  ProcessExited exited{it->second.spawn.job, id, 0, 9, false, {}, {}, {}};
  exited.progress.memory_valid = it->second.memory_valid;
  exited.progress.applied = it->second.applied;
  exited.progress.generation = it->second.resumed;
  exited.progress.vote_passed = it->second.vote_passed;
  agent.processes.erase(it);
  Say(agent, exited);
}

void FakeCluster::Obey(FakeAgent& agent, const Command& command) {
  if (const auto* c = std::get_if<Welcome>(&command)) {
    if (agent.incarnation != c->incarnation && agent.incarnation.value != 0) Vanish(agent.inventory.server.value);
    agent.incarnation = c->incarnation;
    std::vector<ProcessId> strangers;
    for (const auto& [id, p] : agent.processes) {
      if (std::find(c->keep.begin(), c->keep.end(), id) == c->keep.end()) strangers.push_back(id);
    }
    for (ProcessId id : strangers) Reap(agent, id);
    for (const auto& [sequence, fact] : agent.unacknowledged) {
      queue_.emplace_back(Event{FactReceived{*agent.session, sequence, fact}});
    }
  } else if (std::holds_alternative<Refuse>(command)) {
    agent.refused = true;
    Vanish(agent.inventory.server.value);
    agent.session.reset();
  } else if (const auto* c = std::get_if<SpawnProcess>(&command)) {
    if (!agent.starts || agent.processes.contains(c->process)) return;
    FakeProcess& p = agent.processes[c->process];
    p.spawn = *c;
    p.pid = ++pid_counter_;
    p.rank = c->rank;
    if (c->spec.opaque) p.resumed = c->generation;
    Say(agent, ProcessStarted{c->job, c->process, p.pid});
    if (agent.joins && !c->spec.opaque) {
      p.joined = true;
      Say(agent, ProcessJoined{c->job, c->process, p.pid, fmt::format("{}:{}", agent.inventory.host, p.pid)});
    }
  } else if (const auto* c = std::get_if<KillProcess>(&command)) {
    auto it = agent.processes.find(c->process);
    if (it == agent.processes.end()) {
      Say(agent, ProcessExited{c->job, c->process, 0, 9, false, {}, {}, {}});
      return;
    }
    it->second.kill_ordered = true;
    if (agent.reaps) Reap(agent, c->process);
  } else if (const auto* c = std::get_if<FenceProcesses>(&command)) {
    if (!agent.collects) return;
    for (ProcessId id : c->processes) {
      auto it = agent.processes.find(id);
      if (it == agent.processes.end()) continue;
      it->second.promised = c->generation;
      it->second.collected = true;
      it->second.resumed = Generation(0);
      Say(agent, ProcessCollected{c->job, id, {c->generation, it->second.Report(), false}});
    }
  } else if (const auto* c = std::get_if<AssignProcesses>(&command)) {
    const Assignment& a = c->assignment;
    for (const RankAssignment& r : a.ranks) {
      auto it = agent.processes.find(r.process);
      if (it == agent.processes.end()) continue;
      FakeProcess& p = it->second;
      ASSERT_EQ(r.server, agent.inventory.server);
      ASSERT_EQ(r.device, p.spawn.device);
      ASSERT_TRUE(p.joined) << "only a process that waits in Join is assigned";
      if (p.assigned == a.generation) continue;  // told again
      const Step point = a.recovery_point.step;
      switch (r.action) {
        case RestoreAction::kKeep:
          ASSERT_TRUE(p.memory_valid);
          ASSERT_EQ(p.applied, a.recovery_point);
          break;
        case RestoreAction::kRollForward:
          ASSERT_TRUE(p.memory_valid);
          ASSERT_EQ(p.applied.step.Next(), point);
          ASSERT_EQ(p.gradients, a.recovery_point.generation);
          p.applied = a.recovery_point;
          break;
        case RestoreAction::kFetchFromRank: {
          const RankAssignment& source = a.ranks.at(static_cast<size_t>(r.source_rank.value));
          ASSERT_EQ(source.shard(), r.shard());
          ASSERT_TRUE(source.action == RestoreAction::kKeep || source.action == RestoreAction::kRollForward);
          p.applied = a.recovery_point;
          break;
        }
        case RestoreAction::kFetchFromSnapshot:
          ASSERT_FALSE(r.sources.empty());
          for (const SnapshotSource& s : r.sources) {
            ASSERT_EQ(s.state, a.recovery_point);
            ASSERT_EQ(s.shard, r.shard());
          }
          p.applied = a.recovery_point;
          break;
        case RestoreAction::kInitialize:
          ASSERT_EQ(point, Step(0));
          p.applied = {};
          break;
      }
      p.memory_valid = true;
      p.gradients = Generation(0);
      p.collected = false;
      p.assigned = a.generation;
      p.promised = std::max(p.promised, a.generation);
      p.rank = r.rank;
      p.shard = r.shard();
      if (agent.connects) Say(agent, ProcessConnected{a.job, r.process, {a.generation}});
      if (agent.connects && agent.readies) {
        const Digest128 digest = p.digest.value_or(Digest128{static_cast<uint64_t>(p.applied.step.value) + 1,
                                                             static_cast<uint64_t>(p.shard.value)});
        if (!p.digest_stays) p.digest.reset();
        Say(agent, ProcessReady{a.job, r.process, {a.generation, digest, 0, "kept"}});
      }
    }
  } else if (const auto* c = std::get_if<ResumeProcesses>(&command)) {
    for (auto& [id, p] : agent.processes) {
      if (p.spawn.job == c->job && p.assigned == c->generation) p.resumed = c->generation;
    }
  } else if (const auto* c = std::get_if<ReleaseJob>(&command)) {
    std::vector<ProcessId> ours;
    for (auto& [id, p] : agent.processes) {
      if (p.spawn.job == c->job) ours.push_back(id);
      p.kill_ordered |= p.spawn.job == c->job;
    }
    if (agent.reaps) for (ProcessId id : ours) Reap(agent, id);
  } else if (const auto* c = std::get_if<CopySnapshot>(&command)) {
    if (agent.copies_fail) {
      SnapshotInfo info{c->source.state, c->source.shard, c->to, agent.inventory.server, c->bytes, c->digest};
      Say(agent, SnapshotLost{c->job, info, Reason::kStorageFailed, "no room"});
    }
    if (!agent.copies || agent.copies_fail) return;
    SnapshotInfo info{c->source.state, c->source.shard, c->to, agent.inventory.server, c->bytes, c->digest};
    agent.snapshots.emplace_back(c->job, info);
    Say(agent, SnapshotHeld{c->job, info});
  } else if (const auto* c = std::get_if<DropSnapshots>(&command)) {
    for (const SnapshotInfo& s : c->snapshots) {
      std::erase_if(agent.snapshots, [&](const auto& held) {
        return held.first == c->job && held.second.state == s.state && held.second.shard == s.shard &&
               held.second.tier == s.tier;
      });
    }
  } else if (const auto* c = std::get_if<AcknowledgeFacts>(&command)) {
    while (!agent.unacknowledged.empty() && agent.unacknowledged.front().first <= c->upto) agent.unacknowledged.pop_front();
  } else if (const auto* c = std::get_if<Probe>(&command)) {
    Say(agent, ProbeReturned{c->nonce});
  }
}

JobSpec Spec(const std::string& name, int wanted, int min) {
  JobSpec spec;
  spec.name = name;
  spec.program = "/opt/train";
  spec.servers_wanted = wanted;
  spec.servers_min = min;
  spec.micro_batch_count = 8;
  return spec;
}

}  // namespace everstep::testing
