// 11. No server is declared dead by silence while a vote with its rank passed within the lease, as heard of.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "controller/sim/checkers/all.h"
#include "controller/sim/describe.h"
#include "controller/sim/world.h"

namespace everstep::sim {
namespace {

class VotingServer : public Checker {
 public:
  explicit VotingServer(World& world) : Checker(world, "voting_server") {}
  void OnControllerStarted() override {
    heard_.clear();
    sequences_.clear();
  }
  void OnEvent(const Event& event) override {
    if (const auto* connected = std::get_if<AgentConnected>(&event)) {
      for (const ProcessStatus& status : connected->hello.processes) {  // votes of an unknown age
        Heard& heard = heard_[status.job];
        if (heard.generation != status.progress.generation) continue;
        heard.newest[status.process] = std::max(heard.newest[status.process], status.progress.vote_passed);
      }
    }
    const auto* received = std::get_if<HeartbeatReceived>(&event);
    if (received == nullptr || received->heartbeat.votes.empty()) return;
    const Heartbeat& beat = received->heartbeat;
    const LedgerState& ledger = world().decided();
    auto server = ledger.servers.find(beat.server);
    if (server == ledger.servers.end() || server->second.newest != beat.incarnation ||
        server->second.newest <= server->second.dead_upto) {
      return;
    }
    uint64_t& sequence = sequences_[{beat.server, beat.incarnation}];
    if (beat.sequence <= sequence) return;
    sequence = beat.sequence;
    for (const Heartbeat::Vote& vote : beat.votes) {
      for (const auto& [uid, job] : ledger.jobs) {
        if (job.ended || !job.assignment || job.resumed != vote.generation || job.fenced != job.resumed) continue;
        for (const RankAssignment& r : job.assignment->ranks) {
          if (r.process != vote.process || r.server != beat.server) continue;
          Heard& heard = heard_[uid];
          if (heard.generation != vote.generation) heard = {vote.generation, heard.at, {}};
          Step& newest = heard.newest[vote.process];
          if (vote.step <= newest || vote.step <= job.recovery_point.step) continue;
          newest = vote.step;
          heard.at = world().now();
        }
      }
    }
  }
  void OnDecided(const Record& record, const LedgerState& before) override {
    const auto* died = std::get_if<ServerDied>(&record);
    if (died == nullptr || died->reason != Reason::kServerSilent) return;
    for (const auto& [uid, job] : before.jobs) {
      if (job.ended || !job.assignment || job.resumed != job.fenced || job.assignment->generation != job.resumed) continue;
      auto heard = heard_.find(uid);
      if (heard == heard_.end() || heard->second.generation != job.resumed) continue;
      const bool member = std::any_of(job.assignment->ranks.begin(), job.assignment->ranks.end(),
                                      [&](const RankAssignment& r) { return r.server == died->server; });
      if (member && world().now() - heard->second.at < world().options().policy.lease * 95 / 100) {
        Violate(fmt::format("{} is declared silent {:.0f} ms after a vote with its rank was heard of", died->server.value,
                            ToMilliseconds(world().now() - heard->second.at)));
      }
    }
  }

 private:
  struct Heard { Generation generation; Instant at{}; std::map<ProcessId, Step> newest; };
  std::map<JobUid, Heard> heard_;
  std::map<std::pair<ServerId, Incarnation>, uint64_t> sequences_;
};

}  // namespace

std::unique_ptr<Checker> MakeVotingServer(World& world) { return std::make_unique<VotingServer>(world); }

}  // namespace everstep::sim
