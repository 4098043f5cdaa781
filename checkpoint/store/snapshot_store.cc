#include "checkpoint/store/snapshot_store.h"

#include <fmt/format.h>

#include "checkpoint/store/digest.h"
#include "checkpoint/store/record_codec.h"

namespace everstep::checkpoint {

Result<std::pair<StoredSnapshot, std::vector<std::byte>>> SnapshotStore::Get(const JobUid& job, StateId state,
                                                                             ShardIndex shard) {
  EVERSTEP_ASSIGN_OR_RETURN(StoredSnapshot found, Find(job, state, shard));
  std::vector<std::byte> bytes(found.info.bytes);
  EVERSTEP_RETURN_IF_ERROR(Read(job, state, shard, bytes));
  return std::pair(std::move(found), std::move(bytes));
}

Status ValidatePut(const JobUid& job, const SnapshotInfo& info, const std::vector<TensorInfo>& tensors,
                   std::span<const std::byte> bytes) {
  if (job.empty() || job.value.size() > kRecordTextBytesMax) return InvalidArgument("a job uid is empty or too long");
  if (info.server.value.size() > kRecordTextBytesMax) return InvalidArgument("a server's name is too long");
  if (info.bytes != bytes.size()) {
    return InvalidArgument(fmt::format("{} bytes given, the snapshot says {}", bytes.size(), info.bytes));
  }
  if ((bytes.size() + kChunkBytes - 1) / kChunkBytes > kRecordChunksMax) {
    return ResourceExhausted(fmt::format("a snapshot of {} bytes is too large for one shard", bytes.size()));
  }
  EVERSTEP_RETURN_IF_ERROR(ValidateTensors(tensors, info.bytes));
  if (DigestOf(bytes) != info.digest) return InvalidArgument("the bytes do not have the digest that the snapshot says");
  return OkStatus();
}

}  // namespace everstep::checkpoint
