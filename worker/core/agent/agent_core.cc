#include "worker/core/agent/agent_core.h"

#include <algorithm>

#include "proto/base/mutation.h"

namespace everstep {

AgentCore::AgentCore(ServerInventory inventory, AgentPolicy policy, uint64_t seed)
    : inventory_(std::move(inventory)),
      policy_(policy),
      nonces_(seed),
      start_nonce_(nonces_.Next()),
      refused_pause_(policy.refused_pause),
      outbox_(policy) {}

AgentEffects AgentCore::Step(const AgentEvent& event, Instant now) {
  now_ = now;
  effects_.clear();
  if (exited_) return {};
  std::visit([this](const auto& e) { On(e); }, event);
  CheckProcessDeadlines();
  ProgressRefusal();
  ProgressStop();
  return std::move(effects_);
}

Instant AgentCore::NextDeadline() const {
  if (exited_) return kNever;
  Instant next = std::min({hello_deadline_, reopen_at_, flush_until_});
  for (const auto& [id, process] : processes_) {
    if (process.state != ProcessState::kRunning) continue;
    next = std::min({next, process.kill_at, process.unkillable_at, process.socket_lost_until});
  }
  return next;
}

void AgentCore::On(const ControllerLinkUp&) {
  if (refused_) {
    Emit(CloseControllerLink{false});
    return;
  }
  link_up_ = true;
  registered_ = false;
  acted_ = CommandSequence(0);
  hello_deadline_ = now_ + policy_.hello_timeout;
  AgentHello hello;
  hello.inventory = inventory_;
  hello.start_nonce = start_nonce_;
  hello.incarnation = incarnation_;
  hello.highest_term = highest_term_;
  hello.processes = ListProcesses();
  Emit(SayHello{std::move(hello)});
}

void AgentCore::On(const ControllerLinkDown& event) {
  if (registered_) {
    Note(AgentNoticeLevel::kWarning, Reason::kStreamBroken, "Controller link went down", {{"err", event.message}});
  }
  link_up_ = false;
  registered_ = false;
  hello_deadline_ = kNever;
}

void AgentCore::On(const CommandArrived& event) {
  if (!link_up_ || refused_) return;
  if (event.header.term < highest_term_ && !Mutated(Mutation::kObeyOldTerm)) {
    ++counts_.stale_term;
    Note(AgentNoticeLevel::kWarning, Reason::kStaleTerm, "Command of an older term refused",
         {{"term", std::to_string(event.header.term.value)},
          {"highestTerm", std::to_string(highest_term_.value)}});
    return;
  }
  if (event.header.sequence <= acted_ && !Mutated(Mutation::kObeyReplayed) && !Mutated(Mutation::kObeyOldTerm)) {
    ++counts_.replayed;
    Note(AgentNoticeLevel::kWarning, Reason::kNone, "Command seen before refused",
         {{"sequence", std::to_string(event.header.sequence.value)}});
    return;
  }
  const bool greets = std::holds_alternative<Welcome>(event.command) ||
                      std::holds_alternative<Refuse>(event.command) ||
                      std::holds_alternative<Probe>(event.command);
  if (!registered_ && !greets) {
    Note(AgentNoticeLevel::kWarning, Reason::kNone, "Command before Welcome refused",
         {{"sequence", std::to_string(event.header.sequence.value)}});
    return;
  }
  highest_term_ = event.header.term;
  acted_ = event.header.sequence;
  std::visit([this](const auto& command) { Obey(command); }, event.command);
}

void AgentCore::Obey(const Welcome& command) {
  const bool renewed = incarnation_ != Incarnation(0) && incarnation_ != command.incarnation;
  if (renewed) {
    // The controller declared the old incarnation dead and may have replaced its ranks: they end before anything is
    // said under the new one, whatever `keep` says.
    Note(AgentNoticeLevel::kWarning, Reason::kServerRestarted, "New incarnation given, all rank processes killed",
         {{"incarnation", std::to_string(command.incarnation.value)},
          {"before", std::to_string(incarnation_.value)}});
    EndAll(Duration::zero());
  } else {
    std::vector<ProcessId> strangers;
    for (const auto& [id, process] : processes_) {
      if (std::find(command.keep.begin(), command.keep.end(), id) == command.keep.end()) strangers.push_back(id);
    }
    for (ProcessId id : strangers) {
      auto it = processes_.find(id);
      if (it == processes_.end()) continue;
      Note(AgentNoticeLevel::kInfo, Reason::kNone, "Process unknown to the controller killed",
           {{"process", std::to_string(id.value)}});
      End(id, it->second, Duration::zero());
    }
  }
  incarnation_ = command.incarnation;
  registered_ = true;
  hello_deadline_ = kNever;
  refused_pause_ = policy_.refused_pause;
  Note(AgentNoticeLevel::kInfo, Reason::kRegistered, "Agent registered",
       {{"incarnation", std::to_string(incarnation_.value)}, {"term", std::to_string(highest_term_.value)}});
  Emit(StartHeartbeats{command});
  outbox_.SendAll(now_, effects_);
}

void AgentCore::Obey(const Refuse& command) {
  Note(AgentNoticeLevel::kError, Reason::kNone, "Controller refused this agent", {{"err", command.message}});
  refused_ = true;
  refused_permanent_ = command.permanent;
  refused_message_ = command.message;
  registered_ = false;
  link_up_ = false;
  hello_deadline_ = kNever;
  reopen_at_ = kNever;
  EndAll(Duration::zero());
  Emit(StopHeartbeats{});
  Emit(CloseControllerLink{false});
}

void AgentCore::ProgressRefusal() {
  if (!refused_ || exited_) return;
  if (!AllReapedOrUnkillable()) return;
  if (refused_permanent_) {
    exited_ = true;
    Emit(ExitAgent{2, refused_message_});
    return;
  }
  if (reopen_at_ == kNever) {
    // The old incarnation is gone with its last process: register as a new agent would.
    incarnation_ = Incarnation(0);
    start_nonce_ = nonces_.Next();
    reopen_at_ = now_ + refused_pause_;
    refused_pause_ = std::min(refused_pause_ * 2, policy_.refused_pause_max);
    return;
  }
  if (now_ < reopen_at_) return;
  reopen_at_ = kNever;
  refused_ = false;
  if (!stopping_) Emit(OpenControllerLink{});
}

void AgentCore::Obey(const AcknowledgeFacts& command) { outbox_.Acknowledge(command.upto); }

void AgentCore::Obey(const Probe& command) { Report(ProbeReturned{command.nonce}); }

void AgentCore::On(const StorageWentWrong& event) {
  Note(AgentNoticeLevel::kError, event.reason, "Agent storage failed", {{"err", event.message}});
  Report(StorageTroubled{event.reason, event.message});
}

void AgentCore::On(const StopRequested&) {
  if (stopping_) {
    EndAll(Duration::zero());
    return;
  }
  stopping_ = true;
  Note(AgentNoticeLevel::kInfo, Reason::kServerDrained, "Agent asked to stop",
       {{"processes", std::to_string(processes_.size())}});
  EndAll(policy_.stop_grace);
}

void AgentCore::ProgressStop() {
  if (!stopping_ || exited_ || !AllReapedOrUnkillable()) return;
  if (flush_until_ == kNever) flush_until_ = now_ + policy_.stop_flush_max;
  if (registered_ && !outbox_.empty() && now_ < flush_until_) return;
  exited_ = true;
  Emit(ExitAgent{0, "asked to stop"});
}

void AgentCore::On(const AgentTimeAdvanced&) {
  if (now_ >= hello_deadline_) {
    Note(AgentNoticeLevel::kWarning, Reason::kStreamBroken, "Controller did not answer the registration");
    hello_deadline_ = kNever;
    link_up_ = false;
    Emit(CloseControllerLink{true});
  }
}

std::vector<ProcessStatus> AgentCore::ListProcesses() const {
  std::vector<ProcessStatus> list;
  for (const auto& [id, process] : processes_) {
    ProcessStatus status;
    status.job = process.spawn.job;
    status.process = id;
    status.device = process.spawn.device;
    status.pid = process.pid;
    status.joined = process.joined;
    status.mesh_address = process.mesh_address;
    status.promised = process.promised;
    status.collected = process.collected;
    if (process.collected) status.report = process.answer.report;
    status.assigned = process.assigned;
    list.push_back(std::move(status));
  }
  return list;
}

void AgentCore::Report(Fact fact, Instant noticed) {
  outbox_.Add(std::move(fact), noticed, registered_, now_, effects_);
}

void AgentCore::Note(AgentNoticeLevel level, Reason reason, std::string message,
                     std::vector<std::pair<std::string, std::string>> keys) {
  Emit(AgentNotice{level, reason, std::move(message), std::move(keys)});
}

void AgentCore::NoteStale(const char* what, ProcessId process, Generation generation, Generation told) {
  ++counts_.stale_generation;
  Note(AgentNoticeLevel::kWarning, Reason::kStaleGeneration, "Message of an older generation dropped",
       {{"what", what},
        {"process", std::to_string(process.value)},
        {"generation", std::to_string(generation.value)},
        {"told", std::to_string(told.value)}});
}

}  // namespace everstep
