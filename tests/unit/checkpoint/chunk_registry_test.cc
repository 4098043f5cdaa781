#include "checkpoint/core/chunk_registry.h"

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "proto/base/prng.h"

namespace everstep::checkpoint {
namespace {

Digest128 Hash(uint64_t content) { return {content, ~content}; }

TEST(ChunkRegistry, StoresEqualContentOnce) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  EXPECT_TRUE(a.must_write);
  EXPECT_FALSE(registry.Choose(first, Hash(1), 10).must_write);
  EXPECT_TRUE(registry.Choose(first, Hash(1), 11).must_write);  // another length is another chunk
  registry.Commit(first, std::vector{a.name, a.name});
  EXPECT_EQ(registry.references(a.name), 2u);
  const Epoch second = registry.OpenIntent();
  const auto b = registry.Choose(second, Hash(1), 10);
  EXPECT_FALSE(b.must_write);
  EXPECT_EQ(b.name, a.name);
}

TEST(ChunkRegistry, GivesNoOneANameBeforeItIsCommitted) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const Epoch second = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  const auto b = registry.Choose(second, Hash(1), 10);
  EXPECT_TRUE(b.must_write);
  EXPECT_NE(a.name, b.name);
}

TEST(ChunkRegistry, NeverUsesACondemnedNameAgain) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  registry.Commit(first, std::vector{a.name});
  registry.DropReference(a.name);
  EXPECT_TRUE(registry.condemned(a.name));
  const Epoch second = registry.OpenIntent();
  const auto b = registry.Choose(second, Hash(1), 10);
  EXPECT_TRUE(b.must_write);
  EXPECT_NE(b.name, a.name);
}

TEST(ChunkRegistry, WaitsForIntentsOpenedBeforeTheCondemnation) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  registry.Commit(first, std::vector{a.name});
  const Epoch earlier = registry.OpenIntent();
  ASSERT_EQ(registry.Choose(earlier, Hash(1), 10).name, a.name);
  registry.DropReference(a.name);
  EXPECT_TRUE(registry.TakeDeletable().empty());
  registry.Commit(earlier, std::vector{a.name});  // it comes back to life, for this manifest only
  EXPECT_TRUE(registry.TakeDeletable().empty());
  EXPECT_EQ(registry.references(a.name), 1u);
  registry.DropReference(a.name);
  EXPECT_EQ(registry.TakeDeletable(), std::vector{a.name});
}

TEST(ChunkRegistry, LaterIntentsDoNotHoldUpADelete) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  registry.Commit(first, std::vector{a.name});
  registry.DropReference(a.name);
  (void)registry.OpenIntent();
  EXPECT_EQ(registry.TakeDeletable(), std::vector{a.name});
}

TEST(ChunkRegistry, CondemnsWhatAnAbandonedIntentWrote) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  registry.Abandon(first);
  EXPECT_EQ(registry.TakeDeletable(), std::vector{a.name});
  EXPECT_TRUE(registry.TakeDeletable().empty());
}

TEST(ChunkRegistry, GivesADamagedChunkToNobodyElse) {
  ChunkRegistry registry(Epoch(1));
  const Epoch first = registry.OpenIntent();
  const auto a = registry.Choose(first, Hash(1), 10);
  registry.Commit(first, std::vector{a.name});
  registry.Distrust(a.name);
  const Epoch second = registry.OpenIntent();
  const auto b = registry.Choose(second, Hash(1), 10);
  EXPECT_TRUE(b.must_write);
  registry.Commit(second, std::vector{b.name});
  EXPECT_EQ(registry.references(a.name), 1u);
  const Epoch third = registry.OpenIntent();
  EXPECT_EQ(registry.Choose(third, Hash(1), 10).name, b.name);
  registry.Abandon(third);
  registry.DropReference(a.name);
  EXPECT_EQ(registry.TakeDeletable(), std::vector{a.name});
}

// Random interleavings of puts, drops and sweeps over a disk whose deletes land as late as they like: no live
// manifest may ever refer to a chunk that is not there.
TEST(ChunkRegistry, NoManifestReadsADeletedChunkHoweverLateDeletesLand) {
  struct Put {
    std::vector<ChunkName> names;
    std::vector<ChunkName> to_write;
  };
  uint64_t deletes_landed = 0;
  uint64_t revived = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Prng random(seed);
    ChunkRegistry registry(Epoch(1));
    std::set<ChunkName> disk;
    std::vector<ChunkName> deletes_in_flight;
    std::map<Epoch, Put> puts;
    std::vector<std::vector<ChunkName>> manifests;
    std::set<ChunkName> ever_deleted;
    for (int step = 0; step < 120; ++step) {
      switch (random.UpTo(5)) {
        case 0: {
          const Epoch intent = registry.OpenIntent();
          puts[intent];
          break;
        }
        case 1: {  // one more chunk of a put
          if (puts.empty()) break;
          auto it = puts.begin();
          std::advance(it, static_cast<long>(random.UpTo(puts.size() - 1)));
          const auto choice = registry.Choose(it->first, Hash(random.UpTo(4)), 10);
          EXPECT_FALSE(choice.must_write && ever_deleted.contains(choice.name)) << "a name was used again";
          it->second.names.push_back(choice.name);
          if (choice.must_write) it->second.to_write.push_back(choice.name);
          break;
        }
        case 2: {  // a put ends
          if (puts.empty()) break;
          auto it = puts.begin();
          std::advance(it, static_cast<long>(random.UpTo(puts.size() - 1)));
          disk.insert(it->second.to_write.begin(), it->second.to_write.end());
          if (random.Chance(3, 4)) {
            for (const ChunkName& name : it->second.names) revived += registry.condemned(name);
            registry.Commit(it->first, it->second.names);
            manifests.push_back(it->second.names);
          } else {
            registry.Abandon(it->first);
          }
          puts.erase(it);
          break;
        }
        case 3: {  // a manifest is dropped
          if (manifests.empty()) break;
          const size_t at = random.UpTo(manifests.size() - 1);
          for (const ChunkName& name : manifests[at]) registry.DropReference(name);
          manifests.erase(manifests.begin() + static_cast<long>(at));
          break;
        }
        case 4: {
          for (const ChunkName& name : registry.TakeDeletable()) {
            EXPECT_TRUE(ever_deleted.insert(name).second) << "a name was deleted twice";
            deletes_in_flight.push_back(name);
          }
          break;
        }
        default: {  // a delete lands
          if (deletes_in_flight.empty()) break;
          const size_t at = random.UpTo(deletes_in_flight.size() - 1);
          disk.erase(deletes_in_flight[at]);
          deletes_in_flight.erase(deletes_in_flight.begin() + static_cast<long>(at));
          ++deletes_landed;
        }
      }
      for (const auto& manifest : manifests) {
        for (const ChunkName& name : manifest) ASSERT_TRUE(disk.contains(name));
      }
    }
    for (const auto& manifest : manifests) {
      for (const ChunkName& name : manifest) registry.DropReference(name);
    }
    for (const auto& [intent, put] : puts) {
      disk.insert(put.to_write.begin(), put.to_write.end());
      registry.Abandon(intent);
    }
    for (const ChunkName& name : registry.TakeDeletable()) disk.erase(name);
    for (const ChunkName& name : deletes_in_flight) disk.erase(name);
    EXPECT_TRUE(disk.empty()) << "a chunk was never collected";
    EXPECT_EQ(registry.condemned_count(), 0u);
  }
  EXPECT_GT(deletes_landed, 100u);
  EXPECT_GT(revived, 10u);
}

}  // namespace
}  // namespace everstep::checkpoint
