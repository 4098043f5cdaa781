// The controller's shell: its loop, its disk, its sessions and probes.
#include <algorithm>

#include <fmt/format.h>

#include "controller/sim/describe.h"
#include "controller/sim/world.h"
#include "proto/base/check.h"

namespace everstep::sim {

void World::StartController() {
  if (core_) return;
  ++controller_life_;
  controller_stopped_ = false;
  decided_ = durable_ = disk_.Replay();
  durable_upto_ = durable_.applied;
  highest_term_ = std::max(highest_term_, durable_.term);
  ControllerOptions options;
  options.policy = options_.policy;
  options.heartbeat_address = "controller";
  options.seed = prng_.Next();
  core_ = std::make_unique<ControllerCore>(options, durable_);
  Trace("controller starts");
  Tell([](Checker& c) { c.OnControllerStarted(); });
  Perform(TimeAdvanced{}, core_->Start(NowOfController()));
  ArmController();
  for (auto& [id, agent] : agents_) {
    SettleWell(agent);
    if (agent.alive && !agent.session) LinkUp(agent, network_.Link() + Milliseconds(20));
  }
}

void World::KillController() {
  if (!core_) return;
  Fault("controller killed", "controller dies");
  ++controller_life_;
  core_.reset();
  disk_.Crash(prng_);
  held_.clear();
  controller_deferred_.clear();
  controller_stopped_ = false;
  syncing_ = false;
  controller_armed_ = kNever;
  controller_crash_in_.reset();
  for (auto& [id, agent] : agents_) {
    if (agent.session) BreakStream(agent, true);
  }
  sessions_.clear();
}

void World::StopController() {
  if (!core_ || controller_stopped_) return;
  Fault("controller stopped", "controller is stopped");
  controller_stopped_ = true;
  controller_stopped_at_ = now_;
}

void World::WakeController() {
  if (!core_ || !controller_stopped_) return;
  Trace("controller wakes");
  controller_stopped_ = false;
  // The loop sees its own lag first, then what queued up, and its timers last.
  for (auto& [id, agent] : agents_) SettleWell(agent);
  std::deque<std::function<void()>> deferred;
  deferred.swap(controller_deferred_);
  const uint64_t life = controller_life_;
  FeedController(LoopLagged{now_ - controller_stopped_at_});
  for (auto& run : deferred) {
    if (life != controller_life_) return;
    run();
  }
  if (core_ == nullptr) return;
  FeedController(TimeAdvanced{});
  controller_armed_ = kNever;
  ArmController();
}

void World::FeedController(const Event& event) {
  if (!core_) return;
  if (controller_stopped_) {
    controller_deferred_.push_back([this, event] { FeedController(event); });
    return;
  }
  Tell([&](Checker& c) { c.OnEvent(event); });
  timers_due_ = core_->NextDeadline() <= controller_clock_.Local(now_);
  Perform(event, core_->Step(event, NowOfController()));
  ArmController();
}

void World::ArmController() {
  if (!core_) return;
  const Instant deadline = controller_clock_.World(core_->NextDeadline());
  if (deadline == kNever || deadline >= controller_armed_) return;
  controller_armed_ = std::max(deadline, now_);
  const uint64_t life = controller_life_;
  const Instant armed = controller_armed_;
  At(armed, [this, life, armed] {
    if (life != controller_life_ || armed != controller_armed_ || controller_stopped_) return;
    controller_armed_ = kNever;
    FeedController(TimeAdvanced{});
  });
}

// True: the controller died at this boundary.
bool World::CountControllerEffect() {
  if (!controller_crash_in_ || --*controller_crash_in_ > 0) return false;
  KillController();
  return true;
}

void World::Perform(const Event& cause, Effects effects) {
  bool appended = false;
  for (const Effect& effect : effects) {
    const auto* append = std::get_if<AppendRecord>(&effect.body);
    if (append == nullptr) continue;
    appended = true;
    if (append->sequence != decided_.applied.Next()) {
      Violate("log", "a record out of sequence");
      return;
    }
    Tell([&](Checker& c) { c.OnDecided(append->record, decided_); });
    Apply(decided_, append->sequence, append->record);
    Trace(fmt::format("#{} {}", append->sequence.value, Describe(append->record)));
  }
  if (!effects.empty()) Tell([&](Checker& c) { c.OnControllerStepped(cause, effects); });
  if (appended && ++appends_since_check_ >= options_.replay_check_every) {
    appends_since_check_ = 0;
    Tell([](Checker& c) { c.OnReplayed(); });
  }
  const uint64_t life = controller_life_;
  for (Effect& effect : effects) {
    if (std::holds_alternative<Measured>(effect.body)) continue;
    if (auto* append = std::get_if<AppendRecord>(&effect.body)) {
      disk_.Append(append->sequence, std::move(append->record));
    } else if (options_.mistake == ShellMistake::kTellBeforePersist) {
      PerformOne(effect.body);
    } else {
      held_.push_back(std::move(effect));
    }
    if (life != controller_life_ || CountControllerEffect()) return;
  }
  StartSync();
  ReleaseEffects();
}

void World::StartSync() {
  if (disk_.idle() || syncing_) return;
  syncing_ = true;
  const size_t count = disk_.pending();
  const uint64_t life = controller_life_;
  After(Between(options_.sync_min, options_.sync_max) + disk_.slow, [this, life, count] {
    if (life != controller_life_) return;
    auto synced = [this, life, count] {
      if (life == controller_life_) OnSynced(count);
    };
    if (controller_stopped_) {
      controller_deferred_.push_back(synced);
    } else {
      synced();
    }
  });
}

void World::OnSynced(size_t count) {
  syncing_ = false;
  if (disk_.failing) {
    Trace("a sync of the ledger fails");
    KillController();  // makes no new promise: a failed fsync ends the process
    return;
  }
  for (const auto& [sequence, record] : disk_.Synced(count)) {
    durable_upto_ = sequence;
    Apply(durable_, sequence, record);
    highest_term_ = std::max(highest_term_, durable_.term);
    Tell([&](Checker& c) { c.OnDurable(record); });
  }
  const uint64_t life = controller_life_;
  ReleaseEffects();
  if (life == controller_life_) StartSync();
}

void World::ReleaseEffects() {
  const uint64_t life = controller_life_;
  while (!held_.empty() && held_.front().after <= durable_upto_) {
    const Effect effect = std::move(held_.front());
    held_.pop_front();
    PerformOne(effect.body);
    if (life != controller_life_ || CountControllerEffect()) return;
  }
}

void World::Deliver(const ServerId& id, const SendCommand& sent) {
  AgentNode& node = agents_.at(id);
  if (node.session != sent.session) return;
  OnServer(node, node.life, [this, id, sent] {
    AgentNode& target = agents_.at(id);
    if (target.session != sent.session) return;
    if (!std::holds_alternative<AcknowledgeFacts>(sent.command)) Trace(fmt::format("{} < {}", id.value, Describe(sent.command)));
    const AgentEvent event = CommandArrived{sent.header, sent.command};
    const uint64_t life = target.life;
    AgentEffects effects = target.core->Step(event, target.clock.Local(now_));
    Tell([&](Checker& c) { c.OnCommandObeyed(target, sent.header, sent.command, effects); });
    PerformAgent(target, std::move(effects));
    if (target.alive && target.life == life) ArmAgent(target);
  });
}

void World::PerformOne(const EffectBody& body) {
  if (const auto* send = std::get_if<SendCommand>(&body)) {
    auto it = sessions_.find(send->session);
    if (it == sessions_.end()) return;
    AgentNode& agent = agents_.at(it->second);
    Tell([&](Checker& c) { c.OnCommandLeft(agent.id, *send); });
    if (std::holds_alternative<FenceProcesses>(send->command) || std::holds_alternative<AssignProcesses>(send->command) ||
        std::holds_alternative<ResumeProcesses>(send->command) || std::holds_alternative<everstep::KillProcess>(send->command) ||
        std::holds_alternative<SpawnProcess>(send->command)) {
      said_.emplace_back(agent.id, *send);
      if (said_.size() > 256) said_.pop_front();
    }
    if (agent.session != send->session || agent.links.down_cut) return;
    const Instant at = std::max(now_ + network_.Link() + agent.links.slow, to_agent_at_[send->session]);
    to_agent_at_[send->session] = at;
    At(at, [this, id = agent.id, sent = *send] { Deliver(id, sent); });
    if (options_.command_double_percent > 0 && prng_.Chance(options_.command_double_percent, 100)) {
      At(at + Between(Duration(0), Milliseconds(500)), [this, id = agent.id, sent = *send] { Deliver(id, sent); });
    }
  } else if (const auto* close = std::get_if<CloseSession>(&body)) {
    auto it = sessions_.find(close->session);
    if (it == sessions_.end()) return;
    const ServerId id = it->second;
    // What was said before the close still arrives.
    const Instant at = std::max(now_ + network_.Link(), to_agent_at_[close->session]);
    const SessionId session = close->session;
    sessions_.erase(it);
    At(at, [this, id, session] {
      AgentNode& node = agents_.at(id);
      if (node.session != session) return;
      node.session.reset();
      SettleWell(node);
      TellDown(node);
      LinkUp(node, Milliseconds(20));
    });
  } else if (const auto* probe = std::get_if<StartProbe>(&body)) {
    const uint64_t life = controller_life_;
    const StartProbe p = *probe;
    AgentNode& agent = agents_.at(p.server);
    ProbeOutcome outcome = ProbeOutcome::kConnected;  // the kernel of a stopped process still accepts
    Duration delay = network_.Link() + network_.Link();
    if (agent.links.stream_cut()) {
      outcome = ProbeOutcome::kTimedOut;
      delay = p.timeout;
    } else if (!agent.alive) {
      outcome = ProbeOutcome::kRefused;
    }
    After(delay, [this, life, p, outcome] {
      if (life == controller_life_) FeedController(ProbeFinished{p.server, p.incarnation, outcome});
    });
  } else if (const auto* confirm = std::get_if<ConfirmFence>(&body)) {
    After(Duration(0), [this, life = controller_life_, c = *confirm] {
      if (life == controller_life_) FeedController(FenceBecameDurable{c.job, c.generation});
    });
  } else if (const auto* fence = std::get_if<ConfirmFence>(&body)) {
    const uint64_t life = controller_life_;
    After(Duration(0), [this, life, f = *fence] {
      if (life == controller_life_) FeedController(FenceBecameDurable{f.job, f.generation});
    });
  } else if (const auto* reply = std::get_if<ReplyToOperator>(&body)) {
    replies_[reply->call.value] = {reply->status, reply->job};
  } else if (const auto* notice = std::get_if<Notice>(&body)) {
    marks_.insert(notice->what);
    std::string line = fmt::format("note {} ({})", notice->what, ReasonName(notice->reason));
    if (!notice->server.empty()) line += " " + notice->server.value;
    if (!notice->job_name.empty()) line += " " + notice->job_name;
    for (const auto& [k, v] : notice->keys) line += fmt::format(" {}={}", k, v);
    Trace(line);
  }
}

void World::RepeatOldLeader() {
  std::vector<std::pair<ServerId, SendCommand>> old;
  for (const auto& [id, sent] : said_) {
    const AgentNode& agent = agents_.at(id);
    if (agent.alive && !agent.stopped && agent.session && agent.core->highest_term() > sent.header.term) old.emplace_back(id, sent);
  }
  if (old.empty()) return;
  auto [id, sent] = old[prng_.UpTo(old.size() - 1)];
  Fault("old leader", fmt::format("a leader of term {} repeats itself to {}", sent.header.term.value, id.value));
  sent.session = *agents_.at(id).session;
  Deliver(id, sent);
}

void World::LedgerDisk(bool failing, Duration slow) {
  if (failing || slow > Duration(0)) {
    Fault("ledger disk", fmt::format("the ledger's disk {}", failing ? "will fail a sync" : "is slow"));
  }
  disk_.failing = failing;
  disk_.slow = slow;
}

void World::BackUpLedger() {
  Trace("the ledger is backed up");
  backup_ = disk_.durable().size();
}

void World::RestoreLedger() {
  EVERSTEP_CHECK(!core_);
  if (!backup_) return;
  Fault("ledger restored", fmt::format("the ledger is restored: {} of {} records", *backup_, disk_.durable().size()));
  disk_.Restore(*backup_);
  // Whoever restores a ledger raises its term far above any that was ever given (protocol.md section 7: the epoch).
  disk_.AppendDurable(TermStarted{Term(highest_term_.value + 1000)});
  ++restores_;
}

void World::JumpWallClock(Duration by) {
  Fault("clock jump", fmt::format("the controller's wall clock jumps by {} s", by.count() / 1000000000));
  controller_clock_.wall_offset += by;
}

void World::Drain(const std::string& name, bool draining) {
  if (draining) Fault("drain", "drain of " + name);
  FeedController(OperatorCalled{CallId(next_call_++), RequestId(), "sim", false, SetDrain{ServerId(name), draining}});
}

}  // namespace everstep::sim
