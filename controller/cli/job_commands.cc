// `everstep run|submit|wait job|cancel job`: a job from the command line.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "controller/cli/command_line.h"
#include "controller/cli/job_flags.h"
#include "controller/cli/local_cluster.h"
#include "controller/cli/output.h"
#include "controller/cli/render.h"
#include "proto/model/job.h"

namespace everstep::cli {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kUsage = static_cast<int>(JobExit::kUsage);
constexpr int kInfrastructure = static_cast<int>(JobExit::kInfrastructure);
constexpr int kInterrupted = 130;

int FailRun(const Status& status) {
  const int code = Fail(status);
  return code == kExitUsage ? kUsage : kInfrastructure;
}

// Waits for SIGINT and SIGTERM on a thread of its own: the first cancels the job, the second ends
// this program. The signals must already be blocked in every thread (BlockInterrupts).
class InterruptWatcher {
 public:
  explicit InterruptWatcher(std::function<void()> on_first)
      : on_first_(std::move(on_first)), thread_([this] { Loop(); }) {}
  ~InterruptWatcher() {
    done_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }
  InterruptWatcher(const InterruptWatcher&) = delete;
  InterruptWatcher& operator=(const InterruptWatcher&) = delete;

 private:
  void Loop() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    for (int count = 0;;) {
      int signal = 0;
      if (sigwait(&set, &signal) != 0) continue;
      if (done_) return;
      if (++count > 1) _exit(kInterrupted);
      on_first_();
    }
  }

  std::function<void()> on_first_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void BlockInterrupts() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

struct FollowOptions {
  bool all_ranks = false;
  bool quiet = false;
  Duration patience = Seconds(60);  // how long the controller may stay unreachable
};

void ShowLines(const v1::RankLog& log, bool all_ranks, std::string& newest_of_leader) {
  if (log.rank() == 0 && log.lines_size() > 0) newest_of_leader = log.lines(log.lines_size() - 1);
  if (!all_ranks && log.rank() != 0) return;
  std::string text;
  for (const std::string& line : log.lines()) {
    text += all_ranks ? fmt::format("[rank {}] {}\n", log.rank(), line) : line + "\n";
  }
  Print(text);
}

void ShowEvent(const v1::Event& event) {
  if (event.level() < v1::EVENT_LEVEL_INFO) return;
  Note(fmt::format("{} {}", ClockTime(event.time()), EventLine(event)));
}

// What rank 0 printed at its end while the stream was broken: a controller that is restarted
// forwards only what comes.
void ShowMissedLines(const v1::JobOutcome& outcome, const std::string& newest_shown,
                     bool all_ranks) {
  if (outcome.state() != v1::JOB_STATE_SUCCEEDED) return;
  int first = 0;
  for (int i = 0; i < outcome.last_lines_size(); ++i) {
    if (outcome.last_lines(i) == newest_shown) first = i + 1;
  }
  for (int i = first; i < outcome.last_lines_size(); ++i) {
    Print(all_ranks ? fmt::format("[rank 0] {}\n", outcome.last_lines(i))
                    : outcome.last_lines(i) + "\n");
  }
}

// Shows what happens to the job until it ends. kUnavailable: the controller was away for longer
// than the patience.
Result<v1::JobOutcome> Follow(const AdminClient& client, const std::string& uid,
                              const FollowOptions& options) {
  auto last_contact = SteadyClock::now();
  bool said = false;
  uint64_t newest_event = 0;
  std::string newest_line;
  while (true) {
    std::optional<v1::JobOutcome> outcome;
    const Status status = client.Watch(uid, [&](const v1::WatchJobResponse& message) {
      last_contact = SteadyClock::now();
      if (said) Note("the controller answers again");
      said = false;
      if (message.dropped() > 0)
        Note(fmt::format("{} messages were dropped: this terminal is slow", message.dropped()));
      if (message.has_lines()) ShowLines(message.lines(), options.all_ranks, newest_line);
      if (message.has_event() &&
          (message.event().sequence() == 0 || message.event().sequence() > newest_event)) {
        newest_event = std::max(newest_event, message.event().sequence());
        if (!options.quiet) ShowEvent(message.event());
      }
      if (message.has_outcome()) outcome = message.outcome();
    });
    if (outcome) {
      ShowMissedLines(*outcome, newest_line, options.all_ranks);
      return *outcome;
    }
    const bool away = status.ok() || status.code() == StatusCode::kUnavailable ||
                      status.code() == StatusCode::kCancelled ||
                      status.code() == StatusCode::kDeadlineExceeded;
    if (!away) return status;
    if (SteadyClock::now() - last_contact > options.patience) return Unavailable(status.message());
    if (!said)
      Note("the controller does not answer; training goes on without it, waiting for it to return");
    said = true;
    if (client.WaitForConnection(Milliseconds(500)))
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void ShowOutcome(const AdminClient& client, const std::string& uid, const std::string& name,
                 const v1::JobOutcome& outcome) {
  v1::ListRecoveriesRequest request;
  request.set_job(uid);
  const auto listed = client.Call(request);
  int recoveries = 0;
  int64_t lost = 0;
  if (listed.ok()) {
    for (const v1::Recovery& recovery : listed.value().recoveries()) {
      if (recovery.generation_from() == 0) continue;  // the start of the job
      ++recoveries;
      lost += recovery.steps_lost();
    }
  }
  const std::string history = recoveries == 0
                                  ? "no recovery was needed"
                                  : fmt::format("{} recover{}, {} step(s) lost", recoveries,
                                                recoveries == 1 ? "y" : "ies", lost);
  if (outcome.state() == v1::JOB_STATE_SUCCEEDED) {
    Note(fmt::format("job/{} succeeded; {}", name, history));
    return;
  }
  for (const std::string& line : outcome.last_lines()) Note("  | " + line);
  Note(fmt::format("job/{} {}: {} ({}), exit code {}; {}", name,
                   outcome.state() == v1::JOB_STATE_CANCELLED ? "was cancelled" : "failed",
                   outcome.message(), outcome.reason(), outcome.exit_code(), history));
}

// Submits and follows one job. Cancels it on the first interrupt.
int RunOn(const AdminClient& client, const v1::JobSpec& spec, const FollowOptions& options) {
  v1::SubmitJobRequest request;
  request.set_request_id(NewRequestId());
  *request.mutable_spec() = spec;
  const auto submitted = client.Call(request);
  if (!submitted.ok()) return FailRun(submitted.status());
  const std::string uid = submitted.value().job_uid();
  if (!options.quiet) Note(submitted.value().message());
  const InterruptWatcher watcher([&client, uid] {
    Note("interrupted: cancelling the job; once more to leave at once");
    v1::CancelJobRequest cancel;
    cancel.set_request_id(NewRequestId());
    cancel.set_job(uid);
    const auto cancelled = client.Call(cancel);
    if (!cancelled.ok()) Fail(cancelled.status());
  });
  const auto outcome = Follow(client, uid, options);
  if (!outcome.ok()) {
    Fail(outcome.status());
    return kInfrastructure;
  }
  ShowOutcome(client, uid, spec.name(), outcome.value());
  return outcome.value().exit_code();
}

int Run(const CommandLine& line, const JobFlags& flags, const FollowOptions& options,
        const CLI::App* command) {
  BlockInterrupts();  // before gRPC starts its threads
  const auto spec = MakeJobSpec(flags, command, line.program);
  if (!spec.ok()) return FailRun(spec.status());
  const auto client = line.Connect();
  if (client.ok()) return RunOn(client.value(), spec.value(), options);
  if (client.status().code() != StatusCode::kNotFound) return FailRun(client.status());

  // Nobody configured a controller: one of our own, for as long as the job runs.
  std::error_code error;
  const std::string base = std::filesystem::temp_directory_path(error).string();
  std::string pattern = (error ? std::string("/tmp") : base) + "/everstep-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr)
    return FailRun(FailedPrecondition("cannot create a directory in " + base + "; set TMPDIR"));
  LocalOptions local;
  local.directory = pattern;
  local.servers = spec.value().servers_wanted() + std::max(flags.spares, 0);
  local.devices_per_server = std::max(1, spec.value().ranks_per_server());
  Note(
      fmt::format("no controller is configured: starting a temporary local cluster of {} servers "
                  "({} spare) in {}",
                  local.servers, std::max(flags.spares, 0), pattern));
  auto cluster = LocalCluster::Up(local);
  if (!cluster.ok()) {
    const int code = FailRun(cluster.status());
    std::filesystem::remove_all(pattern, error);
    return code;
  }
  const AdminClient own({cluster.value().state().address, "temporary local cluster"}, Seconds(10));
  const int code = RunOn(own, spec.value(), options);
  const Status down = cluster.value().Down(false);
  if (!down.ok()) Fail(down);
  std::filesystem::remove_all(pattern, error);
  return code;
}

int Submit(const CommandLine& line, const JobFlags& flags, bool dry_run, const CLI::App* command) {
  const auto spec = MakeJobSpec(flags, command, line.program);
  if (!spec.ok()) return Fail(spec.status());
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::SubmitJobRequest request;
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  request.set_dry_run(dry_run);
  *request.mutable_spec() = spec.value();
  const auto response = client.value().Call(request);
  if (!response.ok()) return Fail(response.status());
  if (line.globals.output == "json") {
    Print(Json(response.value()));
  } else {
    Print(response.value().message() + (dry_run ? " (dry run)\n" : "\n"));
  }
  return kExitDone;
}

struct WaitFlags {
  std::string job;
  std::string condition = "Ended";
  std::string for_at_most = "1h";
};

// True when the job is as asked: "Running", "Ended", a condition's type, or "step=N".
Result<bool> Met(const v1::Job& job, const std::string& condition) {
  const v1::JobStatus& status = job.status();
  if (condition == "Ended") return status.has_outcome();
  if (condition.rfind("step=", 0) == 0) {
    const std::string number = condition.substr(5);
    if (number.empty() || number.size() > 18 ||
        number.find_first_not_of("0123456789") != std::string::npos) {
      return InvalidArgument(fmt::format("--for '{}': the step is not a number", condition));
    }
    return status.step() >= std::stoll(number);
  }
  for (int state = v1::JobState_MIN + 1; state <= v1::JobState_MAX; ++state) {
    if (StateName(static_cast<v1::JobState>(state)) == condition) return status.state() == state;
  }
  for (const v1::Condition& known : status.conditions()) {
    if (known.type() == condition) return known.status() == v1::CONDITION_STATUS_TRUE;
  }
  return InvalidArgument(
      fmt::format("--for '{}' is none of Pending, Starting, Running, Recovering, "
                  "WaitingForCapacity, Succeeded, Failed, Cancelled, "
                  "Ended, step=N or a condition of the job",
                  condition));
}

int Wait(const CommandLine& line, const WaitFlags& flags) {
  const auto limit = ParseDuration(flags.for_at_most, "--for-at-most");
  if (!limit.ok()) return Fail(limit.status());
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  const auto deadline = SteadyClock::now() + limit.value();
  v1::GetJobRequest request;
  request.set_job(flags.job);
  std::string last = "the controller did not answer";
  while (true) {
    const auto response = client.value().Call(request);
    if (response.ok()) {
      const v1::Job& job = response.value().job();
      const auto met = Met(job, flags.condition);
      if (!met.ok()) return Fail(met.status());
      const bool ended = job.status().has_outcome();
      const bool outcome_asked = flags.condition == "Ended" || flags.condition == "Succeeded";
      if (met.value() || (ended && outcome_asked)) {
        Print(fmt::format("job/{} {}\n", job.name(), StateName(job.status().state())));
        if (ended && outcome_asked && job.status().outcome().exit_code() != 0) {
          Note(fmt::format("{} ({})", job.status().outcome().message(),
                           job.status().outcome().reason()));
        }
        return ended && outcome_asked ? job.status().outcome().exit_code() : kExitDone;
      }
      last =
          fmt::format("it is {} at step {}", StateName(job.status().state()), job.status().step());
      if (ended) {
        Note(fmt::format("job/{} will not become {}: {}", job.name(), flags.condition, last));
        return kExitUnmet;
      }
    } else if (response.status().code() != StatusCode::kUnavailable &&
               response.status().code() != StatusCode::kDeadlineExceeded) {
      return Fail(response.status());
    } else {
      last = response.status().message();
    }
    if (SteadyClock::now() >= deadline) {
      Note(fmt::format("job/{} is not {} after {}: {}", flags.job, flags.condition,
                       flags.for_at_most, last));
      return kExitUnmet;
    }
    if (client.value().WaitForConnection(Milliseconds(500))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

int Cancel(const CommandLine& line, const std::string& job, bool dry_run) {
  const auto client = line.Connect();
  if (!client.ok()) return Fail(client.status());
  v1::CancelJobRequest request;
  request.set_request_id(NewRequestId());
  request.set_job(job);
  request.set_dry_run(dry_run);
  const auto response = client.value().Call(request);
  if (!response.ok()) return Fail(response.status());
  Print(response.value().message() + (dry_run ? " (dry run)\n" : "\n"));
  return kExitDone;
}

}  // namespace

void AddJobCommands(CommandLine& line) {
  auto flags = std::make_shared<JobFlags>();
  auto options = std::make_shared<FollowOptions>();
  auto command = std::make_shared<CLI::App*>(nullptr);
  CLI::App* run =
      line.Add(&line.app, "run", "Run a program, or a job file, and follow it to its end",
               "  everstep run -- everstep-train --steps 50\n"
               "  everstep run --name train --servers 4 --spares 1 -- everstep-train --steps 200\n"
               "  everstep run -f job.yaml\n"
               "  everstep run --opaque --servers 1 -- /usr/bin/sleep 30",
               [&line, flags, options, command] { return Run(line, *flags, *options, *command); });
  *command = run;
  AddJobFlags(run, *flags, /*with_spares=*/true);
  run->add_flag("--all-ranks", options->all_ranks, "Show every rank's output, not only rank 0's");
  run->add_flag("-q,--quiet", options->quiet, "Show the program's output only");
  line.AddControllerFlags(run);

  auto submit_flags = std::make_shared<JobFlags>();
  auto dry_run = std::make_shared<bool>(false);
  auto submit_command = std::make_shared<CLI::App*>(nullptr);
  CLI::App* submit = line.Add(&line.app, "submit", "Hand a job to the controller and return",
                              "  everstep submit -f job.yaml\n  everstep submit --name train "
                              "--servers 4 -- everstep-train --steps 200",
                              [&line, submit_flags, dry_run, submit_command] {
                                return Submit(line, *submit_flags, *dry_run, *submit_command);
                              });
  *submit_command = submit;
  AddJobFlags(submit, *submit_flags, /*with_spares=*/false);
  submit
      ->add_option("--request-id", submit_flags->request_id,
                   "Repeating it returns the job it made (default: a new one)")
      ->type_name("ID");
  submit->add_flag("--dry-run", *dry_run, "Only check the job");
  line.AddOutputFlag(submit, "json");
  line.AddControllerFlags(submit);

  CLI::App* wait = line.AddGroup(&line.app, "wait", "Wait until something is so");
  auto wait_flags = std::make_shared<WaitFlags>();
  CLI::App* wait_job = line.Add(
      wait, "job", "Wait for a state of a job; for its end, exits with the job's code",
      "  everstep wait job train\n  everstep wait job train --for Running --for-at-most 30s\n"
      "  everstep wait job train --for step=100",
      [&line, wait_flags] { return Wait(line, *wait_flags); });
  wait_job->add_option("name", wait_flags->job, "The job")->required()->type_name("NAME");
  wait_job
      ->add_option("--for", wait_flags->condition,
                   "A state (Running, Succeeded, …), Ended (default), a condition, or step=N")
      ->type_name("STATE");
  wait_job
      ->add_option("--for-at-most", wait_flags->for_at_most,
                   "Give up after this long, exit code 3 (default 1h)")
      ->type_name("DURATION");
  line.AddControllerFlags(wait_job);

  CLI::App* cancel = line.AddGroup(&line.app, "cancel", "Stop something for good");
  auto name = std::make_shared<std::string>();
  auto cancel_dry = std::make_shared<bool>(false);
  CLI::App* cancel_job =
      line.Add(cancel, "job", "End a job: its processes get SIGTERM, then SIGKILL",
               "  everstep cancel job train",
               [&line, name, cancel_dry] { return Cancel(line, *name, *cancel_dry); });
  cancel_job->add_option("name", *name, "The job")->required()->type_name("NAME");
  cancel_job->add_flag("--dry-run", *cancel_dry, "Only say what would happen");
  line.AddControllerFlags(cancel_job);
}

}  // namespace everstep::cli
