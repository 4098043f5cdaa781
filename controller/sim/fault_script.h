// Draws faults from the seed and undoes them later: every kind that a run may meet, in any order and overlap. Drives a
// World from outside its event heap. Single-threaded.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "controller/sim/world.h"

namespace everstep::sim {

struct ScriptedJob {
  JobUid uid;
  JobSpec spec;
  int64_t steps = 0;
};

class FaultScript {
 public:
  FaultScript(World& world, const RunOptions& options, std::vector<ScriptedJob>& jobs);

  // Runs the world for options.lasting, with faults throughout.
  void Run();

  static constexpr int kKinds = 29;

 private:
  void Strike(int kind);
  void StrikeServer(int kind);
  void StrikeController(int kind);
  void StrikeMany(int kind);
  void StrikeJob(int kind);
  void Later(Duration after, std::function<void()> run);
  void RunTo(Instant at);
  std::string AnyServer();
  std::vector<std::string> SomeServers(size_t count);
  RankNode* AnyRank();
  Duration Between(Duration low, Duration high);
  // How long a fault lasts: short beside the lease, about as long, or much longer.
  Duration Lasting();
  bool MayKill() const;
  // With the host (`power`) or the agent alone: in the one case nobody is left who could refuse a connection.
  void Lose(const std::string& server, bool power);
  void Return(const std::string& server);

  World& world_;
  const RunOptions& options_;
  std::vector<ScriptedJob>& jobs_;
  Prng& prng_;
  std::vector<std::string> names_;
  struct Due { Instant at; uint64_t order; std::function<void()> run; };
  std::vector<Due> due_;
  uint64_t order_ = 0;
  std::string moment_;         // the next ranks that come to it are struck
  int moment_strikes_ = 1;
  bool moment_stops_ = false;
};

}  // namespace everstep::sim
