// One maker for each checker. Used by all.cc and, in its own file, by each checker.
#pragma once

#include <memory>

#include "controller/sim/checker.h"

namespace everstep::sim {

std::unique_ptr<Checker> MakeVoteAfterCollect(World& world);
std::unique_ptr<Checker> MakeVoteGradients(World& world);
std::unique_ptr<Checker> MakeOneState(World& world);
std::unique_ptr<Checker> MakeRecoveryPointOracle(World& world);
std::unique_ptr<Checker> MakeOnePlan(World& world);
std::unique_ptr<Checker> MakeStaleEffects(World& world);
std::unique_ptr<Checker> MakeServedBytes(World& world);
std::unique_ptr<Checker> MakeDeletedChunks(World& world);
std::unique_ptr<Checker> MakeProtectedCopies(World& world);
std::unique_ptr<Checker> MakeDiscard(World& world);
std::unique_ptr<Checker> MakeVotingServer(World& world);
std::unique_ptr<Checker> MakeMassSilence(World& world);
std::unique_ptr<Checker> MakeDeviceReuse(World& world);
std::unique_ptr<Checker> MakeLog(World& world);
std::unique_ptr<Checker> MakeOneProcess(World& world);
std::unique_ptr<Checker> MakeDevicesOnce(World& world);
std::unique_ptr<Checker> MakeGenerationsRise(World& world);
std::unique_ptr<Checker> MakeUsableServers(World& world);
std::unique_ptr<Checker> MakeResponsiveServers(World& world);
std::unique_ptr<Checker> MakeBoundedRecoveries(World& world);
std::unique_ptr<Checker> MakeLeaks(World& world);
std::unique_ptr<Checker> MakeReplay(World& world);
std::unique_ptr<Checker> MakeSamples(World& world);
std::unique_ptr<Checker> MakePersistThenTell(World& world);
std::unique_ptr<Checker> MakeHonestReports(World& world);
std::unique_ptr<Checker> MakeEnds(World& world);

}  // namespace everstep::sim
