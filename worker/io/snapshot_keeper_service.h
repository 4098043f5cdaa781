// The agent's SnapshotService over checkpoint's keeper and its RocksDB store. Made by main.cc through
// AgentShellOptions::make_snapshots; its methods are called on the agent's loop, its handler on the keeper's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "proto/base/ids.h"
#include "proto/base/status.h"
#include "worker/io/snapshot_service.h"

namespace everstep {

struct SnapshotKeeperServiceOptions {
  ServerId server;
  std::string host;                    // where peers reach this server
  std::string store_directory;         // under the agent's root; made when it does not exist
  uint64_t peer_bytes_max = uint64_t{8} << 30;  // memory for copies of peers' snapshots
};

// Statuses of RocksDbStore::Open and SnapshotKeeper::Start, one line each, naming the path or the address.
Result<std::unique_ptr<SnapshotService>> MakeSnapshotKeeperService(const SnapshotKeeperServiceOptions& options,
                                                                   SnapshotService::Handler handler);

}  // namespace everstep
