// What the training thread does inside Join: connect, restore, serve, compare.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "worker/client/session_impl.h"
#include "worker/collective/host/host_communicator.h"

namespace everstep {
namespace {

using collective::DataType;

constexpr size_t kTransferChunkBytes = 1u << 20;
constexpr uint64_t kTransferMagic = 0x3154415453455645u;  // "EVESTAT1"
constexpr uint64_t kDpGroupFirst = 1u << 8;   // group ids of the session: one per shard ...
constexpr uint64_t kPpGroupFirst = 1u << 24;  // ... and one per replica

// Goes before the tensors of a live copy, so that two programs that differ never mix their bytes.
struct TransferHeader {
  uint64_t magic;
  int64_t state_step;
  uint64_t state_generation;
  uint64_t state_bytes;
  Digest128 description;
};
static_assert(std::is_trivially_copyable_v<TransferHeader> && sizeof(TransferHeader) == 48);

// What each rank says before anybody resumes.
struct DigestRecord {
  int32_t shard;
  int32_t rank;
  int64_t state_step;
  uint64_t state_generation;
  uint64_t data_position;
  Digest128 digest;
};
static_assert(std::is_trivially_copyable_v<DigestRecord> && sizeof(DigestRecord) == 48);

class Mapping {
 public:
  Mapping(int fd, uint64_t bytes) {
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) < bytes) return;
    if (bytes == 0) return;
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) bytes_ = {static_cast<const std::byte*>(mapped), bytes};
  }
  ~Mapping() {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace

bool Session::Impl::Left(Generation generation) const { return left_generation_.load() >= generation.value; }

session::Event Session::Impl::Failed(Generation generation, const Status& status, Rank suspect) const {
  return session::WorkFailed{generation, suspect, status};
}

session::Event Session::Impl::OfProgram(Generation generation, const Status& status) const {
  return session::WorkFailed{generation, Rank(-1), status, true};
}

Status Session::Impl::LayOut() {
  if (!layout) return OkStatus();
  return layout(assignment_, assignment_.ranks[static_cast<size_t>(rank_.value)]);
}

session::Event Session::Impl::Do(const session::ConnectMesh& work) {
  const Generation generation = work.assignment.generation;
  // In this order: groups lean on the world they came from.
  dp_group.reset();
  pp_group.reset();
  world.reset();
  assignment_ = work.assignment;
  rank_ = work.rank;
  const RestoreAction action = assignment_.ranks[static_cast<size_t>(rank_.value)].action;
  if (action == RestoreAction::kKeep || action == RestoreAction::kRollForward) {
    if (const Status status = LayOut(); !status.ok()) return OfProgram(generation, status);
  }
  if (const Status status = Connect(assignment_, rank_); !status.ok()) {
    const Rank suspect = world ? world->Suspect() : Rank(-1);
    return Failed(generation, status, suspect);
  }
  return session::MeshConnected{generation};
}

Status Session::Impl::Connect(const Assignment& assignment, Rank rank) {
  const auto abort = std::make_shared<collective::AbortSource>();
  {
    const std::lock_guard lock(mutex_);
    connect_abort_ = abort;
    connect_generation_ = assignment.generation;
    if (assignment.generation <= aborted_) return Aborted("the generation is over");
  }
  collective::MeshOptions options;
  options.job_uid = assignment.job;
  options.generation = assignment.generation;
  std::memcpy(options.token.data(), assignment.token.data(), options.token.size());
  options.rank = rank;
  for (const RankAssignment& r : assignment.ranks) options.addresses.push_back(r.mesh_address);
  options.listener = listener_;
  options.deadline = options_.connect_timeout;
  options.operation_timeout = options_.operation_timeout;
  options.abort = abort.get();
  // The chains along which state is copied, and the neighbours of each pipeline; the same list everywhere.
  std::map<Rank, Rank> chain_end;
  for (const RankAssignment& r : assignment.ranks) {
    if (r.action != RestoreAction::kFetchFromRank) continue;
    const auto [end, first] = chain_end.try_emplace(r.source_rank, r.source_rank);
    options.extra_links.emplace_back(end->second, r.rank);
    end->second = r.rank;
  }
  for (const RankAssignment& a : assignment.ranks) {
    for (const RankAssignment& b : assignment.ranks) {
      if (b.dp == a.dp && b.tp == a.tp && b.pp == a.pp + 1) options.extra_links.emplace_back(a.rank, b.rank);
    }
  }
  EVERSTEP_ASSIGN_OR_RETURN(std::shared_ptr<collective::Communicator> connected, collective::ConnectMesh(options));
  std::vector<Rank> ranks;
  for (const RankAssignment& r : assignment.ranks) ranks.push_back(r.rank);
  world = std::make_shared<client::TrackedCommunicator>(this, std::move(connected), std::move(ranks));
  return CreateGroups(assignment, rank);
}

Status Session::Impl::CreateGroups(const Assignment& assignment, Rank rank) {
  const RankAssignment& me = assignment.ranks[static_cast<size_t>(rank.value)];
  const auto create = [&](auto is_member, auto order, uint64_t id) -> Result<std::shared_ptr<client::TrackedCommunicator>> {
    std::vector<const RankAssignment*> members;
    for (const RankAssignment& r : assignment.ranks) {
      if (is_member(r)) members.push_back(&r);
    }
    std::stable_sort(members.begin(), members.end(), [&](const auto* a, const auto* b) { return order(*a) < order(*b); });
    std::vector<Rank> ranks;
    for (const RankAssignment* member : members) ranks.push_back(member->rank);
    const bool all = ranks.size() == assignment.ranks.size() && std::is_sorted(ranks.begin(), ranks.end());
    if (all) return world;  // the same ranks in the same order
    EVERSTEP_ASSIGN_OR_RETURN(std::shared_ptr<collective::Communicator> group,
                              world->inner().CreateGroup(ranks, collective::GroupId(id)));
    return std::make_shared<client::TrackedCommunicator>(this, std::move(group), std::move(ranks));
  };
  EVERSTEP_ASSIGN_OR_RETURN(
      dp_group, create([&](const RankAssignment& r) { return r.pp == me.pp && r.tp == me.tp; },
                       [](const RankAssignment& r) { return r.dp; },
                       kDpGroupFirst + static_cast<uint64_t>(me.pp * assignment.tp_size + me.tp)));
  EVERSTEP_ASSIGN_OR_RETURN(
      pp_group, create([&](const RankAssignment& r) { return r.dp == me.dp && r.tp == me.tp; },
                       [](const RankAssignment& r) { return r.pp; },
                       kPpGroupFirst + static_cast<uint64_t>(me.dp * assignment.tp_size + me.tp)));
  return OkStatus();
}

session::Event Session::Impl::Do(const session::RollForward& work) {
  if (!apply) return OfProgram(work.generation, FailedPrecondition("rolling forward needs SetApply"));
  if (const Status status = apply(work.step); !status.ok()) return OfProgram(work.generation, status);
  return session::RolledForward{work.generation};
}

session::Event Session::Impl::Do(const session::InitializeState& work) {
  if (const Status status = LayOut(); !status.ok()) return OfProgram(work.generation, status);
  if (initialize) {
    if (const Status status = initialize(); !status.ok()) return OfProgram(work.generation, status);
  }
  return session::RestoreDone{work.generation, 0};
}

session::Event Session::Impl::Do(const session::ReceiveState& work) {
  if (const Status status = LayOut(); !status.ok()) return OfProgram(work.generation, status);
  const auto me = std::find(work.chain.begin(), work.chain.end(), rank_);
  EVERSTEP_CHECK(me != work.chain.end());
  const Rank from = me == work.chain.begin() ? work.source : *std::prev(me);
  const std::optional<Rank> next = std::next(me) == work.chain.end() ? std::nullopt : std::optional(*std::next(me));
  collective::Communicator& mesh = world->inner();
  const auto failed = [&](const Status& status) { return Failed(work.generation, status, world->Suspect()); };

  TransferHeader header{};
  if (const Status s = mesh.Receive(&header, sizeof header, DataType::kU8, from); !s.ok()) return failed(s);
  if (next) {
    if (const Status s = mesh.Send(&header, sizeof header, DataType::kU8, *next); !s.ok()) return failed(s);
  }
  const StateId state{Step(header.state_step), Generation(header.state_generation)};
  if (header.magic != kTransferMagic || state != assignment_.recovery_point) {
    return failed(DataLoss("rank " + std::to_string(work.source.value) + " serves another state"));
  }
  if (header.description != registry.DescriptionDigest() || header.state_bytes != registry.state_bytes()) {
    return failed(InvalidArgument("the registered tensors differ from those of rank " + std::to_string(work.source.value)));
  }
  for (const client::RegisteredTensor& tensor : registry.Tensors()) {
    for (uint64_t at = 0; at < tensor.info.bytes; at += kTransferChunkBytes) {
      const size_t count = std::min<uint64_t>(kTransferChunkBytes, tensor.info.bytes - at);
      if (const Status s = mesh.Receive(tensor.data + at, count, DataType::kU8, from); !s.ok()) return failed(s);
      if (next) {
        if (const Status s = mesh.Send(tensor.data + at, count, DataType::kU8, *next); !s.ok()) return failed(s);
      }
    }
  }
  return session::RestoreDone{work.generation, registry.state_bytes()};
}

session::Event Session::Impl::Do(const session::ServeState& work) {
  const Rank to = work.chain.front();
  collective::Communicator& mesh = world->inner();
  const auto failed = [&](const Status& status) { return Failed(work.generation, status, world->Suspect()); };
  const TransferHeader header{kTransferMagic, assignment_.recovery_point.step.value,
                              assignment_.recovery_point.generation.value, registry.state_bytes(),
                              registry.DescriptionDigest()};
  if (const Status s = mesh.Send(&header, sizeof header, DataType::kU8, to); !s.ok()) return failed(s);
  for (const client::RegisteredTensor& tensor : registry.Tensors()) {
    for (uint64_t at = 0; at < tensor.info.bytes; at += kTransferChunkBytes) {
      const size_t count = std::min<uint64_t>(kTransferChunkBytes, tensor.info.bytes - at);
      if (const Status s = mesh.Send(tensor.data + at, count, DataType::kU8, to); !s.ok()) return failed(s);
    }
  }
  return session::ServeDone{work.generation};
}

session::Event Session::Impl::Do(const session::CopySnapshot& work) {
  const SnapshotProvided& snapshot = work.snapshot;
  int fd = -1;
  {
    const std::lock_guard lock(mutex_);
    fd = std::exchange(work_fd_, -1);
  }
  const Mapping mapping(fd, snapshot.bytes);
  if (fd >= 0) close(fd);
  if (const Status status = LayOut(); !status.ok()) return OfProgram(snapshot.generation, status);
  if (mapping.bytes().size() != snapshot.bytes) {
    return Failed(snapshot.generation, DataLoss("the snapshot's file is shorter than its " +
                                                std::to_string(snapshot.bytes) + " bytes"));
  }
  const auto left = [this, generation = snapshot.generation] { return Left(generation); };
  Digest128 digest{};
  if (!client::DigestOf(mapping.bytes(), left, digest)) return Failed(snapshot.generation, Aborted("the generation is over"));
  if (digest != snapshot.digest) {
    return Failed(snapshot.generation, DataLoss("the bytes of the snapshot from " + snapshot.from +
                                                " do not match their digest"));
  }
  if (const Status status = registry.CopyFrom(mapping.bytes(), snapshot.tensors, left); !status.ok()) {
    return Failed(snapshot.generation, status);
  }
  return session::RestoreDone{snapshot.generation, registry.state_bytes()};
}

session::Event Session::Impl::Do(const session::ExchangeDigests& work) {
  DigestRecord mine{};
  mine.shard = assignment_.ranks[static_cast<size_t>(rank_.value)].shard().value;
  mine.rank = rank_.value;
  mine.state_step = work.state.step.value;
  mine.state_generation = work.state.generation.value;
  mine.data_position = data_position ? data_position() : static_cast<uint64_t>(work.state.step.value);
  mine.digest = registry.Digest();
  std::vector<DigestRecord> all(assignment_.ranks.size());
  if (const Status s = world->inner().AllGather(&mine, all.data(), sizeof mine, DataType::kU8); !s.ok()) {
    return Failed(work.generation, s, world->Suspect());
  }
  const auto differ = [&](const DigestRecord& other, const std::string& what) {
    return session::DigestsDiffer{work.generation, "ranks " + std::to_string(rank_.value) + " and " +
                                                       std::to_string(other.rank) + " differ in " + what};
  };
  for (const DigestRecord& other : all) {
    if (other.state_step != mine.state_step || other.state_generation != mine.state_generation) {
      return differ(other, "their state id");
    }
    if (other.data_position != mine.data_position) return differ(other, "their data position");
  }
  // Every rank looks at all shards, so that all of them come to the same verdict.
  std::map<int32_t, const DigestRecord*> first;
  for (const DigestRecord& record : all) {
    const auto [replica, is_new] = first.try_emplace(record.shard, &record);
    if (is_new || replica->second->digest == record.digest) continue;
    return session::DigestsDiffer{work.generation, "ranks " + std::to_string(replica->second->rank) + " and " +
                                                       std::to_string(record.rank) + " hold different bytes of shard " +
                                                       std::to_string(record.shard)};
  }
  return session::DigestsAgreed{work.generation, mine.digest};
}

Membership Session::Impl::MembershipLocked() const {
  const Assignment& a = core_.assignment();
  const RankAssignment& r = a.ranks[static_cast<size_t>(core_.rank().value)];
  Membership m;
  m.generation = a.generation;
  m.rank = r.rank;
  m.world_size = static_cast<int32_t>(a.ranks.size());
  m.dp = r.dp;
  m.tp = r.tp;
  m.pp = r.pp;
  m.dp_size = a.dp_size;
  m.tp_size = a.tp_size;
  m.pp_size = a.pp_size;
  m.local_rank = r.local_rank;
  m.micro_batch_first = r.micro_batch_first;
  m.micro_batch_count = r.micro_batch_count;
  m.micro_batch_total = a.micro_batch_count;
  m.state = core_.progress().applied;
  m.next_step = m.state.step.Next();
  m.restored = r.action;
  m.restored_from = core_.restored_from();
  m.bytes_restored = core_.bytes_restored();
  return m;
}

}  // namespace everstep
