// Life and death of rank processes.
#include <csignal>

#include <algorithm>
#include <vector>

#include "proto/base/mutation.h"
#include "worker/core/agent/agent_core.h"
#include "worker/core/agent/environment.h"

namespace everstep {
namespace {

std::string Text(ProcessId id) { return std::to_string(id.value); }

}  // namespace

void AgentCore::Obey(const SpawnProcess& command) {
  if (auto known = processes_.find(command.process); known != processes_.end()) {
    if (known->second.state == ProcessState::kRunning) {
      Report(ProcessStarted{command.job, command.process, known->second.pid});
    }
    return;
  }
  if (auto gone = gone_.find(command.process); gone != gone_.end()) {
    Report(gone->second.last, gone->second.noticed);
    return;
  }
  if (stopping_) {
    Forget(command.process,
           ProcessStartFailed{command.job, command.process, Reason::kServerDrained,
                              "server " + inventory_.server.value + " is stopping"},
           now_);
    return;
  }
  if (processes_.size() >= policy_.processes_max) {
    Forget(command.process,
           ProcessStartFailed{command.job, command.process, Reason::kNoCapacity,
                              "server " + inventory_.server.value + " runs its limit of " +
                                  std::to_string(policy_.processes_max) + " processes"},
           now_);
    return;
  }
  releasing_.erase(command.job);
  Process process;
  process.spawn = command;
  process.told = command.spec.opaque ? command.generation : Generation(0);
  processes_.emplace(command.process, std::move(process));
  FailWaitingOnUnkillable();
  StartWaiting();
}

bool AgentCore::DeviceHeld(const SpawnProcess& spawn) const {
  if (Mutated(Mutation::kReuseDeviceEarly)) return false;
  for (const auto& [id, other] : processes_) {
    if (id != spawn.process && other.ending && other.state != ProcessState::kWaiting &&
        other.spawn.device == spawn.device) {
      return true;
    }
  }
  return false;
}

void AgentCore::StartWaiting() {
  for (auto& [id, process] : processes_) {
    if (process.state != ProcessState::kWaiting || DeviceHeld(process.spawn)) continue;
    process.state = ProcessState::kSpawning;
    Emit(StartProcess{process.spawn, BuildEnvironment(process.spawn, inventory_.host)});
  }
}

void AgentCore::FailWaitingOnUnkillable() {
  std::vector<std::pair<ProcessId, Fact>> failed;
  for (const auto& [id, process] : processes_) {
    if (process.state != ProcessState::kWaiting) continue;
    for (const auto& [other_id, other] : processes_) {
      if (!other.unkillable || other.spawn.device != process.spawn.device) continue;
      failed.emplace_back(id, ProcessStartFailed{process.spawn.job, id, Reason::kServerQuarantined,
                                                 "device " + std::to_string(process.spawn.device.value) +
                                                     " is held by process " + Text(other_id) + " (pid " +
                                                     std::to_string(other.pid) + "), which can't be killed"});
      break;
    }
  }
  for (auto& [id, fact] : failed) Forget(id, std::move(fact), now_);
}

void AgentCore::On(const ProcessSpawned& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end()) return;
  Process& process = it->second;
  process.state = ProcessState::kRunning;
  process.pid = event.pid;
  Report(ProcessStarted{process.spawn.job, event.process, event.pid});
  if (process.ending) {
    // The order to end came while it was being started.
    if (now_ >= process.kill_at) {
      Kill(event.process, process);
    } else {
      Emit(SignalProcess{event.process, SIGTERM});
    }
  }
  for (auto& [connection, socket] : sockets_) {
    if (!socket.held_hello || socket.held_hello->process != event.process) continue;
    const RankHello hello = *socket.held_hello;
    socket.held_hello.reset();
    AcceptHello(connection, socket, hello);
    break;
  }
}

void AgentCore::On(const SpawnFailed& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end()) return;
  Note(AgentNoticeLevel::kError, event.reason, "Process could not be started",
       {{"process", Text(event.process)}, {"job", it->second.spawn.job.value}, {"err", event.message}});
  Forget(event.process, ProcessStartFailed{it->second.spawn.job, event.process, event.reason, event.message},
         now_);
}

void AgentCore::On(const ProcessExitedObserved& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end()) return;
  const Process& process = it->second;
  ProcessExited exited;
  exited.job = process.spawn.job;
  exited.process = event.process;
  exited.exit_code = event.exit_code;
  exited.signal = event.signal;
  exited.finished = process.finished ||
                    (process.spawn.spec.opaque && event.signal == 0 && event.exit_code == 0 && !process.ending);
  exited.progress = event.progress;
  exited.last_lines = event.last_lines;
  constexpr size_t kLastLinesMax = 20;
  if (exited.last_lines.size() > kLastLinesMax) {
    exited.last_lines.erase(exited.last_lines.begin(), exited.last_lines.end() - kLastLinesMax);
  }
  const Reason reason = event.signal != 0        ? Reason::kProcessKilled
                        : event.exit_code != 0   ? Reason::kProcessExited
                                                 : Reason::kNone;
  Note(AgentNoticeLevel::kInfo, reason, "Process ended",
       {{"process", Text(event.process)},
        {"job", process.spawn.job.value},
        {"exitCode", std::to_string(event.exit_code)},
        {"signal", std::to_string(event.signal)},
        {"ordered", process.ending ? "true" : "false"}});
  Forget(event.process, std::move(exited), event.noticed);
}

// The process is no more: reports `last`, remembers it, and lets go of all that was held for it.
void AgentCore::Forget(ProcessId id, Fact last, Instant noticed) {
  auto it = processes_.find(id);
  JobUid job;
  if (it != processes_.end()) {
    job = it->second.spawn.job;
    if (it->second.connection) {
      sockets_.erase(*it->second.connection);
      Emit(CloseConnection{*it->second.connection});
    }
    processes_.erase(it);
  } else {
    std::visit([&job](const auto& fact) {
      if constexpr (requires { fact.job; }) job = fact.job;
    }, last);
  }
  std::vector<Connection> held;
  for (const auto& [connection, socket] : sockets_) {
    if (socket.held_hello && socket.held_hello->process == id) held.push_back(connection);
  }
  for (Connection connection : held) RefuseHello(connection, "process " + Text(id) + " is gone");

  gone_[id] = GoneProcess{job, last, noticed};
  gone_order_.push_back(id);
  if (gone_order_.size() > policy_.gone_processes_max) {
    gone_.erase(gone_order_.front());
    gone_order_.pop_front();
  }
  Report(std::move(last), noticed);
  Emit(NoteProcessGone{job, id});
  FinishRelease(job);
  StartWaiting();
}

void AgentCore::Obey(const KillProcess& command) {
  auto it = processes_.find(command.process);
  if (it != processes_.end()) {
    End(command.process, it->second, command.grace);
    return;
  }
  if (auto gone = gone_.find(command.process); gone != gone_.end()) {
    Report(gone->second.last, gone->second.noticed);
    return;
  }
  // Never heard of it: remembered as gone, so that a spawn of it that was delayed is not obeyed.
  ProcessExited exited;
  exited.job = command.job;
  exited.process = command.process;
  exited.signal = SIGKILL;
  Forget(command.process, std::move(exited), now_);
}

void AgentCore::Obey(const ReleaseJob& command) {
  std::vector<ProcessId> ours;
  for (const auto& [id, process] : processes_) {
    if (process.spawn.job == command.job) ours.push_back(id);
  }
  releasing_[command.job] = true;
  for (ProcessId id : ours) {
    auto it = processes_.find(id);
    if (it == processes_.end()) continue;
    if (!it->second.ending) Tell(it->second, StopRank{"the job ended"});
    End(id, it->second, it->second.spawn.spec.termination_grace);
  }
  FinishRelease(command.job);
}

void AgentCore::FinishRelease(const JobUid& job) {
  if (!releasing_.contains(job)) return;
  for (const auto& [id, process] : processes_) {
    if (process.spawn.job == job) return;
  }
  releasing_.erase(job);
  Emit(ReleaseSnapshots{job});
}

void AgentCore::End(ProcessId id, Process& process, Duration grace) {
  if (process.state == ProcessState::kWaiting) {
    ProcessExited exited;
    exited.job = process.spawn.job;
    exited.process = id;
    exited.signal = SIGKILL;
    Forget(id, std::move(exited), now_);
    return;
  }
  if (process.killed) return;
  const Instant kill_at = now_ + std::max(grace, Duration::zero());
  const bool first = !process.ending;
  process.ending = true;
  process.kill_at = std::min(process.kill_at, kill_at);
  if (process.state != ProcessState::kRunning) return;
  if (now_ >= process.kill_at) {
    Kill(id, process);
  } else if (first) {
    Emit(SignalProcess{id, SIGTERM});
  }
}

void AgentCore::EndAll(Duration grace) {
  std::vector<ProcessId> all;
  for (const auto& [id, process] : processes_) all.push_back(id);
  for (ProcessId id : all) {
    auto it = processes_.find(id);
    if (it == processes_.end()) continue;
    const Duration own = it->second.spawn.spec.termination_grace;
    End(id, it->second, std::min(grace, std::max(own, Duration::zero())));
  }
}

void AgentCore::Kill(ProcessId id, Process& process) {
  process.ending = true;
  process.killed = true;
  process.kill_at = kNever;
  process.socket_lost_until = kNever;
  process.unkillable_at = now_ + policy_.unkillable_after;
  Emit(SignalProcess{id, SIGKILL});
}

void AgentCore::CheckProcessDeadlines() {
  bool unkillable_found = false;
  for (auto& [id, process] : processes_) {
    if (process.state != ProcessState::kRunning) continue;  // ProcessSpawned looks at kill_at
    if (now_ >= process.socket_lost_until) {
      Note(AgentNoticeLevel::kWarning, Reason::kRankHung, "Rank without socket killed",
           {{"process", Text(id)}, {"job", process.spawn.job.value}});
      Kill(id, process);
    }
    if (!process.killed && now_ >= process.kill_at) Kill(id, process);
    if (now_ >= process.unkillable_at) {
      process.unkillable = true;
      process.unkillable_at = kNever;
      unkillable_found = true;
      Note(AgentNoticeLevel::kError, Reason::kServerQuarantined, "Process survived SIGKILL, its device is blocked",
           {{"process", Text(id)},
            {"pid", std::to_string(process.pid)},
            {"device", std::to_string(process.spawn.device.value)}});
    }
  }
  if (unkillable_found) FailWaitingOnUnkillable();
}

bool AgentCore::AllReapedOrUnkillable() const {
  return std::all_of(processes_.begin(), processes_.end(), [](const auto& entry) { return entry.second.unkillable; });
}

void AgentCore::On(const LinesCaptured& event) {
  auto it = processes_.find(event.process);
  if (it == processes_.end() || event.lines.empty()) return;
  Process& process = it->second;
  if (now_ >= process.lines_window + Seconds(1)) {
    process.lines_window = now_;
    process.lines_in_window = 0;
  }
  LinesPrinted printed{process.spawn.job, event.process, {}};
  if (process.lines_left_out > 0 && process.lines_in_window < policy_.lines_per_second_max) {
    printed.lines.push_back("[" + std::to_string(process.lines_left_out) + " lines left out; the log file has them]");
    process.lines_left_out = 0;
  }
  for (const std::string& line : event.lines) {
    if (process.lines_in_window >= policy_.lines_per_second_max) {
      ++process.lines_left_out;
      ++counts_.lines_left_out;
      continue;
    }
    ++process.lines_in_window;
    printed.lines.push_back(line);
  }
  if (!printed.lines.empty()) Report(std::move(printed));
}

}  // namespace everstep
