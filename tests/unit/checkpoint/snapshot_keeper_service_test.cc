// The agent's side of the keeper: what the agent's loop calls, and the facts that come back, over a real store.
#include "worker/io/snapshot_keeper_service.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>

#include <gtest/gtest.h>

#include "tests/unit/checkpoint/snapshot_samples.h"
#include "tests/unit/checkpoint/staging_writer.h"

namespace everstep {
namespace {

using checkpoint::DigestOf;
using checkpoint::RandomBytes;
using checkpoint::StagingWriter;
using checkpoint::TemporaryDirectory;

const JobUid kJob("job-1");
const ProcessId kProcess(7);
const ShardIndex kShard(0);
const StateId kState{Step(10), Generation(1)};

// A service and what it said.
class Server {
 public:
  Server(const char* name, const std::string& directory) : id(name) {
    SnapshotKeeperServiceOptions options;
    options.server = id;
    options.host = "127.0.0.1";
    options.store_directory = directory + "/" + name + "/store";
    SnapshotService::Handler handler;
    handler.on_fact = [this](Fact fact) { Note([&] { facts.push_back(std::move(fact)); }); };
    handler.on_loaded = [this](ProcessId process, SnapshotProvided answer, UniqueFd descriptor) {
      Note([&] {
        loaded_for = process;
        loaded = std::move(answer);
        fd = std::move(descriptor);
      });
    };
    handler.on_load_failed = [this](ProcessId, SnapshotUnavailable answer) { Note([&] { failed = answer; }); };
    auto made = MakeSnapshotKeeperService(options, std::move(handler));
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    if (made.ok()) service = std::move(*made);
  }

  SnapshotSource Source(SnapshotTier tier) const { return {id, tier, service->transfer_address(), kState, kShard}; }
  template <typename Condition>
  bool Waits(Condition condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), condition);
  }
  bool Holds(SnapshotTier tier) {
    return Waits([&] {
      for (const Fact& fact : facts) {
        const auto* held = std::get_if<SnapshotHeld>(&fact);
        if (held != nullptr && held->snapshot.tier == tier && held->snapshot.server == id) return true;
      }
      return false;
    });
  }

  const ServerId id;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Fact> facts;                     // guarded by mutex, as all below
  std::optional<SnapshotProvided> loaded;
  ProcessId loaded_for;
  UniqueFd fd;
  std::optional<SnapshotUnavailable> failed;
  std::unique_ptr<SnapshotService> service;    // last: it stops before what its handler touches goes

 private:
  template <typename Change>
  void Note(Change change) {
    {
      const std::lock_guard lock(mutex);
      change();
    }
    changed.notify_all();
  }
};

TEST(SnapshotKeeperService, StagesCopiesToAPeerPersistsAndLoads) {
  const TemporaryDirectory directory;
  StagingWriter rank(kProcess);
  Server owner("s0", directory.path());
  Server peer("s1", directory.path());
  const std::vector<std::byte> bytes = RandomBytes(1, 100000);
  owner.service->AddStaging(kJob, kProcess, UniqueFd(rank.Descriptor().Release()));
  owner.service->Staged(kJob, kProcess, rank.Stage(0, kState, kShard, bytes));
  ASSERT_TRUE(owner.Holds(SnapshotTier::kStaged));

  CopySnapshot copy;
  copy.job = kJob;
  copy.source = owner.Source(SnapshotTier::kStaged);
  copy.digest = DigestOf(bytes);
  copy.bytes = bytes.size();
  copy.to = SnapshotTier::kPeer;
  peer.service->Copy(copy);
  ASSERT_TRUE(peer.Holds(SnapshotTier::kPeer));
  copy.to = SnapshotTier::kStored;
  owner.service->Copy(copy);
  ASSERT_TRUE(owner.Holds(SnapshotTier::kStored));
  EXPECT_EQ(owner.service->Held().size(), 2u);

  owner.service->ProcessGone(kJob, kProcess);
  owner.service->Load(kJob, ProcessId(8), {Generation(2), peer.Source(SnapshotTier::kPeer)});
  ASSERT_TRUE(owner.Waits([&] { return owner.loaded.has_value(); }));
  EXPECT_EQ(owner.loaded_for, ProcessId(8));
  EXPECT_EQ(owner.loaded->generation, Generation(2));
  EXPECT_EQ(owner.loaded->digest, DigestOf(bytes));
  EXPECT_EQ(owner.loaded->from, "s1 peer");
  std::vector<std::byte> read_back(bytes.size());
  ASSERT_EQ(pread(owner.fd.get(), read_back.data(), read_back.size(), 0), static_cast<ssize_t>(bytes.size()));
  EXPECT_TRUE(read_back == bytes);
}

TEST(SnapshotKeeperService, SaysWhyASnapshotCanNotBeLoaded) {
  const TemporaryDirectory directory;
  Server server("s0", directory.path());
  server.service->Load(kJob, kProcess, {Generation(1), server.Source(SnapshotTier::kStored)});
  ASSERT_TRUE(server.Waits([&] { return server.failed.has_value(); }));
  EXPECT_EQ(server.failed->code, StatusCode::kNotFound);
  EXPECT_EQ(server.failed->generation, Generation(1));
}

TEST(SnapshotKeeperService, ListsItsStoreAfterARestart) {
  const TemporaryDirectory directory;
  StagingWriter rank(kProcess);
  const std::vector<std::byte> bytes = RandomBytes(1, 5u << 19);
  {
    Server server("s0", directory.path());
    server.service->AddStaging(kJob, kProcess, UniqueFd(rank.Descriptor().Release()));
    server.service->Staged(kJob, kProcess, rank.Stage(0, kState, kShard, bytes));
    ASSERT_TRUE(server.Holds(SnapshotTier::kStaged));
    CopySnapshot copy;
    copy.job = kJob;
    copy.source = server.Source(SnapshotTier::kStaged);
    copy.digest = DigestOf(bytes);
    copy.bytes = bytes.size();
    copy.to = SnapshotTier::kStored;
    server.service->Copy(copy);
    ASSERT_TRUE(server.Holds(SnapshotTier::kStored));
  }
  Server restarted("s0", directory.path());
  const auto held = restarted.service->Held();
  ASSERT_EQ(held.size(), 1u);
  EXPECT_EQ(held[0].first, kJob);
  EXPECT_EQ(held[0].second.tier, SnapshotTier::kStored);
  EXPECT_EQ(held[0].second.digest, DigestOf(bytes));
}

TEST(SnapshotKeeperService, ADamagedStoreIsSetAsideAndSaid) {
  const TemporaryDirectory directory;
  { Server server("s0", directory.path()); }
  const std::string store = directory.path() + "/s0/store";
  int damaged = 0;
  for (const auto& entry : std::filesystem::directory_iterator(store)) {
    if (entry.path().filename().string().rfind("MANIFEST", 0) != 0) continue;
    std::ofstream(entry.path(), std::ios::binary) << std::string(200, 'x');
    ++damaged;
  }
  ASSERT_GE(damaged, 1);
  Server server("s0", directory.path());
  ASSERT_NE(server.service, nullptr);
  ASSERT_TRUE(server.Waits([&] { return !server.facts.empty(); }));
  const auto* troubled = std::get_if<StorageTroubled>(&server.facts[0]);
  ASSERT_NE(troubled, nullptr);
  EXPECT_EQ(troubled->reason, Reason::kStorageCorrupt);
  EXPECT_NE(troubled->message.find(store), std::string::npos);
  EXPECT_EQ(troubled->message.find('\n'), std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(store + ".damaged"));
  EXPECT_TRUE(server.service->Held().empty());
}

TEST(SnapshotKeeperService, ADirectoryThatIsInUseIsAOneLineError) {
  const TemporaryDirectory directory;
  Server server("s0", directory.path());
  SnapshotKeeperServiceOptions options;
  options.server = ServerId("s0");
  options.host = "127.0.0.1";
  options.store_directory = directory.path() + "/s0/store";
  const auto second = MakeSnapshotKeeperService(options, {});
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().message().find(options.store_directory), std::string::npos);
  EXPECT_EQ(second.status().message().find('\n'), std::string::npos);
}

}  // namespace
}  // namespace everstep
