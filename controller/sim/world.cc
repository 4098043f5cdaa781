// The controller's side of the world: event heap, ledger disk, sessions, probes, checks on commands and records.
#include "controller/sim/world.h"

#include <algorithm>

#include <fmt/format.h>

#include "proto/base/check.h"

namespace everstep::sim {

World::World(WorldOptions options) : options_(options), prng_(options.seed), fault_prng_(prng_.Fork()) {
  now_ = Instant(Seconds(1000));
  StartController();
}
World::~World() = default;

void World::At(Instant at, std::function<void()> run) { heap_.push({std::max(at, now_), ++sequence_, std::move(run)}); }

Duration World::Between(Duration low, Duration high) {
  return Duration(prng_.Between(low.count(), std::max(low.count(), high.count())));
}

void World::Trace(const std::string& line) {
  const std::string text = fmt::format("{:.6f} {}", ToSeconds(now_.time_since_epoch()), line);
  for (char c : text) {
    hash_ ^= static_cast<uint8_t>(c);
    hash_ *= 1099511628211u;
  }
  if (keep_trace_) trace_.push_back(text);
}

void World::Violate(const std::string& what) {
  Trace("VIOLATION " + what);
  if (violations_.size() < 20) violations_.push_back({fmt::format("{:.6f} {}", ToSeconds(now_.time_since_epoch()), what)});
}

bool World::RunUntil(const std::function<bool()>& done, Duration limit) {
  const Instant end = now_ + limit;
  while (!done()) {
    if (heap_.empty() || heap_.top().at > end) {
      now_ = end;
      return done();
    }
    auto run = heap_.top().run;
    now_ = heap_.top().at;
    heap_.pop();
    ++events_run_;
    run();
  }
  return true;
}

void World::RunFor(Duration duration) {
  RunUntil([] { return false; }, duration);
}

// ---- controller

void World::StartController() {
  EVERSTEP_CHECK(core_ == nullptr);
  ++controller_life_;
  LedgerState state;
  for (const auto& [sequence, record] : durable_) Apply(state, sequence, record);
  replayed_ = state;
  durable_upto_ = state.applied;
  ControllerOptions options;
  options.policy = options_.policy;
  options.heartbeat_address = "controller";
  options.seed = prng_.Next();
  core_ = std::make_unique<ControllerCore>(options, state);
  Trace("controller starts");
  Perform(core_->Start({now_, {}}));
  ArmController();
  for (auto& [id, agent] : agents_) {
    if (agent.alive && !agent.session) LinkUp(agent, Link() + Milliseconds(20));
  }
}

void World::KillController() {
  if (!core_) return;
  Trace("controller dies");
  ++controller_life_;
  core_.reset();
  // A synced prefix survives; of what was being written, any prefix may.
  const uint64_t kept = prng_.UpTo(appending_.size());
  for (uint64_t i = 0; i < kept; ++i) durable_.push_back(appending_[i]);
  appending_.clear();
  held_.clear();
  syncing_ = false;
  controller_armed_ = kNever;
  for (auto& [id, agent] : agents_) {
    if (agent.session) BreakStream(agent, true);
  }
  sessions_.clear();
}

void World::FeedController(const Event& event) {
  if (!core_) return;
  Perform(core_->Step(event, {now_, {}}));
  ArmController();
}

void World::ArmController() {
  if (!core_) return;
  const Instant deadline = core_->NextDeadline();
  if (deadline == kNever || deadline >= controller_armed_) return;
  controller_armed_ = std::max(deadline, now_);
  const uint64_t life = controller_life_;
  const Instant armed = controller_armed_;
  At(armed, [this, life, armed] {
    if (life != controller_life_ || armed != controller_armed_) return;
    controller_armed_ = kNever;
    FeedController(TimeAdvanced{});
  });
}

void World::Perform(Effects effects) {
  CheckController(effects);
  for (Effect& effect : effects) {
    if (auto* append = std::get_if<AppendRecord>(&effect.body)) {
      appending_.emplace_back(append->sequence, append->record);
    } else {
      held_.push_back(std::move(effect));
    }
  }
  if (!appending_.empty() && !syncing_) {
    syncing_ = true;
    const size_t count = appending_.size();
    const uint64_t life = controller_life_;
    After(Between(options_.sync_min, options_.sync_max), [this, life, count] {
      if (life != controller_life_) return;
      syncing_ = false;
      for (size_t i = 0; i < count; ++i) {
        const auto& [sequence, record] = appending_.front();
        durable_upto_ = sequence;
        if (const auto* point = std::get_if<RecoveryPointDecided>(&record)) {
          Lineage& lineage = durable_lineage_[point->job];
          if (point->generation <= lineage.newest()) {
            Violate(fmt::format("generation {} decided twice", point->generation.value));
          } else {
            lineage.Append({point->generation, point->point.step});
          }
          newest_chain_[point->job] = point->generation;
        }
        durable_.push_back(appending_.front());
        appending_.pop_front();
      }
      ReleaseEffects();
      Perform({});
    });
  }
  ReleaseEffects();
}

void World::ReleaseEffects() {
  const uint64_t life = controller_life_;
  while (!held_.empty() && held_.front().after <= durable_upto_) {
    const Effect effect = std::move(held_.front());
    held_.pop_front();
    PerformOne(effect.body);
    if (life != controller_life_) return;
  }
}

void World::CheckController(const Effects& effects) {
  for (const Effect& effect : effects) {
    if (const auto* append = std::get_if<AppendRecord>(&effect.body)) {
      if (append->sequence != replayed_.applied.Next()) {
        Violate("a record out of sequence");
        return;
      }
      if (const auto* fenced = std::get_if<GenerationFenced>(&append->record)) {
        const JobEntry& before = replayed_.jobs.at(fenced->job);
        if (fenced->generation <= before.fenced) Violate("a generation did not rise");
      }
      Apply(replayed_, append->sequence, append->record);
      if (const auto* plan = std::get_if<PlanMade>(&append->record)) {
        // No device twice, across all jobs.
        std::map<std::pair<ServerId, DeviceIndex>, JobUid> used;
        for (const auto& [uid, job] : replayed_.jobs) {
          if (job.ended || !job.plan) continue;
          for (const PlannedSlot& slot : job.plan->slots) {
            if (!used.emplace(std::make_pair(slot.server, slot.device), uid).second && uid == plan->job) {
              Violate(fmt::format("device {} of {} is assigned twice", slot.device.value, slot.server.value));
            }
          }
        }
        for (const PlannedSlot& slot : plan->slots) {
          auto server = replayed_.servers.find(slot.server);
          if (server == replayed_.servers.end() || server->second.newest <= server->second.dead_upto) {
            Violate(fmt::format("a plan uses the dead server {}", slot.server.value));
          }
        }
      }
    } else if (const auto* send = std::get_if<SendCommand>(&effect.body)) {
      // Persist, then tell: what the command promises must be in the prefix that it waits for.
      if (const auto* assign = std::get_if<AssignProcesses>(&send->command)) {
        const JobEntry& job = replayed_.jobs.at(assign->assignment.job);
        if (!job.assignment || job.assignment->generation != assign->assignment.generation ||
            effect.after < LedgerSequence(1)) {
          Violate("an Assign that the ledger does not hold");
        }
        if (job.lineage.newest() != assign->assignment.generation) Violate("an Assign without a recovery point");
      } else if (const auto* fence = std::get_if<FenceProcesses>(&send->command)) {
        if (replayed_.jobs.at(fence->job).fenced < fence->generation) Violate("a Fence that the ledger does not hold");
      }
    }
  }
  if (options_.check_replay && core_ && !effects.empty()) {
    if (!(replayed_ == core_->ledger())) Violate("replay does not equal the live ledger");
  }
}

void World::PerformOne(const EffectBody& body) {
  if (const auto* send = std::get_if<SendCommand>(&body)) {
    auto it = sessions_.find(send->session);
    if (it == sessions_.end()) return;
    AgentNode& agent = agents_.at(it->second);
    if (agent.session != send->session || agent.cut) return;
    Instant at = std::max(now_ + Link(), to_agent_at_[send->session]);
    to_agent_at_[send->session] = at;
    const ServerId id = agent.id;
    At(at, [this, id, command = *send] {
      AgentNode& node = agents_.at(id);
      if (node.session != command.session) return;
      OnServer(node, node.life, [this, id, command] {
        AgentNode& target = agents_.at(id);
        if (target.session != command.session) return;
        Trace(fmt::format("{} gets command {}", id.value, command.command.index()));
        FeedAgent(target, CommandArrived{command.header, command.command});
      });
    });
  } else if (const auto* close = std::get_if<CloseSession>(&body)) {
    auto it = sessions_.find(close->session);
    if (it == sessions_.end()) return;
    const ServerId id = it->second;
    // What was said before the close still arrives.
    const Instant at = std::max(now_ + Link(), to_agent_at_[close->session]);
    const SessionId session = close->session;
    sessions_.erase(it);
    At(at, [this, id, session] {
      AgentNode& node = agents_.at(id);
      if (node.session == session) {
        node.session.reset();
        OnServer(node, node.life, [this, id] { FeedAgent(agents_.at(id), ControllerLinkDown{"closed"}); });
        LinkUp(node, Milliseconds(20));
      }
    });
  } else if (const auto* probe = std::get_if<StartProbe>(&body)) {
    const uint64_t life = controller_life_;
    const StartProbe p = *probe;
    AgentNode& agent = agents_.at(p.server);
    ProbeOutcome outcome = ProbeOutcome::kConnected;  // the kernel of a stopped process still accepts
    Duration delay = Link() + Link();
    if (agent.cut) {
      outcome = ProbeOutcome::kTimedOut;
      delay = p.timeout;
    } else if (!agent.alive) {
      outcome = ProbeOutcome::kRefused;
    }
    After(delay, [this, life, p, outcome] {
      if (life == controller_life_) FeedController(ProbeFinished{p.server, p.incarnation, outcome});
    });
  } else if (const auto* reply = std::get_if<ReplyToOperator>(&body)) {
    replies_[reply->call.value] = {reply->status, reply->job};
  } else if (const auto* notice = std::get_if<Notice>(&body)) {
    std::string line = fmt::format("notice {} {} {} {}", ReasonName(notice->reason), notice->what, notice->server.value,
                                   notice->job_name);
    for (const auto& [k, v] : notice->keys) line += fmt::format(" {}={}", k, v);
    Trace(line);
  }
}

JobUid World::Submit(JobSpec spec, int64_t steps) {
  const uint64_t call = next_call_++;
  FeedController(OperatorCalled{CallId(call), RequestId(fmt::format("r{}", call)), "sim", false, SubmitJob{spec}});
  RunUntil([&] { return replies_.contains(call) || !core_; }, Seconds(5));
  EVERSTEP_CHECK(replies_.contains(call));
  if (!replies_[call].first.ok()) Violate("submit refused: " + replies_[call].first.message());
  const JobUid uid = replies_[call].second;
  steps_wanted[uid] = steps;
  return uid;
}

void World::Drain(const std::string& name, bool draining) {
  FeedController(OperatorCalled{CallId(next_call_++), RequestId(), "sim", false, SetDrain{ServerId(name), draining}});
}

void World::Cancel(const JobUid& job) {
  FeedController(OperatorCalled{CallId(next_call_++), RequestId(), "sim", false, CancelJob{job.value}});
}

std::optional<JobView> World::ViewOf(const JobUid& job) const {
  if (!core_) return std::nullopt;
  for (JobView& view : View().jobs) {
    if (view.entry.uid == job) return view;
  }
  return std::nullopt;
}

bool World::Succeeded(const JobUid& job) const {
  if (!core_) return false;
  auto it = core_->ledger().jobs.find(job);
  return it != core_->ledger().jobs.end() && it->second.ended && it->second.ended->outcome == JobState::kSucceeded;
}

Content World::Expected(const JobUid& job, int64_t step) const {
  Content content;
  auto it = durable_lineage_.find(job);
  for (int64_t s = 1; s <= step; ++s) {
    content.push_back(it == durable_lineage_.end() ? 0 : it->second.AtStep(Step(s)).generation.value);
  }
  return content;
}

}  // namespace everstep::sim
