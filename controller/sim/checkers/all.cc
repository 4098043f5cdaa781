#include "controller/sim/checkers/all.h"

namespace everstep::sim {

std::vector<std::unique_ptr<Checker>> MakeCheckers(World& world) {
  std::vector<std::unique_ptr<Checker>> checkers;
  for (MakeChecker make : {
           &MakeVoteAfterCollect,
           &MakeVoteGradients,
           &MakeOneState,
           &MakeRecoveryPointOracle,
           &MakeOnePlan,
           &MakeStaleEffects,
           &MakeServedBytes,
           &MakeDeletedChunks,
           &MakeProtectedCopies,
           &MakeDiscard,
           &MakeVotingServer,
           &MakeMassSilence,
           &MakeDeviceReuse,
           &MakeLog,
           &MakeOneProcess,
           &MakeDevicesOnce,
           &MakeGenerationsRise,
           &MakeUsableServers,
           &MakeResponsiveServers,
           &MakeBoundedRecoveries,
           &MakeLeaks,
           &MakeReplay,
           &MakeSamples,
           &MakePersistThenTell,
           &MakeHonestReports,
           &MakeEnds}) {
    checkers.push_back(make(world));
  }
  return checkers;
}

}  // namespace everstep::sim
