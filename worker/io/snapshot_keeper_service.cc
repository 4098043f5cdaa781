#include "worker/io/snapshot_keeper_service.h"

#include <fcntl.h>

#include <filesystem>
#include <map>
#include <system_error>

#include <fmt/format.h>

#include "checkpoint/io/snapshot_keeper.h"
#include "checkpoint/store/rocksdb_store.h"

namespace everstep {
namespace {

class SnapshotKeeperService final : public SnapshotService {
 public:
  SnapshotKeeperService(Handler handler, std::string host) : handler_(std::move(handler)), host_(std::move(host)) {}

  Status Start(const SnapshotKeeperServiceOptions& options) {
    EVERSTEP_RETURN_IF_ERROR(OpenStore(options.store_directory));
    checkpoint::SnapshotKeeper::Options keeper;
    keeper.self = options.server;
    keeper.transfer_address = fmt::format("{}:0", options.host);
    keeper.store = store_.get();
    keeper.limits.peer_bytes_max = options.peer_bytes_max;
    checkpoint::SnapshotKeeper::Callbacks callbacks;
    callbacks.held = [this](const SnapshotHeld& fact, checkpoint::StagedSlot) { handler_.on_fact(fact); };
    callbacks.lost = [this](const SnapshotLost& fact, checkpoint::StagedSlot, bool) { handler_.on_fact(fact); };
    EVERSTEP_ASSIGN_OR_RETURN(keeper_, checkpoint::SnapshotKeeper::Start(std::move(keeper), std::move(callbacks)));
    return OkStatus();
  }

  void AddStaging(const JobUid&, ProcessId process, UniqueFd staging) override {
    staging_[process] = std::move(staging);
  }

  void Staged(const JobUid& job, ProcessId process, const SnapshotStaged& staged) override {
    checkpoint::UniqueFd descriptor;
    if (const auto found = staging_.find(process); found != staging_.end()) {
      descriptor = checkpoint::UniqueFd(fcntl(found->second.get(), F_DUPFD_CLOEXEC, 0));
    }
    keeper_->OnStaged(job, process, std::move(descriptor), staged);
  }

  void Load(const JobUid& job, ProcessId process, const SnapshotWanted& wanted) override {
    keeper_->Provide(job, wanted.generation, {wanted.source},
                     [this, process, wanted](Result<checkpoint::ProvidedSnapshot> provided) {
                       if (!provided.ok()) {
                         handler_.on_load_failed(process, {wanted.generation, provided.status().code(),
                                                           provided.status().message()});
                         return;
                       }
                       handler_.on_loaded(process, provided->message, UniqueFd(provided->fd.Release()));
                     });
  }

  void Copy(const CopySnapshot& command) override { keeper_->Copy(command); }
  void Drop(const DropSnapshots& command) override { keeper_->Drop(command); }
  void RaiseProtected(const JobUid& job, Step step) override { keeper_->ProtectedRaised(job, step); }
  void NoteGeneration(const JobUid& job, Generation generation) override { keeper_->SetGeneration(job, generation); }
  void NoteAssigned(const JobUid& job, Generation generation, Step start) override {
    keeper_->Assigned(job, generation, start);
  }
  void ProcessGone(const JobUid& job, ProcessId process) override {
    staging_.erase(process);  // the keeper has its own
    keeper_->ProcessGone(job, process);
  }
  void Release(const JobUid& job) override { keeper_->ReleaseJob(job); }

  std::vector<std::pair<JobUid, SnapshotInfo>> Held() override { return keeper_->Held(); }
  std::string transfer_address() const override { return fmt::format("{}:{}", host_, keeper_->transfer_port()); }

 private:
  // A disk that is full or damaged must not keep a server from training: it goes on with an empty store, or without
  // one, and says so. A directory that is locked or forbidden is a mistake of whoever started us, and refused.
  Status OpenStore(const std::string& directory) {
    auto opened = checkpoint::RocksDbStore::Open(directory);
    if (opened.status().code() == StatusCode::kDataLoss) {
      const std::string aside = directory + ".damaged";
      const std::string message = opened.status().message() + "; moved to " + aside;
      std::error_code error;
      std::filesystem::remove_all(aside, error);  // one is kept, for whoever wants to look
      std::filesystem::rename(directory, aside, error);
      if (error) return opened.status();
      handler_.on_fact(StorageTroubled{Reason::kStorageCorrupt, message});
      opened = checkpoint::RocksDbStore::Open(directory);
    }
    if (opened.ok()) {
      store_ = std::move(*opened);
      return OkStatus();
    }
    const StatusCode code = opened.status().code();
    if (code != StatusCode::kResourceExhausted && code != StatusCode::kUnavailable) return opened.status();
    handler_.on_fact(StorageTroubled{
        code == StatusCode::kResourceExhausted ? Reason::kStorageFull : Reason::kStorageFailed,
        opened.status().message() + "; this server stores no snapshots until it is started again"});
    return OkStatus();
  }

  const Handler handler_;
  const std::string host_;
  std::map<ProcessId, UniqueFd> staging_;               // of processes that live; the agent's loop only
  std::unique_ptr<checkpoint::RocksDbStore> store_;
  std::unique_ptr<checkpoint::SnapshotKeeper> keeper_;  // after the store: it stops first
};

}  // namespace

Result<std::unique_ptr<SnapshotService>> MakeSnapshotKeeperService(const SnapshotKeeperServiceOptions& options,
                                                                   SnapshotService::Handler handler) {
  auto service = std::make_unique<SnapshotKeeperService>(std::move(handler), options.host);
  EVERSTEP_RETURN_IF_ERROR(service->Start(options));
  return std::unique_ptr<SnapshotService>(std::move(service));
}

}  // namespace everstep
