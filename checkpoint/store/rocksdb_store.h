// The local store: manifests and content-addressed chunks in one RocksDB directory. Opened by the agent at start;
// used by SnapshotKeeper's worker threads. Thread-safe; calls block.
//
// Column families and keys (numbers big-endian in keys, so that they sort):
//   default    "epoch"                            next birth epoch
//              "i" epoch                          open intent of a put; a crash leaves it behind
//              "c" birth hash bytes               condemned chunk that is not deleted yet
//   manifests  length job, step, generation, shard   ->  record_codec's manifest
//   chunks     birth, hash, bytes                 ->  the chunk
//
// A put: intent durable (synced) -> chunks -> one synced batch with the manifest, which ends the intent. Since the
// birth epoch leads a chunk's key, what one put writes is a range of its own: an ingested file goes to the lowest
// level untouched by compaction, and a dead put is dropped as a file. A store that opens deletes what open intents
// and condemned names left behind.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "checkpoint/core/chunk_registry.h"
#include "checkpoint/store/record_codec.h"
#include "checkpoint/store/snapshot_store.h"

namespace rocksdb {
class ColumnFamilyHandle;
class DB;
class Status;
}  // namespace rocksdb

namespace everstep::checkpoint {

class RocksDbStore final : public SnapshotStore {
 public:
  struct Options {
    uint64_t ingest_bytes_min = 8u << 20;   // new bytes of one put from which they are ingested as a file (measured:
                                            // tests/bench/checkpoint_bench)
    uint64_t free_bytes_min = 64u << 20;    // a put that would leave less on the disk is refused
  };

  // Opens or creates the directory.
  //   FAILED_PRECONDITION: another process has it open, or its format is newer than this build.
  //   PERMISSION_DENIED: it can't be written.   DATA_LOSS: it is damaged.   UNAVAILABLE: anything else of the disk.
  // Messages are one line and name the path.
  static Result<std::unique_ptr<RocksDbStore>> Open(const std::string& path, const Options& options);
  static Result<std::unique_ptr<RocksDbStore>> Open(const std::string& path) { return Open(path, Options()); }
  ~RocksDbStore() override;

  Status Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
             std::span<const std::byte> bytes) override;
  Result<StoredSnapshot> Find(const JobUid& job, StateId state, ShardIndex shard) override;
  Status Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) override;
  Result<std::vector<std::pair<JobUid, SnapshotInfo>>> List() override;
  Status Delete(const JobUid& job, StateId state, ShardIndex shard) override;
  size_t Damaged() const override { return damaged_.load(); }

  size_t chunk_count() const;  // live chunks, each counted once

 private:
  RocksDbStore(std::string path, const Options& options);
  Status OpenDatabase();
  void CloseDatabase();
  Status Recover();
  Status Revive();
  Status PutChecked(const JobUid& job, ShardManifest manifest, std::span<const std::byte> bytes,
                    const std::vector<Digest128>& hashes);
  Status CheckSpace(uint64_t bytes);
  struct NewChunk {
    ChunkName name;
    std::span<const std::byte> bytes;
  };
  bool ChunkIsGood(const ChunkName& name);
  Status WriteChunks(Epoch intent, std::vector<NewChunk> chunks);
  Status IngestChunks(Epoch intent, const std::vector<NewChunk>& chunks);
  Status Commit(const std::string& key, const ShardManifest& manifest, Epoch intent);
  void Abandon(Epoch intent, const std::vector<NewChunk>& written);
  void Sweep();
  Result<ShardManifest> Load(const std::string& key);
  Status Convert(const rocksdb::Status& status, const char* what);

  const std::string path_;
  const Options options_;
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ColumnFamilyHandle* meta_ = nullptr;       // owned by handles_
  rocksdb::ColumnFamilyHandle* manifests_ = nullptr;
  rocksdb::ColumnFamilyHandle* chunks_ = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> handles_;
  std::atomic<size_t> damaged_{0};

  // Held shared by every call, exclusively while the database is opened again: after a write that failed, RocksDB
  // refuses all others, and only a new open makes sure of what reached the disk.
  mutable std::shared_mutex life_;
  std::atomic<bool> failed_{false};
  // Held across the small synced writes of intents and manifests, which are what it orders; never across chunk
  // writes, reads or hashing.
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  ChunkRegistry registry_{Epoch(1)};
  std::map<Epoch, size_t> names_of_;  // chunks on disk per birth epoch
};

}  // namespace everstep::checkpoint
