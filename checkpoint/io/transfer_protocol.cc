#include "checkpoint/io/transfer_protocol.h"

#include <fmt/format.h>

#include "checkpoint/store/record_codec.h"

namespace everstep::checkpoint {
namespace {

constexpr uint32_t kRequestMagic = 0x51535645;   // "EVSQ"
constexpr uint32_t kResponseMagic = 0x52535645;  // "EVSR"

std::string Framed(uint32_t magic, const std::string& body) {
  RecordWriter frame;
  frame.Put(magic);
  frame.Put(kTransferVersion);
  frame.Put(static_cast<uint32_t>(body.size()));
  return frame.Take() + body;
}

Result<size_t> DecodeFrame(std::string_view frame, uint32_t magic, size_t bytes_max) {
  RecordReader in(frame);
  if (in.Get<uint32_t>() != magic) return InvalidArgument("the other side does not speak this protocol");
  if (const auto version = in.Get<uint16_t>(); version != kTransferVersion) {
    return InvalidArgument(fmt::format("transfer protocol {}, this agent speaks {}", version, kTransferVersion));
  }
  const auto bytes = in.Get<uint32_t>();
  if (!in.AtEnd() || bytes < sizeof(uint64_t) || bytes > bytes_max) {
    return InvalidArgument(fmt::format("a transfer message of {} bytes, at most {}", bytes, bytes_max));
  }
  return size_t{bytes};
}

}  // namespace

std::string EncodeTransferRequest(const TransferRequest& request) {
  RecordWriter body;
  body.PutText(request.job.value);
  body.Put(request.generation.value);
  body.Put(request.state.step.value);
  body.Put(request.state.generation.value);
  body.Put(request.shard.value);
  body.Put(static_cast<uint8_t>(request.tier));
  body.PutDigest(request.digest);
  body.PutChecksum();
  return Framed(kRequestMagic, body.bytes());
}

std::string EncodeTransferResponse(const TransferResponse& response) {
  RecordWriter body;
  body.Put(static_cast<uint8_t>(response.status.code()));
  body.PutText(std::string_view(response.status.message()).substr(0, 1000));
  body.Put(response.generation.value);
  body.PutInfo(response.info);
  body.PutTensors(response.tensors);
  body.PutChecksum();
  return Framed(kResponseMagic, body.bytes());
}

Result<size_t> DecodeRequestFrame(std::string_view frame) {
  return DecodeFrame(frame, kRequestMagic, kTransferRequestBytesMax);
}
Result<size_t> DecodeResponseFrame(std::string_view frame) {
  return DecodeFrame(frame, kResponseMagic, kTransferResponseBytesMax);
}

Result<TransferRequest> DecodeRequestBody(std::string_view bytes) {
  const Result<std::string_view> body = CheckedBody(bytes);
  if (!body.ok()) return InvalidArgument(body.status().message());
  RecordReader in(*body);
  TransferRequest request;
  request.job = JobUid(in.GetText());
  request.generation = Generation(in.Get<uint64_t>());
  request.state.step = Step(in.Get<int64_t>());
  request.state.generation = Generation(in.Get<uint64_t>());
  request.shard = ShardIndex(in.Get<int32_t>());
  const auto tier = in.Get<uint8_t>();
  if (tier > static_cast<uint8_t>(SnapshotTier::kStored)) in.Fail();
  request.tier = static_cast<SnapshotTier>(tier);
  request.digest = in.GetDigest();
  if (!in.AtEnd() || request.job.empty()) return InvalidArgument("a transfer request contradicts itself");
  if (request.generation.value == 0 && request.digest == Digest128{}) {
    return InvalidArgument("a transfer request carries neither generation nor digest");
  }
  return request;
}

Result<TransferResponse> DecodeResponseBody(std::string_view bytes) {
  const Result<std::string_view> body = CheckedBody(bytes);
  if (!body.ok()) return InvalidArgument(body.status().message());
  RecordReader in(*body);
  TransferResponse response;
  const auto code = in.Get<uint8_t>();
  if (code > static_cast<uint8_t>(StatusCode::kDataLoss)) in.Fail();
  std::string message = in.GetText();
  if (code != 0) response.status = Status(static_cast<StatusCode>(code), std::move(message));
  response.generation = Generation(in.Get<uint64_t>());
  response.info = in.GetInfo();
  response.tensors = in.GetTensors();
  if (!in.AtEnd()) return InvalidArgument("a transfer response contradicts itself");
  if (response.status.ok()) EVERSTEP_RETURN_IF_ERROR(ValidateTensors(response.tensors, response.info.bytes));
  return response;
}

}  // namespace everstep::checkpoint
