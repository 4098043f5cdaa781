// Fences, assignments, and what ranks say on their sockets.
#include <algorithm>

#include "worker/core/agent/agent_core.h"

namespace everstep {
namespace {

std::string Text(ProcessId id) { return std::to_string(id.value); }

}  // namespace

void AgentCore::Tell(const Process& process, AgentToRank message, DescriptorToken descriptor) {
  if (process.connection) {
    Emit(SendToRank{*process.connection, std::move(message), descriptor});
  } else if (descriptor != DescriptorToken(0)) {
    Emit(DropDescriptor{descriptor});
  }
}

// ---- from the controller

void AgentCore::Obey(const FenceProcesses& command) {
  Emit(NoteGeneration{command.job, command.generation});
  for (ProcessId id : command.processes) {
    auto it = processes_.find(id);
    if (it != processes_.end()) {
      if (it->second.spawn.job == command.job) FenceOne(id, it->second, command.generation);
      continue;
    }
    // Its end may have been acknowledged to a controller that forgot it since.
    if (auto gone = gone_.find(id); gone != gone_.end() && gone->second.job == command.job) {
      Report(gone->second.last, gone->second.noticed);
    }
  }
}

void AgentCore::FenceOne(ProcessId id, Process& process, Generation generation) {
  if (generation < process.told) {
    NoteStale("FenceProcesses", id, generation, process.told);
    return;
  }
  if (process.spawn.spec.opaque) {
    // It can't leave a generation, so it ends; one that was spawned for this generation is not meant.
    if (generation == process.told) return;
    process.told = generation;
    End(id, process, process.spawn.spec.termination_grace);
    return;
  }
  if (generation == process.told) {
    if (process.promised == generation && process.collected) {
      Report(ProcessCollected{process.spawn.job, id, process.answer});
      return;
    }
    return;  // told already, or assigned to it since
  }
  process.told = generation;
  process.collected = false;
  process.held_assignment.reset();
  Tell(process, FenceRank{generation});
}

void AgentCore::Obey(const PrepareProcesses& command) {
  for (ProcessId id : command.processes) {
    auto it = processes_.find(id);
    if (it == processes_.end() || it->second.spawn.job != command.job) continue;
    if (command.generation <= it->second.told) {
      if (command.generation < it->second.told) {
        NoteStale("PrepareProcesses", id, command.generation, it->second.told);
      }
      continue;
    }
    Tell(it->second, PrepareSwitch{command.generation});
  }
}

void AgentCore::Obey(const AssignProcesses& command) {
  const Assignment& assignment = command.assignment;
  bool took = false;
  for (const RankAssignment& rank : assignment.ranks) {
    auto it = processes_.find(rank.process);
    if (it == processes_.end() || it->second.spawn.job != assignment.job) continue;
    Process& process = it->second;
    if (process.spawn.spec.opaque) continue;
    if (assignment.generation < process.told) {
      NoteStale("AssignProcesses", rank.process, assignment.generation, process.told);
      continue;
    }
    if (process.assigned == assignment.generation) {
      // Repeated: says again how far it came.
      if (process.connected) Report(ProcessConnected{process.spawn.job, rank.process, *process.connected});
      if (process.ready) Report(ProcessReady{process.spawn.job, rank.process, *process.ready});
      continue;
    }
    process.told = assignment.generation;
    process.assigned = assignment.generation;
    process.collected = false;
    process.connected.reset();
    process.ready.reset();
    process.failed.reset();
    process.held_assignment = AssignRank{assignment, rank.rank};
    DeliverHeld(process);
    took = true;
  }
  if (took) Emit(NoteAssigned{assignment.job, assignment.generation, assignment.recovery_point.step});
}

void AgentCore::DeliverHeld(Process& process) {
  if (!process.held_assignment || !process.connection || !process.joined) return;
  AssignRank message = std::move(*process.held_assignment);
  process.held_assignment.reset();
  Tell(process, std::move(message));
}

void AgentCore::Obey(const ResumeProcesses& command) {
  for (auto& [id, process] : processes_) {
    if (process.spawn.job != command.job || process.spawn.spec.opaque) continue;
    if (process.assigned == Generation(0)) continue;  // a standby
    if (command.generation < process.told) {
      NoteStale("ResumeProcesses", id, command.generation, process.told);
      continue;
    }
    if (process.assigned != command.generation) continue;
    if (process.failed) {
      // Scenario: 1. the rank's failure is acknowledged by a controller that dies; 2. its successor finds every member in
      // the ledger's generation and adopts it. Nobody would step again: the failure is told to whoever says Resume.
      Report(ProcessFailed{process.spawn.job, id, *process.failed});
      continue;
    }
    if (process.resumed == command.generation) continue;
    process.resumed = command.generation;
    Tell(process, ResumeRank{command.generation, command.protected_step});
  }
}

void AgentCore::Obey(const ProtectedStepRaised& command) {
  Emit(RaiseProtected{command.job, command.step});
  for (auto& [id, process] : processes_) {
    if (process.spawn.job == command.job && process.joined) Tell(process, SnapshotProtected{command.step});
  }
}

// ---- from ranks

void AgentCore::On(const RankSocketOpened& event) {
  if (sockets_.size() >= policy_.connections_max) {
    Note(AgentNoticeLevel::kWarning, Reason::kNone, "Rank connection over the limit closed",
         {{"pid", std::to_string(event.peer_pid)}});
    Emit(CloseConnection{event.connection});
    return;
  }
  Socket socket;
  socket.peer_pid = event.peer_pid;
  socket.peer_group = event.peer_group;
  sockets_.emplace(event.connection, std::move(socket));
}

void AgentCore::RefuseHello(Connection connection, std::string message) {
  Note(AgentNoticeLevel::kWarning, Reason::kNone, "Rank connection refused", {{"err", message}});
  Emit(SendToRank{connection, HelloRefused{std::move(message)}, {}});
  Emit(CloseConnection{connection});
  sockets_.erase(connection);
}

void AgentCore::On(const RankMessageArrived& event) {
  auto it = sockets_.find(event.connection);
  if (it == sockets_.end()) return;
  Socket& socket = it->second;
  const auto* hello = std::get_if<RankHello>(&event.message);
  if (!socket.process) {
    if (hello == nullptr || socket.held_hello) {
      RefuseHello(event.connection, "the first message must be one RankHello");
      return;
    }
    AcceptHello(event.connection, socket, *hello);
    return;
  }
  if (hello != nullptr) {
    RefuseHello(event.connection, "RankHello came twice");
    auto process = processes_.find(hello->process);
    if (process != processes_.end() && process->second.connection == event.connection) {
      process->second.connection.reset();
      process->second.socket_lost_until = now_ + policy_.socket_loss_grace;
    }
    return;
  }
  const ProcessId id = *socket.process;
  auto process = processes_.find(id);
  if (process == processes_.end()) return;
  std::visit([&](const auto& message) { Hear(id, process->second, message); }, event.message);
}

void AgentCore::AcceptHello(Connection connection, Socket& socket, const RankHello& hello) {
  if (hello.protocol_version != kProtocolVersion) {
    RefuseHello(connection, "the library speaks protocol version " + std::to_string(hello.protocol_version) +
                                ", the agent " + std::to_string(kProtocolVersion) +
                                ": use a library of the agent's release");
    return;
  }
  auto it = processes_.find(hello.process);
  if (it == processes_.end() || it->second.spawn.spec.opaque) {
    RefuseHello(connection, "process " + Text(hello.process) + " is not one of this agent's joining processes");
    return;
  }
  Process& process = it->second;
  if (process.state != ProcessState::kRunning) {
    socket.held_hello = hello;
    return;
  }
  if (socket.peer_group != process.pid && socket.peer_pid != process.pid) {
    RefuseHello(connection, "pid " + std::to_string(socket.peer_pid) + " does not belong to process " +
                                Text(hello.process));
    return;
  }
  if (process.connection || process.killed) {
    RefuseHello(connection, process.killed ? "process " + Text(hello.process) + " was killed"
                                           : "process " + Text(hello.process) + " has a connection already");
    return;
  }
  socket.process = hello.process;
  process.connection = connection;
  process.socket_lost_until = kNever;
  process.mesh_address = hello.mesh_address;
  Tell(process, HelloAccepted{policy_.staging_bytes_max});
  if (process.told > process.assigned && !process.collected) Tell(process, FenceRank{process.told});
}

void AgentCore::On(const RankSocketClosed& event) {
  auto it = sockets_.find(event.connection);
  if (it == sockets_.end()) return;
  const std::optional<ProcessId> id = it->second.process;
  sockets_.erase(it);
  if (!id) return;
  auto process = processes_.find(*id);
  if (process == processes_.end() || process->second.connection != event.connection) return;
  process->second.connection.reset();
  process->second.joined = false;
  if (!process->second.finished) process->second.socket_lost_until = now_ + policy_.socket_loss_grace;
}

void AgentCore::Hear(ProcessId, Process&, const RankHello&) {}

void AgentCore::Hear(ProcessId id, Process& process, const RankJoin&) {
  process.joined = true;
  Report(ProcessJoined{process.spawn.job, id, process.pid, process.mesh_address});
  DeliverHeld(process);
}

void AgentCore::Hear(ProcessId id, Process& process, const CollectAnswer& message) {
  if (message.generation < process.told || message.generation <= process.assigned) {
    NoteStale("CollectAnswer", id, message.generation, process.told);
    return;
  }
  // A planned switch rises without a Fence: the vote carried the generation.
  process.told = message.generation;
  process.promised = message.generation;
  process.collected = true;
  process.answer = message;
  process.held_assignment.reset();
  Report(ProcessCollected{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const RankConnected& message) {
  if (message.generation != process.assigned || message.generation < process.told) {
    NoteStale("RankConnected", id, message.generation, process.told);
    return;
  }
  process.connected = message;
  Report(ProcessConnected{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const RankReady& message) {
  if (message.generation != process.assigned || message.generation < process.told) {
    NoteStale("RankReady", id, message.generation, process.told);
    return;
  }
  process.ready = message;
  Report(ProcessReady{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const RankFailed& message) {
  if (message.generation < process.told) {
    NoteStale("RankFailed", id, message.generation, process.told);
    return;
  }
  if (message.generation == process.assigned) process.failed = message;
  Report(ProcessFailed{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const MetricReported& message) {
  Report(MetricObserved{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const RankFinished&) {
  process.finished = true;
  Note(AgentNoticeLevel::kInfo, Reason::kJobFinished, "Rank program finished",
       {{"process", Text(id)}, {"job", process.spawn.job.value}});
}

// ---- the keeper of snapshots

void AgentCore::Hear(ProcessId id, Process& process, const SnapshotStaged& message) {
  Emit(KeepStaged{process.spawn.job, id, message});
}

void AgentCore::Hear(ProcessId id, Process& process, const SnapshotWanted& message) {
  if (message.generation < process.told) {
    NoteStale("SnapshotWanted", id, message.generation, process.told);
    return;
  }
  Emit(LoadSnapshot{process.spawn.job, id, message});
}

void AgentCore::Obey(const CopySnapshot& command) { Emit(CopyForKeeping{command}); }

void AgentCore::Obey(const DropSnapshots& command) { Emit(DropKept{command}); }

void AgentCore::On(const KeeperReported& event) { Report(event.fact); }

void AgentCore::On(const SnapshotLoaded& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end() || event.answer.generation < it->second.told) {
    Emit(DropDescriptor{event.descriptor});
    return;
  }
  Tell(it->second, event.answer, event.descriptor);
}

void AgentCore::On(const SnapshotLoadFailed& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end() || event.answer.generation < it->second.told) return;
  Tell(it->second, event.answer);
}

}  // namespace everstep
