// Calls of operators and supervisors that change something. All are idempotent: the same request id, or a wish that is
// already so, succeeds again.
#include <algorithm>

#include <fmt/format.h>

#include "controller/core/controller_impl.h"
#include "controller/core/job_spec.h"

namespace everstep {

namespace {
constexpr size_t kEndedJobsKept = 100;
}

void ControllerCore::Impl::Reply(const OperatorCalled& call, Status status, JobUid job, std::string message) {
  Push(ReplyToOperator{call.call, std::move(status), std::move(job), std::move(message)});
}

void ControllerCore::Impl::OnOperator(const OperatorCalled& event) {
  std::visit([&](const auto& request) { Handle(event, request); }, event.body);
}

void ControllerCore::Impl::Handle(const OperatorCalled& call, const SubmitJob& request) {
  const JobSpec& spec = request.spec;
  if (auto known = ledger_.requests.find(call.request); !call.request.empty() && known != ledger_.requests.end()) {
    return Reply(call, OkStatus(), known->second, fmt::format("job/{} submitted", spec.name));
  }
  const std::vector<std::string> problems = ValidateJobSpec(spec);
  if (!problems.empty()) {
    return Reply(call, InvalidArgument(fmt::format("{}", fmt::join(problems, "; "))), {}, "");
  }
  size_t live = 0;
  for (const auto& [uid, entry] : ledger_.jobs) {
    if (entry.ended) continue;
    ++live;
    if (entry.spec.name == spec.name) {
      return Reply(call, AlreadyExists(fmt::format("name: a job \"{}\" is running; cancel it or choose another name",
                                                   spec.name)), {}, "");
    }
  }
  if (live >= static_cast<size_t>(policy_.jobs_max)) {
    return Reply(call, ResourceExhausted(fmt::format("jobs_max: {} jobs are running; raise jobs_max or wait", live)), {}, "");
  }
  int64_t devices = 0;
  for (const auto& [id, server] : servers_) devices += static_cast<int64_t>(server.inventory.devices.size());
  const int64_t needed = std::max<int64_t>(spec.pipeline_stages, int64_t{spec.servers_min} * spec.ranks_per_server);
  if (devices > 0 && needed > devices) {
    return Reply(call, FailedPrecondition(fmt::format("servers_min: the job needs at least {} devices, all servers "
                                                      "together have {}; lower servers_min or ranks_per_server, or add "
                                                      "servers", needed, devices)), {}, "");
  }
  if (call.dry_run) return Reply(call, OkStatus(), {}, fmt::format("job/{} submitted (dry run)", spec.name));
  JobUid uid(fmt::format("{:016x}", prng_.Next()));
  while (ledger_.jobs.contains(uid)) uid = JobUid(fmt::format("{:016x}", prng_.Next()));
  Append(JobSubmitted{uid, spec, call.request, now_.wall});
  JobRow& job = jobs_[uid];
  job.uid = uid;
  job.submitted_at = now_.instant;
  Reply(call, OkStatus(), uid, fmt::format("job/{} submitted", spec.name));
  Note(NoticeLevel::kInfo, Reason::kJobStarted, "Job submitted", {}, &job,
       {{"uid", uid.value}, {"identity", call.identity}});
  StartRecovery(job, Reason::kJobStarted, "the job was submitted", Duration(0), false);
  // Ended jobs leave the ledger, oldest first.
  std::vector<std::pair<uint64_t, JobUid>> ended;
  for (const auto& [id, entry] : ledger_.jobs) {
    if (entry.ended) ended.emplace_back(entry.order, id);
  }
  std::sort(ended.begin(), ended.end());
  for (size_t i = 0; i + kEndedJobsKept < ended.size(); ++i) {
    Append(JobForgotten{ended[i].second});
    jobs_.erase(ended[i].second);
  }
}

void ControllerCore::Impl::Handle(const OperatorCalled& call, const CancelJob& request) {
  JobRow* found = nullptr;
  for (auto& [uid, job] : jobs_) {
    const JobEntry& entry = Entry(job);
    if (uid.value != request.job && entry.spec.name != request.job) continue;
    // The live one of that name, else the newest.
    if (found == nullptr || !entry.ended || (Entry(*found).ended && entry.order > Entry(*found).order)) found = &job;
  }
  if (found == nullptr) {
    return Reply(call, NotFound(fmt::format("job: no job \"{}\"; see `everstep get jobs`", request.job)), {}, "");
  }
  const JobEntry& entry = Entry(*found);
  const std::string name = entry.spec.name;
  if (entry.ended && entry.ended->outcome != JobState::kCancelled) {
    return Reply(call, FailedPrecondition(fmt::format("job: \"{}\" has ended already", name)), found->uid, "");
  }
  if (!entry.ended && !call.dry_run) {
    EndJob(*found, JobState::kCancelled, Reason::kJobCancelled, static_cast<int32_t>(JobExit::kCancelled),
           fmt::format("cancelled by {}", call.identity));
  }
  Reply(call, OkStatus(), found->uid, fmt::format("job/{} cancelled{}", name, call.dry_run ? " (dry run)" : ""));
}

void ControllerCore::Impl::Handle(const OperatorCalled& call, const SetDrain& request) {
  const auto known = ledger_.servers.find(request.server);
  if (known == ledger_.servers.end()) {
    return Reply(call, NotFound(fmt::format("server: no server \"{}\"; see `everstep get servers`", request.server.value)),
                 {}, "");
  }
  const char* verb = request.draining ? "drained" : "undrained";
  const std::deque<RequestId>& seen = known->second.drain_requests;
  const bool again = !call.request.empty() && std::find(seen.begin(), seen.end(), call.request) != seen.end();
  const bool changes = Draining(request.server) != request.draining;
  // A request that finds its wish fulfilled is remembered, too: repeated after a later one, it must not undo that.
  if (!call.dry_run && !again && (changes || !call.request.empty())) {
    Append(ServerDrainSet{request.server, request.draining, call.request});
  }
  if (!call.dry_run && !again && changes) {
    Note(NoticeLevel::kInfo, Reason::kServerDrained, request.draining ? "Drain asked for" : "Drain taken back",
         request.server, nullptr, {{"identity", call.identity}});
    dirty_ = true;
  }
  Reply(call, OkStatus(), {}, fmt::format("server/{} {}{}", request.server.value, verb, call.dry_run ? " (dry run)" : ""));
}

}  // namespace everstep
