// Worlds for the collective tests: N ranks as threads of one process, each with its own listener
// and sockets.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "worker/collective/host/host_communicator.h"

namespace everstep::collective {

inline MeshToken TestToken(uint8_t fill = 7) {
  MeshToken token;
  token.fill(std::byte{fill});
  return token;
}

inline std::shared_ptr<MeshListener> NewListener() {
  Result<std::shared_ptr<MeshListener>> listener = MeshListener::Create({});
  EXPECT_TRUE(listener.ok()) << listener.status().ToString();
  return *listener;
}

// Runs one function per rank, each on a thread of its own, and joins them.
inline void OnRanks(int32_t size, const std::function<void(int32_t rank)>& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Listeners and options for one host world.
class HostWorld {
 public:
  explicit HostWorld(int32_t size) {
    for (int32_t rank = 0; rank < size; ++rank) {
      listeners_.push_back(NewListener());
      addresses_.push_back(listeners_.back()->address());
    }
  }
  int32_t size() const { return static_cast<int32_t>(listeners_.size()); }
  MeshListener& listener(int32_t rank) { return *listeners_[static_cast<size_t>(rank)]; }

  MeshOptions Options(int32_t rank, uint64_t generation = 1) const {
    MeshOptions options;
    options.job_uid = JobUid("job-1");
    options.generation = Generation(generation);
    options.token = TestToken();
    options.rank = Rank(rank);
    options.addresses = addresses_;
    options.listener = listeners_[static_cast<size_t>(rank)];
    options.operation_timeout = Seconds(60);
    return options;
  }

  std::vector<std::unique_ptr<Communicator>> Connect(
      const std::function<void(MeshOptions&)>& adjust = nullptr) {
    std::vector<std::unique_ptr<Communicator>> ranks(listeners_.size());
    OnRanks(size(), [&](int32_t rank) {
      MeshOptions options = Options(rank);
      if (adjust) adjust(options);
      Result<std::unique_ptr<Communicator>> made = ConnectMesh(options);
      ASSERT_TRUE(made.ok()) << made.status().ToString();
      ranks[static_cast<size_t>(rank)] = std::move(*made);
    });
    return ranks;
  }

 private:
  std::vector<std::shared_ptr<MeshListener>> listeners_;
  std::vector<std::string> addresses_;
};

}  // namespace everstep::collective
