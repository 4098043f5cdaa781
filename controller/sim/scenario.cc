#include "controller/sim/scenario.h"

#include <charconv>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <vector>

#include <fmt/format.h>

#include "controller/sim/world.h"
#include "proto/model/names.h"

namespace everstep::sim {
namespace {

class Runner {
 public:
  Status Run(std::string_view text) {
    std::istringstream lines{std::string(text)};
    std::string line;
    for (int number = 1; std::getline(lines, line); ++number) {
      std::istringstream words(line.substr(0, line.find('#')));
      words_.clear();
      for (std::string word; words >> word;) words_.push_back(word);
      if (words_.empty()) continue;
      problem_.clear();
      Do();
      if (!problem_.empty()) return InvalidArgument(fmt::format("line {}: {}: {}", number, words_[0], problem_));
    }
    if (world_ == nullptr) return InvalidArgument("line 1: a scenario begins with `servers N`");
    return OkStatus();
  }
  World* world() { return world_.get(); }

 private:
  // ---- words
  std::string Word(size_t i) {
    if (i < words_.size()) return words_[i];
    if (problem_.empty()) problem_ = fmt::format("word {} is missing", i);
    return "";
  }
  bool Has(const std::string& word) const { return std::find(words_.begin(), words_.end(), word) != words_.end(); }
  int64_t Number(const std::string& text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if ((error != std::errc() || end != text.data() + text.size()) && problem_.empty()) {
      problem_ = fmt::format("\"{}\" is not a whole number", text);
    }
    return value;
  }
  int64_t Option(const std::string& name, int64_t otherwise) {
    for (const std::string& word : words_) {
      if (word.starts_with(name + "=")) return Number(word.substr(name.size() + 1));
    }
    return otherwise;
  }
  Duration Time(const std::string& text) {
    if (text.ends_with("ms")) return Milliseconds(Number(text.substr(0, text.size() - 2)));
    if (text.ends_with("s")) return Seconds(Number(text.substr(0, text.size() - 1)));
    problem_ = fmt::format("\"{}\" is not a duration such as 500ms or 5s", text);
    return Duration(0);
  }
  std::string Server(size_t i) {
    const std::string name = Word(i);
    if (problem_.empty() && !world_->agents().contains(ServerId(name))) {
      problem_ = fmt::format("there is no server \"{}\"", name);
    }
    return name;
  }
  JobUid Job(size_t i) {
    auto it = jobs_.find(Word(i));
    if (it != jobs_.end()) return it->second;
    if (problem_.empty()) problem_ = fmt::format("there is no job \"{}\"", Word(i));
    return JobUid();
  }
  RankNode* RankOf(size_t i) {
    RankNode* rank = world_->Member(Job(i), static_cast<int32_t>(Number(Word(i + 1))));
    if (rank == nullptr && problem_.empty()) problem_ = "no such rank runs";
    return rank;
  }

  // ---- commands
  void Do() {
    const std::string verb = words_[0];
    if (verb == "options") return Options();
    if (verb == "servers") return Servers();
    if (world_ == nullptr) {
      problem_ = "comes before `servers N`";
      return;
    }
    static const std::map<std::string, void (Runner::*)()> kVerbs = {
        {"job", &Runner::SubmitIt}, {"until", &Runner::Until}, {"for", &Runner::For},       {"kill", &Runner::KillIt},
        {"start", &Runner::Start},  {"stop", &Runner::Stop},   {"wake", &Runner::Wake},     {"cut", &Runner::CutIt},
        {"strike", &Runner::Strike}, {"drain", &Runner::Other}, {"undrain", &Runner::Other}, {"cancel", &Runner::Other},
        {"link", &Runner::Other},   {"reset", &Runner::Other}, {"break", &Runner::Other},   {"disk", &Runner::Other},
        {"corrupt", &Runner::Other}, {"backup", &Runner::Other}, {"restore", &Runner::Other}, {"fail", &Runner::Other},
        {"crash", &Runner::Other},  {"unkillable", &Runner::Other}, {"killable", &Runner::Other}, {"slow", &Runner::Other}};
    auto it = kVerbs.find(verb);
    if (it == kVerbs.end()) {
      problem_ = "is no command";
      return;
    }
    (this->*it->second)();
  }

  void Options() {
    WorldOptions& o = options_;
    o.snapshot_every = Option("snapshot_every", o.snapshot_every);
    o.policy.lease = Milliseconds(Option("lease_ms", o.policy.lease.count() / 1000000));
    o.policy.recovery_budget = Milliseconds(Option("budget_ms", o.policy.recovery_budget.count() / 1000000));
    o.policy.process_start_timeout = Milliseconds(Option("start_timeout_ms", o.policy.process_start_timeout.count() / 1000000));
    o.policy.mass_silence_hold = Milliseconds(Option("hold_ms", o.policy.mass_silence_hold.count() / 1000000));
    for (const std::string& problem : ValidatePolicy(o.policy)) problem_ = problem;
  }

  void Servers() {
    const int64_t count = Number(Word(1));
    if (!problem_.empty() || world_ != nullptr) return;
    if (count < 1 || count > 64) {
      problem_ = "1 to 64 servers";
      return;
    }
    world_ = std::make_unique<World>(options_);
    world_->KeepTrace(true);
    world_->on_moment = [this](const std::string& what, const RankNode& rank) { OnMoment(what, rank); };
    const int64_t racks = Option("racks", 0);
    for (int64_t i = 1; i <= count; ++i) {
      world_->AddServer(fmt::format("s{}", i), static_cast<int>(Option("devices", 1)),
                        racks > 0 ? fmt::format("rack{}", i % racks) : "");
    }
    world_->RunFor(Milliseconds(20));
  }

  void SubmitIt() {
    JobSpec spec;
    spec.name = Word(1);
    spec.program = "/bin/train";
    spec.servers_wanted = static_cast<int>(Option("servers", 2));
    spec.servers_min = static_cast<int>(Option("min", spec.servers_wanted));
    spec.ranks_per_server = static_cast<int>(Option("ranks", 1));
    spec.pipeline_stages = static_cast<int>(Option("stages", 1));
    spec.micro_batch_count = static_cast<int>(Option("batches", 12));
    spec.standbys_wanted = static_cast<int>(Option("standbys", 0));
    spec.priority = static_cast<int>(Option("priority", 0));
    spec.persist_interval_steps = Option("persist", 0);
    spec.restarts_max = static_cast<int>(Option("restarts", 100));
    spec.opaque = Has("opaque");
    const int64_t steps = Option("steps", 1000000);
    if (!problem_.empty()) return;
    if (const std::optional<JobUid> uid = world_->TrySubmit(spec, steps)) {
      jobs_[spec.name] = *uid;
    } else {
      problem_ = "the job was refused";
    }
  }

  void Until() {
    const std::string what = Word(1);
    const JobUid job = Job(2);
    if (!problem_.empty()) return;
    std::function<bool()> done;
    if (what == "ended") {
      done = [&] { return world_->EndOf(job).has_value(); };
    } else if (what == "step") {
      const int64_t step = Number(Word(3));
      done = [this, job, step] {
        RankNode* rank = world_->Member(job, 0);
        return rank != nullptr && static_cast<int64_t>(rank->memory.size()) >= step && !rank->core->left();
      };
    } else if (what == "generation") {
      const auto generation = static_cast<uint64_t>(Number(Word(3)));
      done = [this, job, generation] {
        const auto view = world_->ViewOf(job);
        return view && view->entry.resumed.value >= generation;
      };
    } else if (what == "state") {
      const std::string state = Word(3);
      done = [this, job, state] {
        const auto view = world_->ViewOf(job);
        return view && JobStateName(view->state) == state;
      };
    } else if (what == "phase") {
      const std::string phase = Word(3);
      done = [this, job, phase] {
        const auto view = world_->ViewOf(job);
        return view && RecoveryPhaseName(view->phase) == phase;
      };
    } else if (what == "ranks") {
      const int64_t ranks = Number(Word(3));
      done = [this, job, ranks] {
        const auto view = world_->ViewOf(job);
        return view && view->world_size == ranks && view->state == JobState::kRunning;
      };
    } else {
      problem_ = "ended, step, generation, state, phase or ranks";
    }
    if (problem_.empty() && !world_->RunUntil(done, Seconds(300))) problem_ = "not reached within 300 s";
  }

  void For() {
    const Duration time = Time(Word(1));
    if (problem_.empty()) world_->RunFor(time);
  }

  void KillIt() {
    if (Word(1) == "controller") return world_->KillController();
    if (Word(1) == "rank") {
      if (RankNode* rank = RankOf(2)) world_->KillProcess(rank->id);
      return;
    }
    for (size_t i = 1; i < words_.size(); ++i) {
      const std::string name = Server(i);
      if (problem_.empty()) world_->KillServer(name);
    }
  }
  void Start() {
    if (Word(1) == "controller") return world_->StartController();
    for (size_t i = 1; i < words_.size(); ++i) {
      const std::string name = Server(i);
      if (problem_.empty()) world_->StartServer(name);
    }
  }
  void Stop() {
    if (Word(1) == "controller") return world_->StopController();
    if (Word(1) == "rank") {
      if (RankNode* rank = RankOf(2)) stopped_ = rank->id;
      return world_->StopRank(stopped_);
    }
    if (const std::string name = Server(1); problem_.empty()) world_->StopServer(name);
  }
  void Wake() {
    if (Word(1) == "controller") return world_->WakeController();
    if (Word(1) == "rank") return world_->WakeRank(stopped_);
    if (const std::string name = Server(1); problem_.empty()) world_->WakeServer(name);
  }

  void CutIt() {
    ServerLinks links;
    links.up_cut = Has("up") || Has("stream") || Has("all");
    links.down_cut = Has("down") || Has("stream") || Has("all");
    links.datagrams_cut = Has("datagrams") || Has("all");
    links.peers_cut = Has("peers");
    for (size_t i = 1; i < words_.size() && words_[i].starts_with("s") && words_[i] != "stream"; ++i) {
      const std::string name = Server(i);
      if (problem_.empty()) world_->Link(name, links);
    }
  }

  // strike JOB RANK at MOMENT [step N] [kill|stop]
  void Strike() {
    strike_job_ = Job(1);
    strike_rank_ = static_cast<int32_t>(Number(Word(2)));
    if (Word(3) != "at") problem_ = "JOB RANK at MOMENT";
    strike_moment_ = Word(4);
    strike_step_ = Option("step", 0);
    strike_stops_ = Has("stop");
  }
  void OnMoment(const std::string& what, const RankNode& rank) {
    if (strike_moment_ != what || rank.job != strike_job_ || rank.rank != strike_rank_) return;
    if (strike_step_ > 0 && rank.call_step < strike_step_) return;
    strike_moment_.clear();
    if (strike_stops_) {
      stopped_ = rank.id;
      world_->StopRank(rank.id);
    } else {
      world_->KillProcess(rank.id);
    }
  }

  void Other() {
    const std::string verb = words_[0];
    if (verb == "cancel") {
      if (const JobUid job = Job(1); problem_.empty()) world_->Cancel(job);
    } else if (verb == "backup") {
      world_->BackUpLedger();
    } else if (verb == "restore") {
      if (world_->controller_up()) problem_ = "kill the controller first";
      else world_->RestoreLedger();
    } else if (verb == "fail") {  // fail JOB STEP CODE
      const JobUid job = Job(1);
      world_->program_fails[job] = {Number(Word(2)), static_cast<int>(Number(Word(3)))};
    } else if (verb == "unkillable" || verb == "killable") {
      if (verb == "unkillable") {
        if (RankNode* rank = RankOf(1)) stopped_ = rank->id;
      }
      if (problem_.empty()) world_->MakeUnkillable(stopped_, verb == "unkillable");
    } else {
      const std::string name = Server(1);
      if (!problem_.empty()) return;
      if (verb == "drain" || verb == "undrain") world_->Drain(name, verb == "drain");
      if (verb == "link") world_->Link(name, {});
      if (verb == "reset") world_->ResetStream(name);
      if (verb == "break") world_->BreakDevice(name, DeviceIndex(static_cast<int32_t>(Option("device", 0))), true);
      if (verb == "disk") world_->DiskOf(name, Has("full"), Has("failing"), Duration(0));
      if (verb == "corrupt") world_->CorruptStore(name);
      if (verb == "crash") world_->CrashAgentIn(name, Option("effects", 1));
      if (verb == "slow") world_->SlowServer(name, Option("factor", 10));
    }
  }

  WorldOptions options_ = [] {
    WorldOptions o;
    o.fixed_times = true;
    o.compute_min = o.compute_max = Milliseconds(10);
    o.start_min = o.start_max = Milliseconds(50);
    o.sync_min = o.sync_max = Milliseconds(1);
    o.link_min = o.link_max = Microseconds(100);
    return o;
  }();
  std::unique_ptr<World> world_;
  std::map<std::string, JobUid> jobs_;
  std::vector<std::string> words_;
  std::string problem_;
  ProcessId stopped_;
  JobUid strike_job_;
  int32_t strike_rank_ = 0;
  std::string strike_moment_;
  int64_t strike_step_ = 0;
  bool strike_stops_ = false;
};

}  // namespace

Result<std::string> RunScenario(std::string_view text) {
  Runner runner;
  if (Status status = runner.Run(text); !status.ok()) return status;
  std::string trace;
  for (const std::string& line : runner.world()->trace()) trace += line + "\n";
  if (!runner.world()->violations().empty()) {
    const Violation& v = runner.world()->violations()[0];
    return Internal(fmt::format("{}: {}\n{}", v.checker, v.what, trace));
  }
  return trace;
}

}  // namespace everstep::sim
