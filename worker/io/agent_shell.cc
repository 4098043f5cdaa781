#include "worker/io/agent_shell.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>

#include "proto/convert/agent_convert.h"
#include "worker/io/logging.h"

namespace everstep {

Result<std::unique_ptr<AgentShell>> AgentShell::Create(AgentShellOptions options) {
  std::unique_ptr<AgentShell> shell(new AgentShell(std::move(options)));
  EVERSTEP_RETURN_IF_ERROR(shell->Start());
  return shell;
}

AgentShell::AgentShell(AgentShellOptions options) : options_(std::move(options)) {}

AgentShell::~AgentShell() {
  // The link first: its threads post to the loop. Then whoever else posts or watches.
  link_.reset();
  heartbeats_.reset();
  snapshots_.reset();
  supervisor_.reset();
  rank_server_.reset();
  probe_.reset();
}

Status AgentShell::Start() {
  EVERSTEP_ASSIGN_OR_RETURN(loop_, EventLoop::Create());
  ServerInventory& inventory = options_.inventory;
  EVERSTEP_ASSIGN_OR_RETURN(probe_, ProbeListener::Create(*loop_, inventory.host));
  inventory.probe_address = probe_->address();
  inventory.root_directory = options_.root;
  const auto deliver = [this](AgentEvent event) { Deliver(std::move(event)); };

  if (options_.make_snapshots) {
    SnapshotService::Handler handler;
    handler.on_fact = [this](Fact fact) {
      loop_->Post([this, fact = std::move(fact)] { Deliver(KeeperReported{fact}); });
    };
    handler.on_loaded = [this](ProcessId process, SnapshotProvided answer, UniqueFd descriptor) {
      auto shared = std::make_shared<UniqueFd>(std::move(descriptor));
      loop_->Post([this, process, answer = std::move(answer), shared] {
        descriptors_[++last_descriptor_] = std::move(*shared);
        Deliver(SnapshotLoaded{process, answer, DescriptorToken(last_descriptor_)});
      });
    };
    handler.on_load_failed = [this](ProcessId process, SnapshotUnavailable answer) {
      loop_->Post([this, process, answer = std::move(answer)] { Deliver(SnapshotLoadFailed{process, answer}); });
    };
    EVERSTEP_ASSIGN_OR_RETURN(snapshots_, options_.make_snapshots(std::move(handler)));
    inventory.transfer_address = snapshots_->transfer_address();
  }

  const std::string socket_path = options_.root + "/agent.sock";
  EVERSTEP_ASSIGN_OR_RETURN(rank_server_, RankServer::Create(*loop_, socket_path, deliver));
  SupervisorOptions supervisor;
  supervisor.server = inventory.server.value;
  supervisor.root = options_.root;
  supervisor.socket_path = socket_path;
  supervisor.output = options_.output;
  supervisor.cgroups = options_.cgroups;
  if (snapshots_) {
    supervisor.on_staging = [this](const JobUid& job, ProcessId process, UniqueFd staging) {
      snapshots_->AddStaging(job, process, std::move(staging));
    };
  }
  EVERSTEP_ASSIGN_OR_RETURN(supervisor_, Supervisor::Create(*loop_, std::move(supervisor), deliver,
                                                            [this] { rank_server_->DrainAll(); }));
  core_ = std::make_unique<AgentCore>(inventory, options_.policy, options_.seed);
  heartbeats_ = std::make_unique<HeartbeatSender>(*loop_, inventory.server, [this] {
    Heartbeat heartbeat;
    heartbeat.incarnation = core_->incarnation();
    heartbeat.acted = core_->acted();
    heartbeat.votes = supervisor_->ReadVotes();
    return heartbeat;
  });
  ControllerLink::Handler handler;
  handler.on_up = [this] { Deliver(ControllerLinkUp{}); };
  handler.on_down = [this](std::string message) { Deliver(ControllerLinkDown{std::move(message)}); };
  handler.on_message = [this](const v1::ControllerMessage& message) { OnControllerMessage(message); };
  ControllerLinkOptions link;
  link.controller = options_.controller;
  link.seed = options_.seed;
  link_ = std::make_unique<ControllerLink>(*loop_, std::move(link), std::move(handler));
  return OkStatus();
}

int AgentShell::Run() {
  loop_->Post([this] { link_->Open(); });
  loop_->Run();
  return exit_code_.value_or(1);
}

void AgentShell::RequestStop() {
  loop_->Post([this] { Deliver(StopRequested{}); });
}

void AgentShell::OnControllerMessage(const v1::ControllerMessage& message) {
  auto received = FromMessage(message);
  if (!received.ok()) {
    WriteNotice({AgentNoticeLevel::kError, Reason::kNone, "Malformed command dropped",
                 {{"sequence", std::to_string(message.sequence())}, {"err", received.status().message()}}});
    return;
  }
  Deliver(CommandArrived{received->header, std::move(received->command)});
}

void AgentShell::Deliver(AgentEvent event) {
  events_.push_back(std::move(event));
  if (stepping_) return;  // the loop below goes on with it
  stepping_ = true;
  while (!events_.empty() && !exit_code_) {
    const AgentEvent next = std::move(events_.front());
    events_.pop_front();
    for (AgentEffect& effect : core_->Step(next, BootTimeNow())) Perform(std::move(effect));
  }
  stepping_ = false;
  ArmTimer();
}

void AgentShell::ArmTimer() {
  const Instant deadline = exit_code_ ? kNever : core_->NextDeadline();
  if (deadline == timer_at_) return;
  if (timer_) loop_->Cancel(*timer_);
  timer_.reset();
  timer_at_ = deadline;
  if (deadline == kNever) return;
  timer_ = loop_->At(deadline, [this] {
    timer_.reset();
    timer_at_ = kNever;
    Deliver(AgentTimeAdvanced{});
  });
}

void AgentShell::Perform(SayHello& effect) {
  for (ProcessStatus& status : effect.hello.processes) {
    if (auto progress = supervisor_->ReadProgress(status.process)) status.progress = *progress;
  }
  if (snapshots_) effect.hello.snapshots = snapshots_->Held();
  link_->Send(ToMessage(effect.hello));
}

void AgentShell::Perform(SendFact& effect) { link_->Send(ToMessage(effect.sequence, effect.fact)); }

void AgentShell::Perform(SendToRank& effect) {
  UniqueFd descriptor;
  if (auto it = descriptors_.find(effect.descriptor.value); it != descriptors_.end()) {
    descriptor = std::move(it->second);
    descriptors_.erase(it);
  }
  rank_server_->Send(effect.connection, effect.message, std::move(descriptor));
}

void AgentShell::Perform(StartHeartbeats& effect) {
  if (Status started = heartbeats_->Start(effect.welcome); !started.ok()) {
    WriteNotice({AgentNoticeLevel::kError, Reason::kNone, "Heartbeats could not be started", {{"err", started.message()}}});
  }
}

void AgentShell::Perform(KeepStaged& effect) {
  if (snapshots_) snapshots_->Staged(effect.job, effect.process, effect.staged);
}

void AgentShell::Perform(LoadSnapshot& effect) {
  if (snapshots_) {
    snapshots_->Load(effect.job, effect.process, effect.wanted);
    return;
  }
  Deliver(SnapshotLoadFailed{effect.process, SnapshotUnavailable{effect.wanted.generation, StatusCode::kNotFound,
                                                                 "this agent keeps no snapshots"}});
}

void AgentShell::Perform(CopyForKeeping& effect) {
  if (snapshots_) {
    snapshots_->Copy(effect.command);
    return;
  }
  SnapshotLost lost;
  lost.job = effect.command.job;
  lost.snapshot.state = effect.command.source.state;
  lost.snapshot.shard = effect.command.source.shard;
  lost.snapshot.tier = effect.command.to;
  lost.snapshot.server = options_.inventory.server;
  lost.reason = Reason::kStorageFailed;
  lost.message = "this agent keeps no snapshots";
  Deliver(KeeperReported{std::move(lost)});
}

void AgentShell::Perform(NoteProcessGone& effect) {
  supervisor_->Perform(effect);
  if (snapshots_) snapshots_->ProcessGone(effect.job, effect.process);
}

void AgentShell::Perform(AgentEffect effect) {
  std::visit(
      [this](auto& e) {
        using T = std::decay_t<decltype(e)>;
        if constexpr (std::is_same_v<T, CloseControllerLink>) {
          link_->Close(e.reopen);
        } else if constexpr (std::is_same_v<T, OpenControllerLink>) {
          link_->Open();
        } else if constexpr (std::is_same_v<T, StopHeartbeats>) {
          heartbeats_->Stop();
        } else if constexpr (std::is_same_v<T, CloseConnection>) {
          rank_server_->Close(e.connection);
        } else if constexpr (std::is_same_v<T, StartProcess> || std::is_same_v<T, SignalProcess>) {
          supervisor_->Perform(e);
        } else if constexpr (std::is_same_v<T, DropKept>) {
          if (snapshots_) snapshots_->Drop(e.command);
        } else if constexpr (std::is_same_v<T, RaiseProtected>) {
          if (snapshots_) snapshots_->RaiseProtected(e.job, e.step);
        } else if constexpr (std::is_same_v<T, NoteGeneration>) {
          if (snapshots_) snapshots_->NoteGeneration(e.job, e.generation);
        } else if constexpr (std::is_same_v<T, NoteAssigned>) {
          if (snapshots_) snapshots_->NoteAssigned(e.job, e.generation, e.start);
        } else if constexpr (std::is_same_v<T, ReleaseSnapshots>) {
          if (snapshots_) snapshots_->Release(e.job);
        } else if constexpr (std::is_same_v<T, DropDescriptor>) {
          descriptors_.erase(e.descriptor.value);
        } else if constexpr (std::is_same_v<T, AgentNotice>) {
          WriteNotice(e);
        } else if constexpr (std::is_same_v<T, ExitAgent>) {
          exit_code_ = e.code;
          exit_message_ = e.message;
          heartbeats_->Stop();
          supervisor_->KillAllNow();
          link_->Finish(Milliseconds(200));
          loop_->Stop();
        } else {
          Perform(e);
        }
      },
      effect);
}

}  // namespace everstep
