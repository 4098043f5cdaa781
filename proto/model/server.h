// What a server is and has, as its agent reports it. Plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/ids.h"

namespace everstep {

enum class DeviceKind : uint8_t { kCpuSlot, kGpu };

struct Device {
  DeviceIndex index;
  DeviceKind kind = DeviceKind::kCpuSlot;
  std::string model;           // "cpu", "NVIDIA H200"
  uint64_t memory_bytes = 0;
  double speed = 1.0;          // relative; the planner's input
  std::string uuid{};          // of a GPU, as its driver tells it; empty: it has none
  bool operator==(const Device&) const = default;
};

struct ServerInventory {
  ServerId server;
  std::string failure_domain;  // rack, power feed …; servers of one domain may fail together
  std::string host;            // address on which ranks and transfers of this server are reached
  std::string probe_address;   // host:port of the agent's own listener; a refusal proves the agent dead
  std::string transfer_address;  // host:port where the agent serves snapshots to peers; empty: it does not
  std::string root_directory;
  std::string version;
  uint32_t cpu_count = 0;
  uint64_t memory_bytes = 0;
  std::vector<Device> devices;
  bool operator==(const ServerInventory&) const = default;
};

enum class ServerState : uint8_t {
  kJoining, kChecking, kSpare, kActive, kSuspect, kDead, kDraining, kQuarantined,
};

}  // namespace everstep
