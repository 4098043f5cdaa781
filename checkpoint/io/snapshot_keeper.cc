#include "checkpoint/io/snapshot_keeper.h"

#include "checkpoint/io/tcp.h"  // first of all that includes Asio

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "checkpoint/io/staging_reader.h"
#include "checkpoint/store/digest.h"
#include "checkpoint/store/record_codec.h"
#include "proto/model/names.h"

namespace everstep::checkpoint {
namespace asio = boost::asio;

namespace {

Reason ReasonOf(const Status& status) {
  switch (status.code()) {
    case StatusCode::kResourceExhausted: return Reason::kStorageFull;
    case StatusCode::kDataLoss: return Reason::kStorageCorrupt;
    case StatusCode::kAborted: return Reason::kStaleGeneration;
    case StatusCode::kFailedPrecondition:
    case StatusCode::kAlreadyExists: return Reason::kDigestMismatch;
    case StatusCode::kNotFound: return Reason::kSourceLost;
    default: return Reason::kStorageFailed;
  }
}

// The highest generation of a job that this agent knows, shared with transfers that must end when it rises.
using GenerationCell = std::atomic<uint64_t>;

// A verified copy in memory.
struct MemoryCopy {
  SnapshotInfo info;
  std::vector<TensorInfo> tensors;
  std::shared_ptr<MemoryRegion> region;
};

// A staged slot with what is needed to read it; valid as long as the reader says it is unchanged.
struct StagedCopy {
  SnapshotInfo info;
  std::vector<TensorInfo> tensors;
  std::shared_ptr<StagingReader> reader;
  StagingReader::Slot slot;
};

// One place where a snapshot may be read from, resolved on the loop so that a worker needs none of its state.
struct Candidate {
  SnapshotSource source;
  std::shared_ptr<const MemoryCopy> memory;
  std::shared_ptr<const StagedCopy> staged;
  bool stored = false;
  bool local() const { return memory != nullptr || staged != nullptr || stored; }
};

class ServedBytes final : public PinnedBytes {
 public:
  ServedBytes(Generation generation, std::shared_ptr<const GenerationCell> newest)
      : generation_(generation), newest_(std::move(newest)) {}
  std::shared_ptr<const MemoryCopy> memory;
  std::shared_ptr<const StagedCopy> staged;
  std::shared_ptr<StagedView> view;     // of `staged`

  std::span<const std::byte> bytes() const override {
    return memory != nullptr ? memory->region->bytes() : view->bytes();
  }
  Status Check() const override {
    // A background copy (generation 0) is fenced by its digest: it may outlive a change of generation.
    if (generation_.value != 0 && newest_->load() > generation_.value) return Aborted("the generation rose");
    if (staged != nullptr && !staged->reader->Unchanged(staged->slot)) return Aborted("the slot was overwritten");
    return OkStatus();
  }

 private:
  const Generation generation_;
  const std::shared_ptr<const GenerationCell> newest_;
};

std::string SourceText(const ServerId& server, SnapshotTier tier) {
  return fmt::format("{} {}", server.value, SnapshotTierName(tier));
}

}  // namespace

class SnapshotKeeper::Impl final : public TransferSource {
 public:
  Impl(Options options, Callbacks callbacks)
      : options_(std::move(options)), callbacks_(std::move(callbacks)),
        custody_(options_.self, options_.limits) {}
  ~Impl() override { Stop(); }

  Status Begin();
  void Stop();

  template <typename Work>
  void Post(Work work) { asio::post(*loop_, std::move(work)); }

  // ---- on the loop
  void Staged(const JobUid& job, ProcessId process, UniqueFd fd, const SnapshotStaged& staged);
  void SetGeneration(const JobUid& job, Generation generation);
  void Provide(const JobUid& job, Generation generation, std::vector<SnapshotSource> sources,
               std::function<void(Result<ProvidedSnapshot>)> done);
  void FreeStagingOf(ProcessId process);
  void Perform(CustodyEffects effects);
  SnapshotCustody& custody() { return custody_; }

  // ---- any thread
  void OpenTransfer(const TransferRequest& request, std::function<void(OpenedTransfer)> done) override {
    Post([this, request, done = std::move(done)]() mutable { Open(request, std::move(done)); });
  }
  std::vector<std::pair<JobUid, SnapshotInfo>> Held() const {
    const std::lock_guard lock(held_mutex_);
    return held_;
  }
  Counters counters() const;
  uint16_t port() const { return server_->port(); }

 private:
  struct StagedEntry {
    std::vector<TensorInfo> tensors;
    std::shared_ptr<const StagedCopy> copy;  // null until verified
  };
  struct Segment {
    JobUid job;
    std::shared_ptr<StagingReader> reader;
    std::map<uint32_t, StagedEntry> slots;
  };
  using CopyKey = std::pair<JobUid, ShardState>;

  // ---- effects of custody, on the loop
  void Do(const VerifyStaged& effect);
  void Do(const MakeCopy& effect);
  void Do(const FreeSegment& effect) { segments_.erase(effect.process); }
  void Do(const FreePeerCopy& effect) { peers_.erase({effect.job, effect.what}); }
  void Do(const DeleteStored& effect);
  void Do(const ForgetJob& effect) { generations_.erase(effect.job); }
  void Do(const TellHeld& effect) { callbacks_.held(effect.fact, effect.slot); }
  void Do(const TellLost& effect) { callbacks_.lost(effect.fact, effect.slot, effect.answer); }

  std::shared_ptr<const StagedCopy> FindStaged(const JobUid& job, ShardState what) const;
  std::shared_ptr<const MemoryCopy> FindPeer(const JobUid& job, ShardState what) const;
  Candidate Resolve(const JobUid& job, const SnapshotSource& source) const;
  std::shared_ptr<GenerationCell> CellOf(const JobUid& job);
  void Open(const TransferRequest& request, std::function<void(OpenedTransfer)> done);
  void OpenStored(const TransferRequest& request, std::shared_ptr<ServedBytes> pin,
                  std::function<void(OpenedTransfer)> done);
  void CopyDone(const CopySnapshot& command, Result<MemoryCopy> copy);

  // ---- on workers
  Result<MemoryCopy> Load(const JobUid& job, Generation generation, const Candidate& candidate,
                          const Digest128& digest);
  Result<MemoryCopy> LoadStaged(const StagedCopy& staged) const;
  Result<MemoryCopy> LoadStored(const JobUid& job, const SnapshotSource& source) const;
  Result<MemoryCopy> FetchWithRetry(const JobUid& job, Generation generation, const SnapshotSource& source,
                                    const Digest128& digest);
  Result<ProvidedSnapshot> ProvideFrom(const JobUid& job, Generation generation,
                                       const std::vector<Candidate>& candidates);
  void ReportBad(const JobUid& job, const SnapshotInfo& info, const Status& status);

  const Options options_;
  const Callbacks callbacks_;

  // Loop-only:
  SnapshotCustody custody_;
  std::map<ProcessId, Segment> segments_;
  std::map<CopyKey, std::shared_ptr<const MemoryCopy>> peers_;
  std::map<JobUid, std::shared_ptr<GenerationCell>> generations_;
  size_t loads_ = 0;

  mutable std::mutex held_mutex_;
  std::vector<std::pair<JobUid, SnapshotInfo>> held_;  // guarded by held_mutex_

  std::atomic<uint64_t> bytes_fetched_{0};
  std::atomic<uint64_t> stale_refused_{0};
  std::atomic<uint64_t> drops_refused_{0};
  std::atomic<uint64_t> peer_bytes_{0};
  std::stop_source stop_;

  std::unique_ptr<TransferServer> server_;
  std::unique_ptr<asio::io_context> loop_;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> loop_guard_;
  // Apart, so that a slow disk or peer delays neither a restore nor the verification of what was just staged.
  std::unique_ptr<asio::thread_pool> restore_pool_;
  std::unique_ptr<asio::thread_pool> verify_pool_;
  std::unique_ptr<asio::thread_pool> peer_pool_;
  std::unique_ptr<asio::thread_pool> disk_pool_;  // of one thread: copies and deletes in their order
  // Apart from restores: two servers that restore from each other's stores must not wait for each other.
  std::unique_ptr<asio::thread_pool> load_pool_;
  std::thread loop_thread_;
};

Status SnapshotKeeper::Impl::Begin() {
  if (options_.store != nullptr) {
    EVERSTEP_ASSIGN_OR_RETURN(const auto stored, options_.store->List());
    for (const auto& [job, info] : stored) custody_.StoredFound(job, info);
    held_ = custody_.Held();
  }
  loop_ = std::make_unique<asio::io_context>(1);
  loop_guard_.emplace(loop_->get_executor());
  restore_pool_ = std::make_unique<asio::thread_pool>(4);
  load_pool_ = std::make_unique<asio::thread_pool>(1);
  verify_pool_ = std::make_unique<asio::thread_pool>(1);
  peer_pool_ = std::make_unique<asio::thread_pool>(2);
  disk_pool_ = std::make_unique<asio::thread_pool>(1);
  TransferServer::Options transfer = options_.transfer;
  transfer.address = options_.transfer_address;
  EVERSTEP_ASSIGN_OR_RETURN(server_, TransferServer::Start(transfer, *this));
  loop_thread_ = std::thread([this] { loop_->run(); });
  return OkStatus();
}

void SnapshotKeeper::Impl::Stop() {
  if (loop_ == nullptr) return;
  stop_.request_stop();
  if (server_ != nullptr) server_->Stop();  // no OpenTransfer from here on
  for (const auto* pool : {&restore_pool_, &verify_pool_, &peer_pool_, &disk_pool_, &load_pool_}) (*pool)->stop();
  for (const auto* pool : {&restore_pool_, &verify_pool_, &peer_pool_, &disk_pool_, &load_pool_}) (*pool)->join();
  loop_guard_.reset();
  loop_->stop();
  if (loop_thread_.joinable()) loop_thread_.join();
  // Queued work owns sessions of the server: it goes before the server does.
  for (auto* pool : {&restore_pool_, &verify_pool_, &peer_pool_, &disk_pool_, &load_pool_}) pool->reset();
  loop_.reset();
  server_.reset();
}

SnapshotKeeper::Counters SnapshotKeeper::Impl::counters() const {
  Counters counters;
  counters.bytes_served = server_->bytes_sent();
  counters.requests_refused = server_->requests_refused();
  counters.bytes_fetched = bytes_fetched_.load();
  counters.stale_refused = stale_refused_.load();
  counters.drops_refused = drops_refused_.load();
  counters.peer_bytes = peer_bytes_.load();
  return counters;
}

void SnapshotKeeper::Impl::Perform(CustodyEffects effects) {
  drops_refused_.store(custody_.drops_refused());
  peer_bytes_.store(custody_.peer_bytes());
  {
    std::vector<std::pair<JobUid, SnapshotInfo>> held = custody_.Held();
    const std::lock_guard lock(held_mutex_);
    held_ = std::move(held);
  }
  for (const CustodyEffect& effect : effects) {
    std::visit([this](const auto& body) { Do(body); }, effect);
  }
}

std::shared_ptr<GenerationCell> SnapshotKeeper::Impl::CellOf(const JobUid& job) {
  std::shared_ptr<GenerationCell>& cell = generations_[job];
  if (cell == nullptr) cell = std::make_shared<GenerationCell>(0);
  return cell;
}

void SnapshotKeeper::Impl::SetGeneration(const JobUid& job, Generation generation) {
  const std::shared_ptr<GenerationCell> cell = CellOf(job);
  if (cell->load() < generation.value) cell->store(generation.value);  // the loop is its only writer
}

// ---- staging

void SnapshotKeeper::Impl::Staged(const JobUid& job, ProcessId process, UniqueFd fd, const SnapshotStaged& staged) {
  const StagedSlot slot{process, staged.slot};
  const ShardState what{staged.state, staged.shard};
  Segment& segment = segments_[process];
  segment.job = job;
  Status status;
  if (segment.reader == nullptr) {
    Result<std::shared_ptr<StagingReader>> reader = StagingReader::Open(std::move(fd), process);
    status = reader.status();
    if (reader.ok()) segment.reader = std::move(*reader);
  }
  if (status.ok()) status = ValidateTensors(staged.tensors, staged.bytes);
  CustodyEffects effects = custody_.Staged(job, slot, what, staged.bytes);
  const bool verify = std::any_of(effects.begin(), effects.end(), [](const CustodyEffect& effect) {
    return std::holds_alternative<VerifyStaged>(effect);
  });
  if (verify) segment.slots[staged.slot] = {staged.tensors, nullptr};
  if (verify && !status.ok()) {
    std::erase_if(effects, [](const CustodyEffect& effect) { return std::holds_alternative<VerifyStaged>(effect); });
    Perform(std::move(effects));
    Perform(custody_.StagedRefused(job, slot, what, ReasonOf(status), status.message()));
    return;
  }
  Perform(std::move(effects));
}

void SnapshotKeeper::Impl::Do(const VerifyStaged& effect) {
  const auto segment = segments_.find(effect.slot.process);
  if (segment == segments_.end()) return;
  asio::post(*verify_pool_, [this, effect, reader = segment->second.reader] {
    Result<StagingReader::Slot> slot = reader->Verify(effect.slot.slot, effect.what.state, effect.what.shard);
    if (slot.ok() && slot->bytes != effect.bytes) slot = DataLoss("a staged slot has another size than was said");
    Post([this, effect, reader, slot = std::move(slot)] {
      if (!slot.ok()) {
        Perform(custody_.StagedRefused(effect.job, effect.slot, effect.what, ReasonOf(slot.status()),
                                       slot.status().message()));
        return;
      }
      const auto found = segments_.find(effect.slot.process);
      if (found == segments_.end()) return;
      StagedEntry& entry = found->second.slots[effect.slot.slot];
      auto copy = std::make_shared<StagedCopy>();
      copy->info.state = effect.what.state;
      copy->info.shard = effect.what.shard;
      copy->info.tier = SnapshotTier::kStaged;
      copy->info.server = options_.self;
      copy->info.bytes = slot->bytes;
      copy->info.digest = slot->digest;
      copy->tensors = entry.tensors;
      copy->reader = reader;
      copy->slot = *slot;
      entry.copy = std::move(copy);
      Perform(custody_.StagedVerified(effect.job, effect.slot, effect.what, slot->digest));
    });
  });
}

void SnapshotKeeper::Impl::FreeStagingOf(ProcessId process) {
  const auto segment = segments_.find(process);
  if (segment == segments_.end()) return;
  const JobUid job = segment->second.job;
  Perform(custody_.FreeStaging(job, process));
}

// ---- finding copies

std::shared_ptr<const StagedCopy> SnapshotKeeper::Impl::FindStaged(const JobUid& job, ShardState what) const {
  if (custody_.Find(job, what, SnapshotTier::kStaged) == nullptr) return nullptr;
  const StagedSlot slot = custody_.SlotOf(job, what);
  const auto segment = segments_.find(slot.process);
  if (segment == segments_.end()) return nullptr;
  const auto entry = segment->second.slots.find(slot.slot);
  if (entry == segment->second.slots.end() || entry->second.copy == nullptr) return nullptr;
  const SnapshotInfo& info = entry->second.copy->info;
  return info.state == what.state && info.shard == what.shard ? entry->second.copy : nullptr;
}

std::shared_ptr<const MemoryCopy> SnapshotKeeper::Impl::FindPeer(const JobUid& job, ShardState what) const {
  const auto found = peers_.find({job, what});
  return found == peers_.end() ? nullptr : found->second;
}

Candidate SnapshotKeeper::Impl::Resolve(const JobUid& job, const SnapshotSource& source) const {
  Candidate candidate;
  candidate.source = source;
  if (source.server != options_.self) return candidate;
  const ShardState what{source.state, source.shard};
  switch (source.tier) {
    case SnapshotTier::kStaged: candidate.staged = FindStaged(job, what); break;
    case SnapshotTier::kPeer: candidate.memory = FindPeer(job, what); break;
    case SnapshotTier::kStored:
      candidate.stored = options_.store != nullptr && custody_.Find(job, what, SnapshotTier::kStored) != nullptr;
      break;
  }
  return candidate;
}

// ---- loading, on workers

Result<MemoryCopy> SnapshotKeeper::Impl::LoadStaged(const StagedCopy& staged) const {
  EVERSTEP_ASSIGN_OR_RETURN(const std::shared_ptr<StagedView> view, staged.reader->View(staged.slot));
  EVERSTEP_ASSIGN_OR_RETURN(std::shared_ptr<MemoryRegion> region, MemoryRegion::Create(staged.info.bytes));
  if (staged.info.bytes > 0) std::memcpy(region->writable().data(), view->bytes().data(), staged.info.bytes);
  if (!staged.reader->Unchanged(staged.slot)) return Aborted("the staged slot was overwritten");
  // The copy is hashed, not the slot: whatever happened on the way shows.
  if (DigestOf(region->bytes()) != staged.info.digest) return DataLoss("a staged copy does not match its digest");
  EVERSTEP_RETURN_IF_ERROR(region->Seal());
  return MemoryCopy{staged.info, staged.tensors, std::move(region)};
}

Result<MemoryCopy> SnapshotKeeper::Impl::LoadStored(const JobUid& job, const SnapshotSource& source) const {
  EVERSTEP_ASSIGN_OR_RETURN(StoredSnapshot found, options_.store->Find(job, source.state, source.shard));
  EVERSTEP_ASSIGN_OR_RETURN(std::shared_ptr<MemoryRegion> region, MemoryRegion::Create(found.info.bytes));
  EVERSTEP_RETURN_IF_ERROR(options_.store->Read(job, source.state, source.shard, region->writable()));
  EVERSTEP_RETURN_IF_ERROR(region->Seal());
  found.info.tier = SnapshotTier::kStored;
  found.info.server = options_.self;
  return MemoryCopy{found.info, std::move(found.tensors), std::move(region)};
}

Result<MemoryCopy> SnapshotKeeper::Impl::FetchWithRetry(const JobUid& job, Generation generation,
                                                        const SnapshotSource& source, const Digest128& digest) {
  const TransferRequest request{job, generation, source.state, source.shard, source.tier, digest};
  const auto give_up = std::chrono::steady_clock::now() + options_.retry_timeout;
  for (int connects_failed = 0;;) {
    FetchProgress progress;
    Result<FetchedSnapshot> fetched =
        FetchSnapshot(source.transfer_address, request, options_.fetch, stop_.get_token(), &progress);
    if (!progress.connected) ++connects_failed;
    if (fetched.ok()) {
      bytes_fetched_.fetch_add(fetched->info.bytes);
      return MemoryCopy{fetched->info, std::move(fetched->tensors), std::move(fetched->region)};
    }
    if (fetched.status().code() != StatusCode::kUnavailable || stop_.stop_requested() ||
        connects_failed >= options_.connects_max ||
        std::chrono::steady_clock::now() + options_.retry_interval > give_up) {
      return fetched.status();
    }
    std::this_thread::sleep_for(options_.retry_interval);
  }
}

Result<MemoryCopy> SnapshotKeeper::Impl::Load(const JobUid& job, Generation generation, const Candidate& candidate,
                                              const Digest128& digest) {
  if (!candidate.local()) {
    if (candidate.source.server == options_.self) return NotFound("this server holds no such copy");
    return FetchWithRetry(job, generation, candidate.source, digest);
  }
  SnapshotInfo info;
  Result<MemoryCopy> copy = NotFound("this server holds no such copy");
  if (candidate.memory != nullptr) {
    info = candidate.memory->info;
    if (DigestOf(candidate.memory->region->bytes()) == info.digest) {
      copy = *candidate.memory;
    } else {
      copy = DataLoss("a copy in memory does not match its digest");
    }
  } else if (candidate.staged != nullptr) {
    info = candidate.staged->info;
    copy = LoadStaged(*candidate.staged);
  } else {
    info.state = candidate.source.state;
    info.shard = candidate.source.shard;
    info.tier = SnapshotTier::kStored;
    copy = LoadStored(job, candidate.source);
  }
  if (copy.status().code() == StatusCode::kDataLoss) ReportBad(job, info, copy.status());
  if (copy.status().code() == StatusCode::kAborted) {
    // A slot that moved on is not a stale generation: the caller goes on with its next source.
    return NotFound(copy.status().message());
  }
  if (copy.ok() && digest != Digest128{} && copy->info.digest != digest) {
    return FailedPrecondition("the copy held here has another digest than the one asked for");
  }
  return copy;
}

void SnapshotKeeper::Impl::ReportBad(const JobUid& job, const SnapshotInfo& info, const Status& status) {
  Post([this, job, info, status] {
    Perform(custody_.CopyFoundBad(job, info, ReasonOf(status), status.message()));
  });
}

// ---- copies

void SnapshotKeeper::Impl::Do(const MakeCopy& effect) {
  const CopySnapshot& command = effect.command;
  const ShardState what{command.source.state, command.source.shard};
  if (command.to == SnapshotTier::kStored && options_.store == nullptr) {
    Perform(custody_.CopyFailed(command.job, what, command.to, Reason::kStorageFailed, "this server has no store"));
    return;
  }
  Candidate candidate;
  candidate.source = command.source;
  if (effect.local) {
    candidate.memory = FindPeer(command.job, what);
    if (candidate.memory == nullptr) candidate.staged = FindStaged(command.job, what);
  }
  asio::thread_pool& pool = command.to == SnapshotTier::kStored ? *disk_pool_ : *peer_pool_;
  asio::post(pool, [this, command, candidate] {
    Result<MemoryCopy> copy = Load(command.job, Generation(0), candidate, command.digest);
    if (copy.ok() && copy->info.bytes != command.bytes && command.bytes != 0) {
      copy = FailedPrecondition(fmt::format("{} bytes instead of {}", copy->info.bytes, command.bytes));
    }
    if (copy.ok()) {
      copy->info.tier = command.to;
      copy->info.server = options_.self;
    }
    if (copy.ok() && command.to == SnapshotTier::kStored) {
      const Status put = options_.store->Put(command.job, copy->info, copy->tensors, copy->region->bytes());
      if (!put.ok()) copy = put;
    }
    Post([this, command, copy = std::move(copy)]() mutable { CopyDone(command, std::move(copy)); });
  });
}

void SnapshotKeeper::Impl::CopyDone(const CopySnapshot& command, Result<MemoryCopy> copy) {
  const ShardState what{command.source.state, command.source.shard};
  if (!copy.ok()) {
    Perform(custody_.CopyFailed(command.job, what, command.to, ReasonOf(copy.status()), copy.status().message()));
    return;
  }
  const SnapshotInfo info = copy->info;
  if (command.to == SnapshotTier::kPeer) {
    peers_[{command.job, what}] = std::make_shared<const MemoryCopy>(std::move(*copy));
  }
  Perform(custody_.CopyMade(command.job, info));
}

void SnapshotKeeper::Impl::Do(const DeleteStored& effect) {
  if (options_.store == nullptr) return;
  // Behind every copy that was ordered before: this pool has one thread.
  asio::post(*disk_pool_, [this, effect] {
    const Status status = options_.store->Delete(effect.job, effect.what.state, effect.what.shard);
    if (status.ok()) return;
    Post([this, effect, status] {
      SnapshotInfo info;
      info.state = effect.what.state;
      info.shard = effect.what.shard;
      info.tier = SnapshotTier::kStored;
      info.server = options_.self;
      callbacks_.lost({effect.job, info, ReasonOf(status), "can't be deleted: " + status.message()}, {}, false);
    });
  });
}

// ---- providing to ranks

void SnapshotKeeper::Impl::Provide(const JobUid& job, Generation generation, std::vector<SnapshotSource> sources,
                                   std::function<void(Result<ProvidedSnapshot>)> done) {
  if (CellOf(job)->load() > generation.value) {
    stale_refused_.fetch_add(1);
    done(Aborted(fmt::format("generation {} is stale", generation.value)));
    return;
  }
  std::vector<Candidate> candidates;
  for (const SnapshotSource& source : sources) candidates.push_back(Resolve(job, source));
  if (!sources.empty()) {
    for (const SnapshotTier tier : {SnapshotTier::kPeer, SnapshotTier::kStaged, SnapshotTier::kStored}) {
      SnapshotSource own = sources.front();
      own.server = options_.self;
      own.tier = tier;
      const bool listed = std::any_of(sources.begin(), sources.end(), [&](const SnapshotSource& source) {
        return source.server == own.server && source.tier == own.tier && source.state == own.state &&
               source.shard == own.shard;
      });
      if (listed) continue;
      Candidate candidate = Resolve(job, own);
      if (candidate.local()) candidates.push_back(std::move(candidate));
    }
  }
  asio::post(*restore_pool_, [this, job, generation, candidates = std::move(candidates),
                              done = std::move(done)]() mutable {
    auto provided = std::make_shared<Result<ProvidedSnapshot>>(ProvideFrom(job, generation, candidates));
    Post([provided, done = std::move(done)] { done(std::move(*provided)); });
  });
}

Result<ProvidedSnapshot> SnapshotKeeper::Impl::ProvideFrom(const JobUid& job, Generation generation,
                                                           const std::vector<Candidate>& candidates) {
  Status last = NotFound("no source was named");
  std::string failures;
  for (const Candidate& candidate : candidates) {
    Result<MemoryCopy> copy = Load(job, generation, candidate, Digest128{});
    if (copy.ok()) {
      ProvidedSnapshot provided;
      provided.fd = copy->region->fd().Duplicate();
      if (!provided.fd.valid()) return ResourceExhausted("no file descriptor is left");
      provided.message.generation = generation;
      provided.message.state = copy->info.state;
      provided.message.bytes = copy->info.bytes;
      provided.message.digest = copy->info.digest;
      provided.message.tensors = std::move(copy->tensors);
      const ServerId& server = copy->info.server.empty() ? candidate.source.server : copy->info.server;
      provided.message.from = SourceText(server, copy->info.tier) + failures;
      return provided;
    }
    last = copy.status();
    if (last.code() == StatusCode::kAborted || last.code() == StatusCode::kCancelled) return last;
    if (failures.size() < 1000) {
      failures += fmt::format("; not {}: {}", SourceText(candidate.source.server, candidate.source.tier),
                              last.ToString());
    }
  }
  return candidates.size() > 1 ? Status(last.code(), fmt::format("no good copy{}", failures)) : last;
}

// ---- serving peers

void SnapshotKeeper::Impl::Open(const TransferRequest& request, std::function<void(OpenedTransfer)> done) {
  OpenedTransfer opened;
  const std::shared_ptr<GenerationCell> cell =
      generations_.contains(request.job) ? generations_.at(request.job) : std::make_shared<GenerationCell>(0);
  const uint64_t newest = cell->load();
  opened.response.generation = Generation(newest);
  if (request.generation.value != 0 && request.generation.value < newest) {
    stale_refused_.fetch_add(1);
    opened.response.status = Aborted(fmt::format("{} knows generation {}, not {}", options_.self.value, newest,
                                                 request.generation.value));
    return done(std::move(opened));
  }
  const ShardState what{request.state, request.shard};
  auto pin = std::make_shared<ServedBytes>(request.generation, cell);
  const auto fits = [&](const SnapshotInfo& info) {
    return request.digest == Digest128{} || info.digest == request.digest;
  };
  std::shared_ptr<const StagedCopy> staged = FindStaged(request.job, what);
  std::shared_ptr<const MemoryCopy> peer = FindPeer(request.job, what);
  const SnapshotInfo* stored = custody_.Find(request.job, what, SnapshotTier::kStored);
  const bool any = staged != nullptr || peer != nullptr || stored != nullptr;
  if (staged != nullptr && !fits(staged->info)) staged = nullptr;
  if (peer != nullptr && !fits(peer->info)) peer = nullptr;
  if (stored != nullptr && !fits(*stored)) stored = nullptr;
  // The tier that was asked for, else the nearest.
  if (request.tier == SnapshotTier::kStored && stored != nullptr) {
    staged = nullptr;
    peer = nullptr;
  }
  if (request.tier == SnapshotTier::kStaged && staged != nullptr) peer = nullptr;
  // A rank that lives may not have heard of the reader's generation, and may still step: what it staged is served
  // when it has. Copies that nothing can change (sealed, on disk, or of a reaped rank) are served at once, also by
  // servers that have no part in the job any more and so never hear; no number is taken from the reader.
  const bool early = request.generation.value > newest;
  if (early && staged != nullptr && !custody_.Gone(request.job, custody_.SlotOf(request.job, what).process)) {
    staged = nullptr;
    if (peer == nullptr && stored == nullptr) {
      opened.response.status = Unavailable(fmt::format("{} knows generation {}, not yet {}", options_.self.value,
                                                       newest, request.generation.value));
      return done(std::move(opened));
    }
  }
  if (peer != nullptr) {
    pin->memory = peer;
    opened.response.info = peer->info;
    opened.response.tensors = peer->tensors;
  } else if (staged != nullptr) {
    Result<std::shared_ptr<StagedView>> view = staged->reader->View(staged->slot);
    if (!view.ok()) {
      opened.response.status = view.status();
      return done(std::move(opened));
    }
    pin->staged = staged;
    pin->view = std::move(*view);
    opened.response.info = staged->info;
    opened.response.tensors = staged->tensors;
  } else if (stored != nullptr) {
    return OpenStored(request, std::move(pin), std::move(done));
  } else if (any) {
    opened.response.status = FailedPrecondition("the copies held here have another digest");
    return done(std::move(opened));
  } else {
    opened.response.status = NotFound(fmt::format("{} holds no copy of step {} of generation {}",
                                                  options_.self.value, request.state.step.value,
                                                  request.state.generation.value));
    return done(std::move(opened));
  }
  opened.pin = std::move(pin);
  done(std::move(opened));
}

void SnapshotKeeper::Impl::OpenStored(const TransferRequest& request, std::shared_ptr<ServedBytes> pin,
                                      std::function<void(OpenedTransfer)> done) {
  OpenedTransfer opened;
  opened.response.generation = request.generation;
  if (loads_ >= options_.loads_max) {
    opened.response.status = Unavailable("too many stored copies are being read");
    return done(std::move(opened));
  }
  ++loads_;
  asio::post(*load_pool_, [this, request, pin = std::move(pin), opened = std::move(opened),
                              done = std::move(done)]() mutable {
    Candidate candidate;
    candidate.source = {options_.self, SnapshotTier::kStored, "", request.state, request.shard};
    candidate.stored = true;
    Result<MemoryCopy> copy = Load(request.job, Generation(0), candidate, request.digest);
    opened.response.status = copy.status();
    if (copy.ok()) {
      opened.response.info = copy->info;
      opened.response.tensors = copy->tensors;
      pin->memory = std::make_shared<const MemoryCopy>(std::move(*copy));
      opened.pin = std::move(pin);
    }
    Post([this, opened = std::move(opened), done = std::move(done)]() mutable {
      --loads_;
      done(std::move(opened));
    });
  });
}

// ---- the public face

SnapshotKeeper::SnapshotKeeper(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SnapshotKeeper::~SnapshotKeeper() = default;

Result<std::unique_ptr<SnapshotKeeper>> SnapshotKeeper::Start(Options options, Callbacks callbacks) {
  auto impl = std::make_unique<Impl>(std::move(options), std::move(callbacks));
  EVERSTEP_RETURN_IF_ERROR(impl->Begin());
  return std::unique_ptr<SnapshotKeeper>(new SnapshotKeeper(std::move(impl)));
}

uint16_t SnapshotKeeper::transfer_port() const { return impl_->port(); }
std::vector<std::pair<JobUid, SnapshotInfo>> SnapshotKeeper::Held() const { return impl_->Held(); }
SnapshotKeeper::Counters SnapshotKeeper::counters() const { return impl_->counters(); }

void SnapshotKeeper::OnStaged(const JobUid& job, ProcessId process, UniqueFd staging, const SnapshotStaged& staged) {
  // A handler must be copyable for some executors: the descriptor travels in a shared cell.
  auto fd = std::make_shared<UniqueFd>(std::move(staging));
  impl_->Post([impl = impl_.get(), job, process, fd, staged] { impl->Staged(job, process, std::move(*fd), staged); });
}

void SnapshotKeeper::ProcessGone(const JobUid& job, ProcessId process) {
  impl_->Post([impl = impl_.get(), job, process] { impl->Perform(impl->custody().ProcessGone(job, process)); });
}

void SnapshotKeeper::FreeStaging(ProcessId process) {
  impl_->Post([impl = impl_.get(), process] { impl->FreeStagingOf(process); });
}

void SnapshotKeeper::Copy(const CopySnapshot& command) {
  impl_->Post([impl = impl_.get(), command] { impl->Perform(impl->custody().Copy(command)); });
}

void SnapshotKeeper::Drop(const DropSnapshots& command) {
  impl_->Post([impl = impl_.get(), command] { impl->Perform(impl->custody().Drop(command)); });
}

void SnapshotKeeper::ProtectedRaised(const JobUid& job, Step watermark) {
  impl_->Post([impl = impl_.get(), job, watermark] {
    impl->Perform(impl->custody().ProtectedRaised(job, watermark));
  });
}

void SnapshotKeeper::SetGeneration(const JobUid& job, Generation generation) {
  impl_->Post([impl = impl_.get(), job, generation] { impl->SetGeneration(job, generation); });
}

void SnapshotKeeper::Assigned(const JobUid& job, Generation generation, Step start) {
  impl_->Post([impl = impl_.get(), job, generation, start] {
    impl->SetGeneration(job, generation);
    impl->Perform(impl->custody().Assigned(job, generation, start));
  });
}

void SnapshotKeeper::ReleaseJob(const JobUid& job, bool keep_stored) {
  impl_->Post([impl = impl_.get(), job, keep_stored] { impl->Perform(impl->custody().Release(job, keep_stored)); });
}

void SnapshotKeeper::Observe(const Command& command) {
  if (const auto* fence = std::get_if<FenceProcesses>(&command)) {
    SetGeneration(fence->job, fence->generation);
  } else if (const auto* assign = std::get_if<AssignProcesses>(&command)) {
    Assigned(assign->assignment.job, assign->assignment.generation, assign->assignment.recovery_point.step);
  } else if (const auto* resume = std::get_if<ResumeProcesses>(&command)) {
    SetGeneration(resume->job, resume->generation);
    ProtectedRaised(resume->job, resume->protected_step);
  } else if (const auto* raised = std::get_if<ProtectedStepRaised>(&command)) {
    ProtectedRaised(raised->job, raised->step);
  } else if (const auto* copy = std::get_if<CopySnapshot>(&command)) {
    Copy(*copy);
  } else if (const auto* drop = std::get_if<DropSnapshots>(&command)) {
    Drop(*drop);
  } else if (const auto* release = std::get_if<everstep::ReleaseJob>(&command)) {
    ReleaseJob(release->job);
  }
}

void SnapshotKeeper::Provide(const JobUid& job, Generation generation, std::vector<SnapshotSource> sources,
                             std::function<void(Result<ProvidedSnapshot>)> done) {
  impl_->Post([impl = impl_.get(), job, generation, sources = std::move(sources), done = std::move(done)]() mutable {
    impl->Provide(job, generation, std::move(sources), std::move(done));
  });
}

}  // namespace everstep::checkpoint
