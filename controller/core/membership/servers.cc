// Who is in the cluster and who is alive: registration, incarnations, leases, probes, and the mass-silence brake
// (docs/protocol.md section 7). The only writer of server state.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "proto/base/check.h"
#include "proto/base/mutation.h"

namespace everstep {

ServerRow* ControllerCore::Impl::FindServer(const ServerId& id) {
  auto it = servers_.find(id);
  return it == servers_.end() ? nullptr : &it->second;
}

ServerRow* ControllerCore::Impl::FindSession(SessionId session) {
  auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : FindServer(it->second);
}

bool ControllerCore::Impl::Draining(const ServerId& server) const {
  auto it = ledger_.servers.find(server);
  return it != ledger_.servers.end() && it->second.draining;
}

bool ControllerCore::Impl::Usable(const ServerRow& server) const {
  const bool draining = Draining(server.inventory.server) && !Mutated(Mutation::kPlanOnDraining);
  return !server.dead && server.session && !server.late && !draining;
}

ServerState ControllerCore::Impl::StateOf(const ServerRow& server) const {
  if (server.dead) return ServerState::kDead;
  if (!server.session || server.late) return ServerState::kSuspect;
  if (Draining(server.inventory.server)) return ServerState::kDraining;
  auto it = server_processes_.find(server.inventory.server);
  if (it != server_processes_.end()) {
    for (ProcessId id : it->second) {
      const ProcessRow& process = processes_.at(id);
      if (!process.exited && (process.member || process.planned)) return ServerState::kActive;
    }
  }
  return ServerState::kSpare;
}

// ---- sessions

void ControllerCore::Impl::OnAgentConnected(const AgentConnected& event) {
  const AgentHello& hello = event.hello;
  const ServerId& id = hello.inventory.server;
  auto refuse = [&](bool permanent, std::string message) {
    Push(SendCommand{event.session, {ledger_.term, CommandSequence(1)}, Refuse{std::move(message), permanent}});
    Push(CloseSession{event.session});
    Note(NoticeLevel::kInfo, Reason::kStaleGeneration, "Agent refused", id, nullptr,
         {{"session", std::to_string(event.session.value)}});
  };
  if (hello.protocol_version != kProtocolVersion) {
    return refuse(true, fmt::format("protocol version: the agent speaks {}, the controller {}; install the same release",
                                    hello.protocol_version, kProtocolVersion));
  }
  if (id.empty()) return refuse(true, "name: empty; start the agent with --name");
  ServerRow* known = FindServer(id);
  if (known == nullptr && servers_.size() >= static_cast<size_t>(policy_.servers_max)) {
    return refuse(true, fmt::format("servers_max: {} servers are registered; raise servers_max", servers_.size()));
  }
  auto entry = ledger_.servers.find(id);
  // An agent process keeps its incarnation: a dead one is refused, whoever has its name now.
  if (entry != ledger_.servers.end() && hello.incarnation.value != 0 && hello.incarnation <= entry->second.dead_upto) {
    return refuse(false, fmt::format("incarnation {} of {} was declared dead; reap its ranks and register anew",
                                     hello.incarnation.value, id.value));
  }
  if (known != nullptr && !known->dead && known->session && hello.start_nonce != known->start_nonce) {
    // After a power failure a host may be back before its old stream is known to be gone. Whoever has the name is asked;
    // only when it has answered is the name taken for good. Otherwise its lease ends, and the next try succeeds.
    if (known->claimed_at == kNever || known->liveness.heard() <= known->claimed_at) {
      if (known->claimed_at == kNever) known->claimed_at = now_.instant;
      StartProbing(*known);
      return refuse(false, fmt::format("name: {} is that of an agent that may be gone, which is being asked; try again",
                                       id.value));
    }
    return refuse(true, fmt::format("name: {} is taken by a connected agent at {}; give each agent its own --name",
                                    id.value, known->inventory.root_directory));
  }
  Register(event);
}

void ControllerCore::Impl::Register(const AgentConnected& event) {
  const AgentHello& hello = event.hello;
  const ServerId id = hello.inventory.server;
  auto entry = ledger_.servers.find(id);
  const bool same = entry != ledger_.servers.end() &&
                    (entry->second.start_nonce == hello.start_nonce || Mutated(Mutation::kKeepIncarnation)) &&
                    entry->second.newest > entry->second.dead_upto;
  if (!same) {
    // A new agent process is the immediate death of the old one's ranks.
    if (ServerRow* old = FindServer(id); old != nullptr && !old->dead) {
      hold_losses_ = true;
      DeclareDead(*old, Reason::kServerRestarted,
                  fmt::format("agent of {} registered again with a new incarnation", id.value));
      hold_losses_ = false;
    }
    // Above what the agent had, too: the ledger may be an old copy.
    const Incarnation newest = entry == ledger_.servers.end() ? Incarnation(0) : entry->second.newest;
    Append(ServerRegistered{id, std::max(newest, hello.incarnation).Next(), hello.start_nonce,
                            hello.inventory.failure_domain});
  }
  ServerRow& server = servers_[id];
  if (server.session) {
    sessions_.erase(*server.session);
    Push(CloseSession{*server.session});
  }
  const Incarnation incarnation = ledger_.servers.at(id).newest;
  const bool fresh = !same || server.incarnation != incarnation;
  if (fresh) {
    server = ServerRow{};
    server.registered = now_.wall;
    server.registered_at = now_.instant;
    server.liveness = ServerLiveness(now_.instant, incarnation);
    for (auto& [uid, job] : jobs_) {  // whatever kept it from running a program may be mended
      job.banned.erase(id);
      job.avoided.erase(id);
    }
  }
  server.inventory = hello.inventory;
  server.incarnation = incarnation;
  server.start_nonce = hello.start_nonce;
  server.session = event.session;
  server.commands_sent = CommandSequence(0);
  server.dead = false;
  server.late = false;
  server.silent_held = false;
  server.silent_since = kNever;
  server.claimed_at = kNever;
  server.evidence_at = kNever;
  server.reason = fresh ? Reason::kRegistered : Reason::kHealthy;
  server.liveness.OnStreamConnected(now_.instant);
  sessions_[event.session] = id;
  next_judgement_ = std::min(next_judgement_, now_.instant + policy_.lease / 2);
  dirty_ = true;
  AcceptReports(server, hello);
  Welcomed(server, hello);  // agents obey nothing before it
  AcceptSnapshots(server, hello);
  ResendTo(server);
  hold_copies_ = false;
  for (auto& [uid, job] : jobs_) {
    if (job.stage == JobStage::kCollecting && job.copies_until != kNever) CheckCollected(job);
  }
  // Only now: a recovery point that is decided on these losses counts what its store has kept.
  LoseTogether(std::exchange(losses_held_, {}));
  Note(NoticeLevel::kInfo, Reason::kRegistered, fresh ? "Server registered" : "Server reconnected", id, nullptr,
       {{"incarnation", std::to_string(incarnation.value)},
        {"devices", std::to_string(server.inventory.devices.size())}});
}

void ControllerCore::Impl::Welcomed(ServerRow& server, const AgentHello& hello) {
  Welcome welcome;
  welcome.incarnation = server.incarnation;
  welcome.heartbeat_interval = policy_.heartbeat_interval;
  welcome.heartbeat_address = options_.heartbeat_address;
  for (const ProcessStatus& status : hello.processes) {
    const ProcessRow* process = FindProcess(status.process);
    if (process != nullptr && !process->exited && !process->kill_sent && process->server == server.inventory.server) {
      welcome.keep.push_back(status.process);
    }
  }
  Send(server, std::move(welcome));
}

// What the agent says is there, against what we believe.
void ControllerCore::Impl::AcceptReports(ServerRow& server, const AgentHello& hello) {
  std::set<ProcessId> reported;
  for (const ProcessStatus& status : hello.processes) {
    JobRow* job = FindJob(status.job);
    ProcessRow* process = FindProcess(status.process);
    if (process == nullptr) {
      process = &processes_[status.process];
      process->id = status.process;
      process->job = status.job;
      process->server = server.inventory.server;
      process->device = status.device;
      job_processes_[status.job].insert(status.process);
      server_processes_[server.inventory.server].insert(status.process);
      // A standby that only the previous controller knew may stay; a member would be in the ledger. Whoever is not kept
      // holds its device until it is reaped.
      process->kill_sent = job == nullptr || job->stage == JobStage::kEnded || Entry(*job).spec.opaque ||
                           status.assigned.value != 0 || status.progress.generation.value != 0;
      process->join_deadline = now_.instant + policy_.process_start_timeout;
      if (!process->kill_sent && !status.joined) {
        job->standby_check = std::min(job->standby_check, process->join_deadline);
      }
    }
    if (process->exited || process->server != server.inventory.server) continue;
    reported.insert(status.process);
    process->incarnation = server.incarnation;
    process->reported = process->started = process->spawn_sent = true;
    process->device = status.device;
    process->pid = status.pid;
    process->joined = status.joined;
    process->mesh_address = status.mesh_address;
    process->progress = status.progress;
    process->missing_deadline = kNever;
    if (job == nullptr || job->stage == JobStage::kEnded || process->kill_sent) continue;
    // What it took decides only whether we adopt. Otherwise our word stands, and ResendTo repeats what was lost.
    if (job->stage == JobStage::kAdopting && !Entry(*job).spec.opaque) process->assigned = status.assigned;
    if (status.collected) {
      process->collected = status.promised;
      process->report = status.report;
    }
    const Generation highest = std::max(status.promised, status.assigned);
    if (highest > Entry(*job).fenced) {
      job->generation_floor = std::max(job->generation_floor, highest);
      Note(NoticeLevel::kError, Reason::kLedgerBehind, "Ledger is behind an agent", server.inventory.server, job,
           {{"ledgerGeneration", std::to_string(Entry(*job).fenced.value)},
            {"reportedGeneration", std::to_string(highest.value)}});
    }
    NoteCommitted(*job, status.progress.vote_passed);
  }
  for (ProcessId id : server_processes_[server.inventory.server]) {
    ProcessRow& process = processes_.at(id);
    if (process.exited || reported.contains(id) || !process.started) {
      // A spawn command that was lost with the old stream is sent again by ResendTo.
      if (!process.exited && !process.started) {
        process.spawn_sent = false;
        // Its agent never heard of it, and never will: it must not hold its device.
        if (process.kill_sent) process.exited = true;
      }
      continue;
    }
    // Its exit fact is in the agent's outbox and follows on this stream; if not, it is gone without a word.
    process.missing_deadline = now_.instant + Milliseconds(200);
    next_judgement_ = std::min(next_judgement_, process.missing_deadline);
  }
}

void ControllerCore::Impl::AcceptSnapshots(ServerRow& server, const AgentHello& hello) {
  ForgetSnapshotsOf(server.inventory.server);
  for (auto& [uid, job] : jobs_) {
    for (auto& [key, asked] : job.copies_asked) asked.tried.erase(server.inventory.server);
  }
  hold_copies_ = true;
  for (const auto& [uid, snapshot] : hello.snapshots) {
    if (FindJob(uid) != nullptr) {
      Handle(server, SnapshotHeld{uid, snapshot});
    } else {
      Send(server, DropSnapshots{uid, {snapshot}});  // the ledger has forgotten the job
    }
  }
  for (auto& [uid, job] : jobs_) {  // copies that were asked of it, and that it has not got
    if (job.stage != JobStage::kEnded) AdvanceProtection(job);
  }
}

// Level, not edge: whatever this agent should have been told by now, it is told again.
void ControllerCore::Impl::ResendTo(ServerRow& server) {
  const ServerId& id = server.inventory.server;
  for (auto& [uid, job] : jobs_) {
    const JobEntry& entry = Entry(job);
    if (job.stage == JobStage::kEnded) {
      Send(server, ReleaseJob{uid});
      continue;
    }
    FenceProcesses fence{uid, entry.fenced, {}};
    bool assigned_here = false;
    for (ProcessRow* process : ProcessesOf(uid)) {
      if (process->server != id || process->exited) continue;
      if (process->kill_sent) {
        Send(server, KillProcess{uid, process->id, Duration(0)});
      } else if (!process->started && (process->planned || !process->member)) {
        SpawnPlanned(job, *process);
      } else if (job.expected.contains(process->id) && process->collected < entry.fenced) {
        fence.processes.push_back(process->id);
      }
      if (process->member && entry.assignment && entry.assignment->generation == entry.fenced) assigned_here = true;
    }
    if (!fence.processes.empty()) {
      if (job.stage == JobStage::kCollecting) Send(server, std::move(fence));
      else if (job.stage == JobStage::kPreparing) {
        Send(server, PrepareProcesses{uid, entry.fenced, std::move(fence.processes)});
      }
    }
    if (assigned_here && job.stage == JobStage::kAssigned) Send(server, AssignProcesses{*entry.assignment});
    if (assigned_here && job.stage == JobStage::kRunning && entry.resumed == entry.fenced) {
      Send(server, ResumeProcesses{uid, entry.resumed, job.protected_step});
    }
  }
}

void ControllerCore::Impl::OnAgentDisconnected(const AgentDisconnected& event) {
  ServerRow* server = FindSession(event.session);
  sessions_.erase(event.session);
  if (server == nullptr || server->session != event.session) return;
  server->session.reset();
  if (server->dead) return;
  server->reason = Reason::kStreamBroken;
  server->evidence_at = std::min(server->evidence_at, now_.instant);
  server->liveness.OnStreamLost(now_.instant);
  StartProbing(*server);
  next_judgement_ = std::min(next_judgement_, server->liveness.NextDeadline(now_.instant, policy_));
  Note(NoticeLevel::kInfo, Reason::kStreamBroken, "Agent stream broke", server->inventory.server, nullptr);
  dirty_ = true;
}

// ---- liveness

void ControllerCore::Impl::OnHeartbeat(const Heartbeat& heartbeat) {
  ServerRow* server = FindServer(heartbeat.server);
  if (server == nullptr || server->dead || server->incarnation != heartbeat.incarnation) {
    CountStale("heartbeat");
    return;
  }
  const Duration gap = now_.instant - server->liveness.heard();
  if (!server->liveness.OnHeartbeat(heartbeat.sequence, now_.instant)) {
    CountStale("heartbeat");
    return;
  }
  Push(Measured{Measured::What::kHeartbeat, Reason::kNone, RecoveryPhase::kNone, "", 0});
  Push(Measured{Measured::What::kHeartbeatDelay, Reason::kNone, RecoveryPhase::kNone, "", ToSeconds(gap)});
  if (server->session) server->evidence_at = kNever;  // whoever complained was wrong
  if (server->late && server->session) {
    server->late = false;
    server->reason = Reason::kHealthy;
    dirty_ = true;
  }
  if (server->silent_held) {
    server->silent_held = false;
    server->silent_since = kNever;
    ReleaseFreezeIfOver();
  }
  for (const Heartbeat::Vote& vote : heartbeat.votes) {
    ProcessRow* process = FindProcess(vote.process);
    if (process == nullptr || process->exited || process->server != heartbeat.server) continue;
    // A step belongs to its generation: a later one may count from lower again.
    Progress& progress = process->progress;
    if (vote.generation < progress.generation) continue;
    if (vote.generation > progress.generation) {
      progress = Progress{};
      progress.generation = vote.generation;
    }
    progress.phase = vote.phase;
    if (vote.step <= progress.vote_passed) continue;
    progress.vote_passed = vote.step;
    JobRow* job = FindJob(process->job);
    if (job == nullptr || vote.generation != Entry(*job).resumed) continue;
    NoteCommitted(*job, vote.step);
    job->vote_at = now_.instant;
  }
}

void ControllerCore::Impl::StartProbing(ServerRow& server) {
  server.liveness.OnProbeStarted(now_.instant, policy_);
  if (server.session) {
    server.probe_nonce = prng_.Next();
    Send(server, Probe{server.probe_nonce});
  }
  if (server.inventory.probe_address.empty()) return;  // known from the ledger only
  Push(StartProbe{server.inventory.server, server.incarnation, server.inventory.probe_address, policy_.probe_timeout});
}

void ControllerCore::Impl::OnProbe(const ProbeFinished& event) {
  ServerRow* server = FindServer(event.server);
  if (server == nullptr || server->dead || server->incarnation != event.incarnation) return;
  if (event.outcome == ProbeOutcome::kRefused && !server->session) {
    DeclareDead(*server, Reason::kServerRefused,
                fmt::format("the host of {} refused its agent's port", event.server.value));
    return;
  }
  if (event.outcome == ProbeOutcome::kConnected) {
    server->liveness.OnPortAnswered(now_.instant, policy_);
    next_judgement_ = std::min(next_judgement_, server->liveness.NextDeadline(now_.instant, policy_));
  }
}

void ControllerCore::Impl::JudgeServers() {
  next_judgement_ = kNever;
  std::vector<ServerId> ids;
  for (const auto& [id, server] : servers_) ids.push_back(id);
  for (const ServerId& id : ids) {
    ServerRow& server = servers_.at(id);
    if (server.dead) continue;
    // A vote covers the whole job: one that passed proves that every member of its generation lived.
    for (ProcessId pid : server_processes_[id]) {
      const ProcessRow& process = processes_.at(pid);
      const JobRow* job = FindJob(process.job);
      if (process.member && !process.exited && job != nullptr &&
          (job->stage == JobStage::kRunning || job->stage == JobStage::kPreparing || job->stage == JobStage::kAdopting)) {
        server.liveness.OnVote(job->vote_at);
      }
    }
    switch (server.liveness.Judge(now_.instant, policy_)) {
      case ServerLiveness::Verdict::kAlive: break;
      case ServerLiveness::Verdict::kLate:
        if (!server.late) {
          server.late = true;
          server.reason = Reason::kHeartbeatLate;
          Push(Measured{Measured::What::kVerdict, Reason::kHeartbeatLate, RecoveryPhase::kNone, "suspect", 0});
          Note(NoticeLevel::kInfo, Reason::kHeartbeatLate, "Server suspected", id, nullptr);
        }
        break;
      case ServerLiveness::Verdict::kProbeNow:
        StartProbing(server);
        break;
      case ServerLiveness::Verdict::kSilent:
        if (!HoldForMassSilence(server)) {
          const double silent = ToSeconds(now_.instant - server.liveness.heard());
          DeclareDead(server, Reason::kServerSilent,
                      fmt::format("{} was silent for {:.2f} s: no datagram, no answer on its stream, no vote", id.value,
                                  silent));
        }
        break;
    }
    if (!server.dead) {
      next_judgement_ = std::min(next_judgement_, server.liveness.NextDeadline(now_.instant, policy_));
      if (server.silent_held) next_judgement_ = std::min(next_judgement_, now_.instant + policy_.lease / 4);
    }
  }
  // Processes that their agent no longer lists and whose exit nobody reported.
  std::map<JobUid, std::vector<Loss>> losses;
  for (auto& [id, process] : processes_) {
    if (process.missing_deadline == kNever) continue;
    if (process.exited) {
      process.missing_deadline = kNever;
    } else if (now_.instant >= process.missing_deadline) {
      process.missing_deadline = kNever;
      process.exited = true;
      losses[process.job].push_back({&process, Reason::kProcessKilled,
                                     fmt::format("the agent of {} no longer has process {}", process.server.value,
                                                 process.id.value), Duration(0)});
    } else {
      next_judgement_ = std::min(next_judgement_, process.missing_deadline);
    }
  }
  for (auto& [uid, list] : losses) {
    if (JobRow* job = FindJob(uid)) LoseProcesses(*job, std::move(list));
  }
}

// True: the server stays, because so many fell silent at once that our own network is the likelier cause.
bool ControllerCore::Impl::HoldForMassSilence(ServerRow& server) {
  if (Mutated(Mutation::kIgnoreMassSilence)) return false;
  size_t alive = 0, silent = 0;
  for (const auto& [id, other] : servers_) {
    if (other.dead) continue;
    ++alive;
    // Datagrams are not sent in step: whoever is late now fell silent at the same time.
    if (other.silent_held || now_.instant - other.liveness.heard() > policy_.lease / 2) ++silent;
  }
  if (!server.silent_held) {
    if (alive < 5 || silent < std::max<size_t>(3, (alive + 1) / 2)) return frozen_ && alive >= 5 && silent >= 3;
    server.silent_held = true;
    server.silent_since = now_.instant;
    if (!frozen_) {
      frozen_ = true;
      frozen_since_ = now_.instant;
      Note(NoticeLevel::kError, Reason::kMassSilence, "Most servers fell silent at once; nobody is declared dead by "
           "silence for now", {}, nullptr,
           {{"silent", std::to_string(silent)}, {"alive", std::to_string(alive)}});
    }
    return true;
  }
  if (Mutated(Mutation::kNeverReleaseBrake)) return true;
  // Released when the hold is over and no job with a rank here votes any more.
  bool votes = false;
  for (ProcessId id : server_processes_[server.inventory.server]) {
    const ProcessRow& process = processes_.at(id);
    const JobRow* job = FindJob(process.job);
    if (process.member && !process.exited && job != nullptr && now_.instant - job->vote_at < policy_.lease) votes = true;
  }
  if (votes || now_.instant - server.silent_since < policy_.mass_silence_hold) return true;
  server.silent_held = false;
  return false;
}

void ControllerCore::Impl::ReleaseFreezeIfOver() {
  if (!frozen_) return;
  for (const auto& [id, server] : servers_) {
    if (!server.dead && server.silent_held) return;
  }
  frozen_ = false;
  Note(NoticeLevel::kInfo, Reason::kMassSilenceReleased, "Freeze ended", {}, nullptr,
       {{"seconds", fmt::format("{:.1f}", ToSeconds(now_.instant - frozen_since_))}});
  dirty_ = true;
}

void ControllerCore::Impl::DeclareDead(ServerRow& server, Reason reason, const std::string& evidence) {
  if (server.dead) return;
  const ServerId id = server.inventory.server;
  // The first evidence: the last heartbeat of a server that fell silent, else what made us look.
  Instant evidence_at = std::min(now_.instant, server.evidence_at);
  if (reason == Reason::kServerSilent) evidence_at = std::min(evidence_at, server.liveness.heard());
  Append(ServerDied{id, server.incarnation, reason});
  server.dead = true;
  server.late = false;
  server.silent_held = false;
  server.reason = reason;
  if (server.session) {
    // Should it wake: its stream ends, and it must reap its ranks before it may register again.
    Push(SendCommand{*server.session, {ledger_.term, server.commands_sent.Next()},
                     Refuse{fmt::format("incarnation {} of {} was declared dead ({})", server.incarnation.value, id.value,
                                        ReasonName(reason)), false}});
    Push(CloseSession{*server.session});
    sessions_.erase(*server.session);
    server.session.reset();
  }
  Push(Measured{Measured::What::kVerdict, reason, RecoveryPhase::kNone, "dead", 0});
  Note(NoticeLevel::kError, reason, "Server declared dead", id, nullptr, {{"evidence", evidence}});
  ForgetSnapshotsOf(id);
  std::map<JobUid, std::vector<Loss>> losses;
  for (ProcessId pid : server_processes_[id]) {
    ProcessRow& process = processes_.at(pid);
    if (process.exited) continue;
    process.exited = true;
    losses[process.job].push_back({&process, reason, evidence, now_.instant - evidence_at});
  }
  LoseTogether(std::move(losses));
  for (auto& [uid, job] : jobs_) {
    if (job.stage == JobStage::kEnded) continue;
    AdvanceProtection(job);
    AdvanceManifests(job);
  }
  ReleaseFreezeIfOver();
  dirty_ = true;
}

}  // namespace everstep
