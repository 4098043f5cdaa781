#include "checkpoint/store/record_codec.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "checkpoint/store/digest.h"

namespace everstep::checkpoint {
namespace {
constexpr uint32_t kManifestMagic = 0x4d535645;  // "EVSM"
constexpr uint16_t kManifestVersion = 1;
}  // namespace

void RecordWriter::PutText(std::string_view text) {
  Put(static_cast<uint32_t>(text.size()));
  bytes_.append(text);
}

void RecordWriter::PutDigest(const Digest128& digest) {
  Put(digest[0]);
  Put(digest[1]);
}

void RecordWriter::PutInfo(const SnapshotInfo& info) {
  Put(info.state.step.value);
  Put(info.state.generation.value);
  Put(info.shard.value);
  Put(static_cast<uint8_t>(info.tier));
  PutText(info.server.value);
  Put(info.bytes);
  PutDigest(info.digest);
}

void RecordWriter::PutTensors(const std::vector<TensorInfo>& tensors) {
  Put(static_cast<uint32_t>(tensors.size()));
  const auto put_numbers = [this](const std::vector<int64_t>& numbers) {
    Put(static_cast<uint8_t>(numbers.size()));
    for (const int64_t number : numbers) Put(number);
  };
  for (const TensorInfo& tensor : tensors) {
    PutText(tensor.name);
    PutText(tensor.dtype);
    put_numbers(tensor.global_shape);
    put_numbers(tensor.offsets);
    put_numbers(tensor.shape);
    Put(tensor.bytes);
    Put(tensor.buffer_offset);
  }
}

void RecordWriter::PutChecksum() { Put(static_cast<uint64_t>(XXH3_64bits(bytes_.data(), bytes_.size()))); }

std::string RecordReader::GetText() {
  const auto size = Get<uint32_t>();
  if (!ok_ || size > kRecordTextBytesMax || size > rest_.size()) return Fail(), std::string();
  std::string text(rest_.substr(0, size));
  rest_.remove_prefix(size);
  return text;
}

Digest128 RecordReader::GetDigest() {
  Digest128 digest{};
  digest[0] = Get<uint64_t>();
  digest[1] = Get<uint64_t>();
  return digest;
}

SnapshotInfo RecordReader::GetInfo() {
  SnapshotInfo info;
  info.state.step = Step(Get<int64_t>());
  info.state.generation = Generation(Get<uint64_t>());
  info.shard = ShardIndex(Get<int32_t>());
  const auto tier = Get<uint8_t>();
  if (tier > static_cast<uint8_t>(SnapshotTier::kStored)) Fail();
  info.tier = static_cast<SnapshotTier>(tier);
  info.server = ServerId(GetText());
  info.bytes = Get<uint64_t>();
  info.digest = GetDigest();
  return info;
}

std::vector<TensorInfo> RecordReader::GetTensors() {
  std::vector<TensorInfo> tensors;
  const auto count = Get<uint32_t>();
  if (!ok_ || count > kRecordTensorsMax) return Fail(), tensors;
  const auto get_numbers = [this] {
    std::vector<int64_t> numbers;
    const auto size = Get<uint8_t>();
    if (size > kRecordDimensionsMax) Fail();
    for (size_t i = 0; ok_ && i < size; ++i) numbers.push_back(Get<int64_t>());
    return numbers;
  };
  for (uint32_t i = 0; ok_ && i < count; ++i) {
    TensorInfo tensor;
    tensor.name = GetText();
    tensor.dtype = GetText();
    tensor.global_shape = get_numbers();
    tensor.offsets = get_numbers();
    tensor.shape = get_numbers();
    tensor.bytes = Get<uint64_t>();
    tensor.buffer_offset = Get<uint64_t>();
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

Result<std::string_view> CheckedBody(std::string_view record) {
  if (record.size() < sizeof(uint64_t)) return DataLoss("a record is too short");
  const std::string_view body = record.substr(0, record.size() - sizeof(uint64_t));
  RecordReader tail(record.substr(body.size()));
  if (tail.Get<uint64_t>() != XXH3_64bits(body.data(), body.size())) {
    return DataLoss("a record's checksum does not match");
  }
  return body;
}

Status ValidateTensors(const std::vector<TensorInfo>& tensors, uint64_t buffer_bytes) {
  if (tensors.size() > kRecordTensorsMax) {
    return InvalidArgument(fmt::format("{} tensors in one shard, at most {}", tensors.size(), kRecordTensorsMax));
  }
  for (const TensorInfo& tensor : tensors) {
    const auto bad = [&](std::string_view what) {
      return InvalidArgument(fmt::format("tensor {}: {}", tensor.name.substr(0, 200), what));
    };
    if (tensor.name.size() > kRecordTextBytesMax || tensor.dtype.size() > kRecordTextBytesMax) {
      return bad("its name or dtype is too long");
    }
    if (tensor.global_shape.size() > kRecordDimensionsMax || tensor.offsets.size() > kRecordDimensionsMax ||
        tensor.shape.size() > kRecordDimensionsMax) {
      return bad("too many dimensions");
    }
    if (tensor.buffer_offset > buffer_bytes || tensor.bytes > buffer_bytes - tensor.buffer_offset) {
      return bad(fmt::format("bytes [{}, +{}) lie outside the buffer of {}", tensor.buffer_offset, tensor.bytes,
                             buffer_bytes));
    }
  }
  return OkStatus();
}

std::string EncodeManifest(const ShardManifest& manifest) {
  RecordWriter out;
  out.Put(kManifestMagic);
  out.Put(kManifestVersion);
  out.PutInfo(manifest.info);
  out.PutTensors(manifest.tensors);
  out.Put(static_cast<uint32_t>(manifest.chunks.size()));
  for (const ChunkName& chunk : manifest.chunks) {
    out.Put(chunk.birth.value);
    out.PutDigest(chunk.hash);
    out.Put(chunk.bytes);
  }
  out.PutChecksum();
  return out.Take();
}

Result<ShardManifest> DecodeManifest(std::string_view record) {
  EVERSTEP_ASSIGN_OR_RETURN(const std::string_view body, CheckedBody(record));
  RecordReader in(body);
  if (in.Get<uint32_t>() != kManifestMagic) return DataLoss("not a manifest");
  if (const auto version = in.Get<uint16_t>(); version != kManifestVersion) {
    return DataLoss(fmt::format("manifest of format {}, this build reads {}", version, kManifestVersion));
  }
  ShardManifest manifest;
  manifest.info = in.GetInfo();
  manifest.tensors = in.GetTensors();
  const auto count = in.Get<uint32_t>();
  if (count > kRecordChunksMax) in.Fail();
  uint64_t total = 0;
  for (uint32_t i = 0; in.ok() && i < count; ++i) {
    ChunkName chunk;
    chunk.birth = Epoch(in.Get<uint64_t>());
    chunk.hash = in.GetDigest();
    chunk.bytes = in.Get<uint64_t>();
    if (chunk.bytes == 0 || chunk.bytes > kChunkBytes) in.Fail();
    total += chunk.bytes;
    manifest.chunks.push_back(chunk);
  }
  if (!in.AtEnd() || total != manifest.info.bytes) return DataLoss("a manifest contradicts itself");
  if (Status tensors = ValidateTensors(manifest.tensors, manifest.info.bytes); !tensors.ok()) {
    return DataLoss(tensors.message());
  }
  return manifest;
}

}  // namespace everstep::checkpoint
