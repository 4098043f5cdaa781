// One property of the protocol (docs/protocol.md section 9), watched over a whole run. A checker sees what was decided,
// said, delivered and done, and the truth beside the cores; it never asks a core for its opinion. One file each, in
// checkers/. Called by World, synchronously, at the moment the thing happens.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/core/effect.h"
#include "controller/core/event.h"
#include "controller/sim/nodes.h"

namespace everstep::sim {

class World;

class Checker {
 public:
  Checker(World& world, const char* name) : world_(world), name_(name) {}
  virtual ~Checker() = default;
  const char* name() const { return name_; }

  // ---- controller
  virtual void OnControllerStarted() {}                     // its ledger: world.decided()
  virtual void OnEvent(const Event& /*event*/) {}           // about to be decided on
  // A record was decided on; `before` lacks it. It may never become durable.
  virtual void OnDecided(const Record& /*record*/, const LedgerState& /*before*/) {}
  virtual void OnDurable(const Record& /*record*/) {}
  virtual void OnControllerStepped(const Event& /*event*/, const Effects& /*effects*/) {}
  virtual void OnCommandLeft(const ServerId& /*to*/, const SendCommand& /*sent*/) {}
  virtual void OnReplayed() {}                              // time to compare replay and live

  // ---- agents
  virtual void OnCommandObeyed(const AgentNode& /*agent*/, const CommandHeader& /*header*/, const Command& /*command*/,
                               const AgentEffects& /*effects*/) {}
  virtual void OnProcessStarting(const AgentNode& /*agent*/, const SpawnProcess& /*spawn*/) {}
  virtual void OnCopyGone(const AgentNode& /*agent*/, const JobUid& /*job*/, const SnapshotInfo& /*copy*/,
                          bool /*by_fault*/) {}
  virtual void OnChunkGone(const AgentNode& /*agent*/, const checkpoint::ChunkName& /*name*/) {}
  virtual void OnChunkMissing(const AgentNode& /*agent*/, const checkpoint::ChunkName& /*name*/) {}

  // ---- ranks
  virtual void OnRankStepped(const RankNode& /*rank*/, const session::Event& /*event*/,
                             const std::vector<session::Effect>& /*effects*/) {}
  virtual void OnCollectAnswered(const RankNode& /*rank*/, const CollectAnswer& /*answer*/) {}
  virtual void OnBallot(const RankNode& /*rank*/, const Mesh& /*mesh*/) {}
  virtual void OnVotePassed(const Mesh& /*mesh*/) {}        // step mesh.passed
  virtual void OnApplying(const RankNode& /*rank*/) {}
  virtual void OnMeshJoined(const RankNode& /*rank*/, const Mesh& /*mesh*/) {}
  virtual void OnServed(const RankNode& /*source*/, const Content& /*pinned*/) {}
  virtual void OnResumed(const RankNode& /*rank*/) {}
  virtual void OnFinished(const RankNode& /*rank*/) {}

  // ---- the run
  virtual void OnFault(const std::string& /*what*/) {}
  virtual void OnHealed() {}
  virtual void OnEnd() {}                                   // all jobs are ended, everything had time to settle

 protected:
  void Violate(const std::string& what) const;
  World& world() const { return world_; }

 private:
  World& world_;
  const char* name_;
};

using MakeChecker = std::unique_ptr<Checker> (*)(World&);
// All of checkers/, in the order of docs/simulation.md.
std::vector<std::unique_ptr<Checker>> MakeCheckers(World& world);

}  // namespace everstep::sim
