#include "checkpoint/store/rocksdb_store.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <system_error>

#include <fmt/format.h>
#include <rocksdb/convenience.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include "checkpoint/store/digest.h"

namespace everstep::checkpoint {
namespace {

constexpr char kEpochKey[] = "epoch";
constexpr char kFormatKey[] = "format";
constexpr uint32_t kFormat = 1;
constexpr size_t kDimensionlessKeyBytes = 8 + 8 + 4;  // step, generation, shard

void PutBig(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = bytes; i-- > 0;) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t GetBig(std::string_view in, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(in[at + i]);
  return value;
}

std::string EpochKey(Epoch epoch) {
  std::string key;
  PutBig(key, epoch.value, 8);
  return key;
}
std::string IntentKey(Epoch epoch) { return "i" + EpochKey(epoch); }

std::string ChunkKey(const ChunkName& name) {
  std::string key = EpochKey(name.birth);
  PutBig(key, name.hash[0], 8);
  PutBig(key, name.hash[1], 8);
  PutBig(key, name.bytes, 8);
  return key;
}
ChunkName ChunkFromKey(std::string_view key) {
  return {Epoch(GetBig(key, 0, 8)), {GetBig(key, 8, 8), GetBig(key, 16, 8)}, GetBig(key, 24, 8)};
}
std::string CondemnedKey(const ChunkName& name) { return "c" + ChunkKey(name); }

std::string ManifestKey(const JobUid& job, StateId state, ShardIndex shard) {
  std::string key;
  PutBig(key, job.value.size(), 4);
  key += job.value;
  PutBig(key, static_cast<uint64_t>(state.step.value), 8);
  PutBig(key, state.generation.value, 8);
  PutBig(key, static_cast<uint32_t>(shard.value), 4);
  return key;
}
JobUid JobFromKey(std::string_view key) {
  if (key.size() < 4) return JobUid();
  const uint64_t size = GetBig(key, 0, 4);
  if (key.size() != 4 + size + kDimensionlessKeyBytes) return JobUid();
  return JobUid(std::string(key.substr(4, size)));
}

rocksdb::Slice AsSlice(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::span<const std::byte> AsBytes(const rocksdb::Slice& slice) {
  return {reinterpret_cast<const std::byte*>(slice.data()), slice.size()};
}

rocksdb::ColumnFamilyOptions ChunkOptions() {
  rocksdb::ColumnFamilyOptions options;
  options.compression = rocksdb::kNoCompression;  // weights do not compress
  rocksdb::BlockBasedTableOptions table;
  table.no_block_cache = true;                     // a restore reads each chunk once
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  options.write_buffer_size = 32u << 20;
  options.max_write_buffer_number = 3;
  return options;
}

// RocksDB's own log would share the disk, and its writer aborts the process (an assertion of packaged builds) when that
// disk is full, before the failure reaches us. Its statuses say what matters.
class NoLog : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}
};

rocksdb::Options DatabaseOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.max_background_jobs = 2;
  options.max_open_files = 512;
  options.max_total_wal_size = 128u << 20;
  options.bytes_per_sync = 8u << 20;
  options.info_log = std::make_shared<NoLog>();
  options.paranoid_checks = true;
  return options;
}

// One line: RocksDB's messages can be of several.
std::string OneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

rocksdb::WriteOptions Synced() {
  rocksdb::WriteOptions options;
  options.sync = true;
  return options;
}

}  // namespace

RocksDbStore::RocksDbStore(std::string path, const Options& options)
    : path_(std::move(path)), options_(options) {}

Status RocksDbStore::Convert(const rocksdb::Status& status, const char* what) {
  if (status.ok()) return OkStatus();
  const std::string message = fmt::format("checkpoint store {}: {}: {}", path_, what, OneLine(status.ToString()));
  if (status.IsNotFound()) return NotFound(message);
  // A file-size limit says EFBIG, which RocksDB has no code for; to a user it is the same as a full disk.
  if (status.IsNoSpace() || message.find("File too large") != std::string::npos ||
      message.find("No space left") != std::string::npos || message.find("quota exceeded") != std::string::npos) {
    return ResourceExhausted(message);
  }
  if (status.IsCorruption()) return DataLoss(message);
  return Unavailable(message);
}

Result<std::unique_ptr<RocksDbStore>> RocksDbStore::Open(const std::string& path, const Options& options) {
  std::unique_ptr<RocksDbStore> store(new RocksDbStore(path, options));
  EVERSTEP_RETURN_IF_ERROR(store->OpenDatabase());
  EVERSTEP_RETURN_IF_ERROR(store->Recover());
  return store;
}

Status RocksDbStore::OpenDatabase() {
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  if (!error && access(path_.c_str(), R_OK | W_OK | X_OK) != 0) error.assign(errno, std::generic_category());
  if (error) {
    return Status(StatusCode::kPermissionDenied,
                  fmt::format("checkpoint store {}: can't be written ({}); make it writable or choose another "
                              "directory", path_, error.message()));
  }
  rocksdb::DB* db = nullptr;
  const std::vector<rocksdb::ColumnFamilyDescriptor> families = {
      {rocksdb::kDefaultColumnFamilyName, rocksdb::ColumnFamilyOptions()},
      {"manifests", rocksdb::ColumnFamilyOptions()},
      {"chunks", ChunkOptions()}};
  const rocksdb::Status status = rocksdb::DB::Open(DatabaseOptions(), path_, families, &handles_, &db);
  if (!status.ok()) {
    const std::string text = status.ToString();
    if (text.find("LOCK") != std::string::npos || text.find("lock ") != std::string::npos) {
      return FailedPrecondition(fmt::format("checkpoint store {}: locked by another process; stop it or choose "
                                            "another directory", path_));
    }
    return Convert(status, "open");
  }
  db_.reset(db);
  meta_ = handles_[0];
  manifests_ = handles_[1];
  chunks_ = handles_[2];
  std::string format;
  const rocksdb::Status read = db_->Get(rocksdb::ReadOptions(), meta_, kFormatKey, &format);
  if (read.IsNotFound()) {
    std::string value;
    PutBig(value, kFormat, 4);
    return Convert(db_->Put(Synced(), meta_, kFormatKey, value), "write the format");
  }
  if (!read.ok()) return Convert(read, "read the format");
  if (format.size() != 4 || GetBig(format, 0, 4) != kFormat) {
    return FailedPrecondition(fmt::format("checkpoint store {}: its format is not the one this build reads ({}); "
                                          "use the version that wrote it", path_, kFormat));
  }
  return OkStatus();
}

void RocksDbStore::CloseDatabase() {
  if (db_ == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* handle : handles_) (void)db_->DestroyColumnFamilyHandle(handle);
  handles_.clear();
  (void)db_->Close();
  db_.reset();
}

Status RocksDbStore::Revive() {
  if (!failed_.load()) return OkStatus();
  const std::unique_lock life(life_);
  if (!failed_.load()) return OkStatus();
  CloseDatabase();
  EVERSTEP_RETURN_IF_ERROR(OpenDatabase());
  if (Status recovered = Recover(); !recovered.ok()) {
    CloseDatabase();
    return recovered;
  }
  failed_.store(false);
  return OkStatus();
}

Status RocksDbStore::Recover() {
  uint64_t next = 1;
  std::vector<Epoch> intents;
  std::vector<ChunkName> condemned;
  const auto saw = [&next](Epoch epoch) { next = std::max(next, epoch.value + 1); };
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions(), meta_));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const std::string_view key = it->key().ToStringView();
    if (key == kEpochKey && it->value().size() == 8) {
      next = std::max(next, GetBig(it->value().ToStringView(), 0, 8));
    } else if (key.size() == 9 && key[0] == 'i') {
      intents.emplace_back(GetBig(key, 1, 8));
    } else if (key.size() == 33 && key[0] == 'c') {
      condemned.push_back(ChunkFromKey(key.substr(1)));
    }
  }
  EVERSTEP_RETURN_IF_ERROR(Convert(it->status(), "read intents"));
  std::vector<ChunkName> referenced;
  size_t damaged = 0;
  it.reset(db_->NewIterator(rocksdb::ReadOptions(), manifests_));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const Result<ShardManifest> manifest = DecodeManifest(it->value().ToStringView());
    if (!manifest.ok()) {
      ++damaged;
      continue;
    }
    referenced.insert(referenced.end(), manifest->chunks.begin(), manifest->chunks.end());
  }
  EVERSTEP_RETURN_IF_ERROR(Convert(it->status(), "read manifests"));
  it.reset();
  damaged_.store(damaged);
  for (const Epoch epoch : intents) saw(epoch);
  for (const ChunkName& name : condemned) saw(name.birth);
  for (const ChunkName& name : referenced) saw(name.birth);

  const std::lock_guard lock(mutex_);
  registry_ = ChunkRegistry(Epoch(next));
  names_of_.clear();
  for (const ChunkName& name : referenced) {
    if (registry_.references(name) == 0) ++names_of_[name.birth];
    registry_.AddReference(name);
  }
  // Nobody refers to what an open intent was born with: its manifest would have ended it.
  rocksdb::WriteBatch batch;
  for (const Epoch intent : intents) {
    const std::string first = EpochKey(intent);
    const std::string last = EpochKey(intent.Next());
    const rocksdb::Slice begin(first);
    const rocksdb::Slice end(last);
    EVERSTEP_RETURN_IF_ERROR(Convert(rocksdb::DeleteFilesInRange(db_.get(), chunks_, &begin, &end, false), "sweep"));
    batch.DeleteRange(chunks_, begin, end);
    batch.Delete(meta_, IntentKey(intent));
  }
  for (const ChunkName& name : condemned) {
    if (registry_.references(name) == 0) batch.Delete(chunks_, ChunkKey(name));
    batch.Delete(meta_, CondemnedKey(name));
  }
  if (batch.Count() > 0) EVERSTEP_RETURN_IF_ERROR(Convert(db_->Write(Synced(), &batch), "sweep"));
  std::error_code ignored;
  std::filesystem::remove_all(path_ + "/ingest", ignored);  // files that were never ingested
  return OkStatus();
}

RocksDbStore::~RocksDbStore() { CloseDatabase(); }

Status RocksDbStore::CheckSpace(uint64_t bytes) {
  struct statvfs disk{};
  if (statvfs(path_.c_str(), &disk) != 0) {
    return Unavailable(fmt::format("checkpoint store {}: {}", path_, std::strerror(errno)));
  }
  const uint64_t available = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
  if (available < options_.free_bytes_min || available - options_.free_bytes_min < bytes) {
    return ResourceExhausted(fmt::format("checkpoint store {}: {} bytes are needed, {} are free and {} stay free; "
                                         "free space on this disk", path_, bytes, available,
                                         options_.free_bytes_min));
  }
  return OkStatus();
}

Status RocksDbStore::Put(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                         std::span<const std::byte> bytes) {
  EVERSTEP_RETURN_IF_ERROR(ValidatePut(job, info, tensors, bytes));
  std::vector<Digest128> hashes;
  for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
    hashes.push_back(DigestOf(bytes.subspan(at, std::min(kChunkBytes, bytes.size() - at))));
  }
  ShardManifest manifest{info, tensors, {}};
  manifest.info.tier = SnapshotTier::kStored;
  EVERSTEP_RETURN_IF_ERROR(Revive());
  return PutChecked(job, std::move(manifest), bytes, hashes);
}

Status RocksDbStore::PutChecked(const JobUid& job, ShardManifest manifest, std::span<const std::byte> bytes,
                                const std::vector<Digest128>& hashes) {
  const std::shared_lock life(life_);
  if (db_ == nullptr) return Unavailable(fmt::format("checkpoint store {}: not open", path_));
  const std::string key = ManifestKey(job, manifest.info.state, manifest.info.shard);
  Epoch intent;
  std::vector<NewChunk> missing;
  std::set<ChunkName> reused;
  {
    const std::lock_guard lock(mutex_);
    if (const Result<ShardManifest> before = Load(key); before.ok()) {
      if (before->info.digest == manifest.info.digest) return OkStatus();
      return AlreadyExists("another content is stored under this state and shard");
    }
    intent = registry_.OpenIntent();
    rocksdb::WriteBatch batch;
    batch.Put(meta_, IntentKey(intent), "");
    batch.Put(meta_, kEpochKey, EpochKey(registry_.next()));
    if (const rocksdb::Status status = db_->Write(Synced(), &batch); !status.ok()) {
      registry_.Abandon(intent);
      failed_.store(true);
      return Convert(status, "write an intent");
    }
    size_t at = 0;
    for (const Digest128& hash : hashes) {
      const auto chunk = bytes.subspan(at, std::min(kChunkBytes, bytes.size() - at));
      const auto [name, must_write] = registry_.Choose(intent, hash, chunk.size());
      manifest.chunks.push_back(name);
      if (must_write) {
        missing.push_back({name, chunk});
      } else if (name.birth != intent) {
        reused.insert(name);
      }
      at += chunk.size();
    }
  }
  // What others wrote is promised anew, so it is read again first; a damaged one is written under another name.
  for (const ChunkName& name : reused) {
    if (ChunkIsGood(name)) continue;
    const std::lock_guard lock(mutex_);
    registry_.Distrust(name);
    size_t at = 0;
    for (ChunkName& chosen : manifest.chunks) {
      const uint64_t size = chosen.bytes;
      if (chosen == name) {
        const auto choice = registry_.Choose(intent, name.hash, name.bytes);
        if (choice.must_write) missing.push_back({choice.name, bytes.subspan(at, size)});
        chosen = choice.name;
      }
      at += size;
    }
  }
  Status status = WriteChunks(intent, missing);
  if (status.ok()) status = Commit(key, manifest, intent);
  if (!status.ok()) Abandon(intent, missing);
  return status;
}

bool RocksDbStore::ChunkIsGood(const ChunkName& name) {
  rocksdb::ReadOptions read;
  read.fill_cache = false;
  rocksdb::PinnableSlice value;
  return db_->Get(read, chunks_, ChunkKey(name), &value).ok() && value.size() == name.bytes &&
         DigestOf(AsBytes(value)) == name.hash;
}

Status RocksDbStore::WriteChunks(Epoch intent, std::vector<NewChunk> chunks) {
  uint64_t bytes = 0;
  for (const NewChunk& chunk : chunks) bytes += chunk.bytes.size();
  EVERSTEP_RETURN_IF_ERROR(CheckSpace(bytes));
  if (bytes >= options_.ingest_bytes_min) {
    std::sort(chunks.begin(), chunks.end(),
              [](const NewChunk& a, const NewChunk& b) { return ChunkKey(a.name) < ChunkKey(b.name); });
    return IngestChunks(intent, chunks);
  }
  for (const NewChunk& chunk : chunks) {
    const rocksdb::Status status =
        db_->Put(rocksdb::WriteOptions(), chunks_, ChunkKey(chunk.name), AsSlice(chunk.bytes));
    if (!status.ok()) {
      failed_.store(true);
      return Convert(status, "write a chunk");
    }
  }
  return OkStatus();  // synced with the manifest's batch, which follows in the same log
}

Status RocksDbStore::IngestChunks(Epoch intent, const std::vector<NewChunk>& chunks) {
  const std::string folder = path_ + "/ingest";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string file = fmt::format("{}/{}.sst", folder, intent.value);
  rocksdb::Options options(DatabaseOptions(), ChunkOptions());
  rocksdb::SstFileWriter writer(rocksdb::EnvOptions(), options, chunks_);
  rocksdb::Status status = writer.Open(file);
  for (size_t i = 0; status.ok() && i < chunks.size(); ++i) {
    status = writer.Put(ChunkKey(chunks[i].name), AsSlice(chunks[i].bytes));
  }
  if (status.ok()) status = writer.Finish();  // syncs the file
  if (status.ok()) {
    rocksdb::IngestExternalFileOptions ingest;
    ingest.move_files = true;
    status = db_->IngestExternalFile(chunks_, {file}, ingest);
    if (!status.ok()) failed_.store(true);
  }
  std::filesystem::remove(file, error);
  return Convert(status, "ingest chunks");
}

Status RocksDbStore::Commit(const std::string& key, const ShardManifest& manifest, Epoch intent) {
  const std::lock_guard lock(mutex_);
  if (const Result<ShardManifest> before = Load(key); before.ok()) {
    return before->info.digest == manifest.info.digest
               ? AlreadyExists("the same snapshot was put at the same time")
               : AlreadyExists("another content is stored under this state and shard");
  }
  rocksdb::WriteBatch batch;
  batch.Put(manifests_, key, EncodeManifest(manifest));
  batch.Delete(meta_, IntentKey(intent));
  if (const rocksdb::Status status = db_->Write(Synced(), &batch); !status.ok()) {
    failed_.store(true);
    return Convert(status, "commit a manifest");
  }
  std::set<ChunkName> born;
  for (const ChunkName& name : manifest.chunks) {
    if (name.birth == intent) born.insert(name);
  }
  if (!born.empty()) names_of_[intent] += born.size();
  registry_.Commit(intent, manifest.chunks);
  Sweep();  // names that waited for this intent
  return OkStatus();
}

void RocksDbStore::Abandon(Epoch intent, const std::vector<NewChunk>& written) {
  const std::lock_guard lock(mutex_);
  registry_.Abandon(intent);
  (void)registry_.TakeDeletable();  // its own names go as a range; others are in the condemned records
  // Best effort: the intent's record stays until its chunks are gone, and the next open sweeps it.
  const std::string first = EpochKey(intent);
  const std::string last = EpochKey(intent.Next());
  const rocksdb::Slice begin(first);
  const rocksdb::Slice end(last);
  if (!rocksdb::DeleteFilesInRange(db_.get(), chunks_, &begin, &end, false).ok()) return;
  rocksdb::WriteBatch batch;
  for (const NewChunk& chunk : written) batch.Delete(chunks_, ChunkKey(chunk.name));
  batch.Delete(meta_, IntentKey(intent));
  (void)db_->Write(rocksdb::WriteOptions(), &batch);
}

Status RocksDbStore::Delete(const JobUid& job, StateId state, ShardIndex shard) {
  EVERSTEP_RETURN_IF_ERROR(Revive());
  const std::shared_lock life(life_);
  if (db_ == nullptr) return Unavailable(fmt::format("checkpoint store {}: not open", path_));
  const std::lock_guard lock(mutex_);
  const std::string key = ManifestKey(job, state, shard);
  const Result<ShardManifest> manifest = Load(key);
  if (manifest.status().code() == StatusCode::kNotFound) return OkStatus();
  rocksdb::WriteBatch batch;
  batch.Delete(manifests_, key);
  std::map<ChunkName, uint64_t> dropped;
  if (manifest.ok()) {
    for (const ChunkName& name : manifest->chunks) ++dropped[name];
    for (const auto& [name, count] : dropped) {
      if (registry_.references(name) == count) batch.Put(meta_, CondemnedKey(name), "");
    }
  } else if (manifest.status().code() != StatusCode::kDataLoss) {
    return manifest.status();
  }
  if (const rocksdb::Status status = db_->Write(Synced(), &batch); !status.ok()) {
    failed_.store(true);
    return Convert(status, "delete a manifest");
  }
  for (const auto& [name, count] : dropped) {
    for (uint64_t i = 0; i < count; ++i) registry_.DropReference(name);
  }
  Sweep();
  return OkStatus();
}

// Deletes what may be deleted now. Failing is harmless: the condemned records stay, and the next open sweeps.
// REQUIRES: life_ is held shared, and mutex_.
void RocksDbStore::Sweep() {
  const std::vector<ChunkName> deletable = registry_.TakeDeletable();
  if (deletable.empty()) return;
  rocksdb::WriteBatch batch;
  std::set<Epoch> epochs;
  for (const ChunkName& name : deletable) {
    batch.Delete(chunks_, ChunkKey(name));
    batch.Delete(meta_, CondemnedKey(name));
    if (const auto count = names_of_.find(name.birth); count != names_of_.end() && --count->second == 0) {
      names_of_.erase(count);
      epochs.insert(name.birth);
    }
  }
  for (const Epoch epoch : epochs) {  // nothing of that put is alive: its file goes whole
    const std::string first = EpochKey(epoch);
    const std::string last = EpochKey(epoch.Next());
    const rocksdb::Slice begin(first);
    const rocksdb::Slice end(last);
    (void)rocksdb::DeleteFilesInRange(db_.get(), chunks_, &begin, &end, false);
  }
  (void)db_->Write(rocksdb::WriteOptions(), &batch);
}

Result<ShardManifest> RocksDbStore::Load(const std::string& key) {
  std::string record;
  if (const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), manifests_, key, &record); !status.ok()) {
    return status.IsNotFound() ? NotFound("no such snapshot") : Convert(status, "read a manifest");
  }
  return DecodeManifest(record);
}

Result<StoredSnapshot> RocksDbStore::Find(const JobUid& job, StateId state, ShardIndex shard) {
  const std::shared_lock life(life_);
  if (db_ == nullptr) return Unavailable(fmt::format("checkpoint store {}: not open", path_));
  EVERSTEP_ASSIGN_OR_RETURN(ShardManifest manifest, Load(ManifestKey(job, state, shard)));
  return StoredSnapshot{std::move(manifest.info), std::move(manifest.tensors)};
}

Status RocksDbStore::Read(const JobUid& job, StateId state, ShardIndex shard, std::span<std::byte> out) {
  const std::shared_lock life(life_);
  if (db_ == nullptr) return Unavailable(fmt::format("checkpoint store {}: not open", path_));
  EVERSTEP_ASSIGN_OR_RETURN(const ShardManifest manifest, Load(ManifestKey(job, state, shard)));
  if (out.size() != manifest.info.bytes) {
    return InvalidArgument(fmt::format("a buffer of {} bytes for a snapshot of {}", out.size(), manifest.info.bytes));
  }
  // A view of one moment: a Delete that comes meanwhile does not take chunks away from this reader.
  const rocksdb::Snapshot* moment = db_->GetSnapshot();
  rocksdb::ReadOptions read;
  read.snapshot = moment;
  read.fill_cache = false;
  Status result;
  size_t at = 0;
  for (const ChunkName& name : manifest.chunks) {
    rocksdb::PinnableSlice value;
    const rocksdb::Status status = db_->Get(read, chunks_, ChunkKey(name), &value);
    if (status.IsNotFound()) {
      result = DataLoss(fmt::format("checkpoint store {}: a chunk of step {} is missing", path_,
                                    manifest.info.state.step.value));
    } else if (!status.ok()) {
      result = Convert(status, "read a chunk");
    } else if (value.size() != name.bytes || DigestOf(AsBytes(value)) != name.hash) {
      result = DataLoss(fmt::format("checkpoint store {}: a chunk of step {} does not match its hash", path_,
                                    manifest.info.state.step.value));
    }
    if (!result.ok()) break;
    std::memcpy(out.data() + at, value.data(), value.size());
    at += value.size();
  }
  db_->ReleaseSnapshot(moment);
  EVERSTEP_RETURN_IF_ERROR(result);
  if (DigestOf(out) != manifest.info.digest) {
    return DataLoss(fmt::format("checkpoint store {}: step {} does not match its digest", path_,
                                manifest.info.state.step.value));
  }
  return OkStatus();
}

Result<std::vector<std::pair<JobUid, SnapshotInfo>>> RocksDbStore::List() {
  const std::shared_lock life(life_);
  if (db_ == nullptr) return Unavailable(fmt::format("checkpoint store {}: not open", path_));
  std::vector<std::pair<JobUid, SnapshotInfo>> all;
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions(), manifests_));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const JobUid job = JobFromKey(it->key().ToStringView());
    Result<ShardManifest> manifest = DecodeManifest(it->value().ToStringView());
    if (job.empty() || !manifest.ok()) continue;
    all.emplace_back(job, std::move(manifest->info));
  }
  EVERSTEP_RETURN_IF_ERROR(Convert(it->status(), "list manifests"));
  return all;
}

size_t RocksDbStore::chunk_count() const {
  const std::lock_guard lock(mutex_);
  return registry_.live_count();
}

}  // namespace everstep::checkpoint
