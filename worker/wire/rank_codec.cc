#include "worker/wire/rank_codec.h"

#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace everstep {
namespace {

static_assert(std::endian::native == std::endian::little, "the codec copies integers as they are");

template <typename T>
struct LimitOf {};
template <>
struct LimitOf<int64_t> { static constexpr size_t kCount = kWireDimensionsMax, kBytesMin = 8; };
template <>
struct LimitOf<TensorInfo> { static constexpr size_t kCount = kWireTensorsMax, kBytesMin = 36; };
template <>
struct LimitOf<RankAssignment> { static constexpr size_t kCount = kWireRanksMax, kBytesMin = 57; };
template <>
struct LimitOf<SnapshotSource> { static constexpr size_t kCount = kWireSourcesMax, kBytesMin = 29; };

// The greatest known value of each enum on the wire.
constexpr uint64_t LastOf(RestoreAction) { return static_cast<uint64_t>(RestoreAction::kFetchFromSnapshot); }
constexpr uint64_t LastOf(SnapshotTier) { return static_cast<uint64_t>(SnapshotTier::kStored); }
constexpr uint64_t LastOf(StatusCode) { return static_cast<uint64_t>(StatusCode::kDataLoss); }

// Both archives offer operator()(fields...), so that each struct lists its fields once (Fields below).
class Writer {
 public:
  template <typename... T>
  void operator()(const T&... fields) { (Put(fields), ...); }
  std::string Take() && {
    const size_t length = out_.size() - kFrameHeaderBytes;
    if (overflowed_ || length > kFrameBytesMax) return {};
    const auto length32 = static_cast<uint32_t>(length);
    std::memcpy(out_.data(), &length32, sizeof length32);
    return std::move(out_);
  }

 private:
  template <typename T>
  void Put(const T& field);
  void Raw(const void* bytes, size_t count) { out_.append(static_cast<const char*>(bytes), count); }
  void PutCount(size_t count, size_t max) {
    if (count > max) overflowed_ = true;
    const auto count32 = static_cast<uint32_t>(count);
    Raw(&count32, sizeof count32);
  }

  std::string out_ = std::string(kFrameHeaderBytes, '\0');
  bool overflowed_ = false;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <typename... T>
  void operator()(T&... fields) { (Get(fields), ...); }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && in_.empty(); }

 private:
  template <typename T>
  void Get(T& field);
  void Raw(void* bytes, size_t count) {
    if (!ok_ || in_.size() < count) {
      ok_ = false;
      return;
    }
    std::memcpy(bytes, in_.data(), count);
    in_.remove_prefix(count);
  }
  // 0 when refused.
  size_t GetCount(size_t max, size_t bytes_min) {
    uint32_t count = 0;
    Raw(&count, sizeof count);
    if (!ok_ || count > max || count > in_.size() / bytes_min) {
      ok_ = false;
      return 0;
    }
    return count;
  }

  std::string_view in_;
  bool ok_ = true;
};

template <typename M, typename T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

template <typename A, Is<StateId> M>
void Fields(A& a, M& m) { a(m.step, m.generation); }
template <typename A, Is<RankReport> M>
void Fields(A& a, M& m) { a(m.memory_valid, m.applied, m.gradients); }
template <typename A, Is<TensorInfo> M>
void Fields(A& a, M& m) { a(m.name, m.dtype, m.global_shape, m.offsets, m.shape, m.bytes, m.buffer_offset); }
template <typename A, Is<SnapshotSource> M>
void Fields(A& a, M& m) { a(m.server, m.tier, m.transfer_address, m.state, m.shard); }
template <typename A, Is<RankAssignment> M>
void Fields(A& a, M& m) {
  a(m.rank, m.server, m.device, m.process, m.dp, m.tp, m.pp, m.local_rank, m.micro_batch_first, m.micro_batch_count,
    m.mesh_address, m.action, m.source_rank, m.sources);
}
template <typename A, Is<Assignment> M>
void Fields(A& a, M& m) {
  a(m.job, m.job_name, m.generation, m.recovery_point, m.token, m.dp_size, m.tp_size, m.pp_size, m.micro_batch_count,
    m.ranks);
}

template <typename A, Is<RankHello> M>
void Fields(A& a, M& m) { a(m.protocol_version, m.process, m.pid, m.mesh_address); }
template <typename A, Is<RankJoin> M>
void Fields(A&, M&) {}
template <typename A, Is<CollectAnswer> M>
void Fields(A& a, M& m) { a(m.generation, m.report, m.planned); }
template <typename A, Is<RankConnected> M>
void Fields(A& a, M& m) { a(m.generation); }
template <typename A, Is<RankReady> M>
void Fields(A& a, M& m) { a(m.generation, m.shard_digest, m.bytes_restored, m.restored_from); }
template <typename A, Is<RankFailed> M>
void Fields(A& a, M& m) { a(m.generation, m.suspect, m.code, m.message); }
template <typename A, Is<SnapshotStaged> M>
void Fields(A& a, M& m) { a(m.state, m.shard, m.slot, m.bytes, m.tensors); }
template <typename A, Is<SnapshotWanted> M>
void Fields(A& a, M& m) { a(m.generation, m.source); }
template <typename A, Is<MetricReported> M>
void Fields(A& a, M& m) { a(m.step, m.name, m.value); }
template <typename A, Is<RankFinished> M>
void Fields(A&, M&) {}

template <typename A, Is<HelloAccepted> M>
void Fields(A& a, M& m) { a(m.staging_bytes_max); }
template <typename A, Is<HelloRefused> M>
void Fields(A& a, M& m) { a(m.message); }
template <typename A, Is<FenceRank> M>
void Fields(A& a, M& m) { a(m.generation); }
template <typename A, Is<PrepareSwitch> M>
void Fields(A& a, M& m) { a(m.generation); }
template <typename A, Is<AssignRank> M>
void Fields(A& a, M& m) { a(m.assignment, m.rank); }
template <typename A, Is<ResumeRank> M>
void Fields(A& a, M& m) { a(m.generation, m.protected_step); }
template <typename A, Is<SnapshotProtected> M>
void Fields(A& a, M& m) { a(m.step); }
template <typename A, Is<SnapshotProvided> M>
void Fields(A& a, M& m) { a(m.generation, m.state, m.bytes, m.digest, m.tensors, m.from); }
template <typename A, Is<SnapshotUnavailable> M>
void Fields(A& a, M& m) { a(m.generation, m.code, m.message); }
template <typename A, Is<StopRank> M>
void Fields(A& a, M& m) { a(m.message); }

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};
template <typename T>
struct IsArray : std::false_type {};
template <typename T, size_t N>
struct IsArray<std::array<T, N>> : std::true_type {};
template <typename T>
concept Named = requires(const T& t) { { t.value } -> std::same_as<const std::string&>; { t.empty() }; };
template <typename T>
concept Numbered = requires { typename T::value_type; requires std::is_integral_v<typename T::value_type>;
                              requires std::is_same_v<decltype(T::value), typename T::value_type>; };

template <typename T>
void Writer::Put(const T& field) {
  if constexpr (std::is_same_v<T, bool>) {
    const uint8_t byte = field ? 1 : 0;
    Raw(&byte, 1);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
    Raw(&field, sizeof field);
  } else if constexpr (std::is_same_v<T, std::string>) {
    PutCount(field.size(), kWireStringBytesMax);
    Raw(field.data(), field.size());
  } else if constexpr (IsVector<T>::value) {
    PutCount(field.size(), LimitOf<typename T::value_type>::kCount);
    for (const auto& element : field) Put(element);
  } else if constexpr (IsArray<T>::value) {
    Raw(field.data(), sizeof field);
  } else if constexpr (Numbered<T> || Named<T>) {
    Put(field.value);
  } else {
    Fields(*this, field);
  }
}

template <typename T>
void Reader::Get(T& field) {
  if constexpr (std::is_same_v<T, bool>) {
    uint8_t byte = 0;
    Raw(&byte, 1);
    if (byte > 1) ok_ = false;
    field = byte == 1;
  } else if constexpr (std::is_enum_v<T>) {
    std::underlying_type_t<T> value{};
    Raw(&value, sizeof value);
    if (static_cast<uint64_t>(value) > LastOf(T{})) {
      ok_ = false;
      return;
    }
    field = static_cast<T>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    Raw(&field, sizeof field);
  } else if constexpr (std::is_same_v<T, std::string>) {
    const size_t count = GetCount(kWireStringBytesMax, 1);
    if (!ok_) return;
    field.assign(in_.substr(0, count));
    in_.remove_prefix(count);
  } else if constexpr (IsVector<T>::value) {
    using Element = typename T::value_type;
    const size_t count = GetCount(LimitOf<Element>::kCount, LimitOf<Element>::kBytesMin);
    if (!ok_) return;
    field.resize(count);
    for (auto& element : field) {
      Get(element);
      if (!ok_) return;
    }
  } else if constexpr (IsArray<T>::value) {
    Raw(field.data(), sizeof field);
  } else if constexpr (Numbered<T> || Named<T>) {
    Get(field.value);
  } else {
    Fields(*this, field);
  }
}

// Types number the alternatives of a variant from `kFirst` on.
template <typename Message, uint16_t kFirst>
std::string Encode(const Message& message) {
  Writer writer;
  writer(static_cast<uint16_t>(kFirst + message.index()));
  std::visit([&writer](const auto& m) { writer(m); }, message);
  return std::move(writer).Take();
}

template <typename Message, size_t kIndex>
bool DecodeAlternative(Reader& reader, Message& out) {
  reader(out.template emplace<kIndex>());
  return reader.done();
}

template <typename Message, uint16_t kFirst, size_t... kIndexes>
Result<Message> Decode(std::string_view frame, std::index_sequence<kIndexes...>) {
  if (frame.size() > kFrameBytesMax) return InvalidArgument("a frame exceeds its limit");
  uint16_t type = 0;
  if (frame.size() < sizeof type) return InvalidArgument("a frame is shorter than its type");
  std::memcpy(&type, frame.data(), sizeof type);
  if (type < kFirst || type >= kFirst + sizeof...(kIndexes)) {
    return InvalidArgument("unknown frame type " + std::to_string(type));
  }
  Reader reader(frame.substr(sizeof type));
  Message message;
  using Function = bool (*)(Reader&, Message&);
  static constexpr Function kDecoders[] = {&DecodeAlternative<Message, kIndexes>...};
  if (!kDecoders[type - kFirst](reader, message)) {
    return InvalidArgument("malformed frame of type " + std::to_string(type));
  }
  return message;
}

constexpr uint16_t kRankToAgentFirst = 1;
constexpr uint16_t kAgentToRankFirst = 101;
static_assert(std::variant_size_v<RankToAgent> == 10 && std::variant_size_v<AgentToRank> == 10,
              "a new message needs a type number in the header's table");

}  // namespace

std::string EncodeFrame(const RankToAgent& message) { return Encode<RankToAgent, kRankToAgentFirst>(message); }
std::string EncodeFrame(const AgentToRank& message) { return Encode<AgentToRank, kAgentToRankFirst>(message); }

Result<RankToAgent> DecodeRankToAgent(std::string_view frame) {
  return Decode<RankToAgent, kRankToAgentFirst>(frame, std::make_index_sequence<std::variant_size_v<RankToAgent>>{});
}

Result<AgentToRank> DecodeAgentToRank(std::string_view frame) {
  return Decode<AgentToRank, kAgentToRankFirst>(frame, std::make_index_sequence<std::variant_size_v<AgentToRank>>{});
}

void FrameReader::Append(std::string_view bytes) {
  if (broken_) return;
  buffer_.erase(0, begin_);
  begin_ = 0;
  buffer_.append(bytes);
}

Result<std::optional<std::string_view>> FrameReader::Next() {
  const auto broken = [] { return InvalidArgument("a frame's length is out of range; the stream is lost"); };
  if (broken_) return broken();
  uint32_t length = 0;
  if (buffered_bytes() < kFrameHeaderBytes) return std::optional<std::string_view>();
  std::memcpy(&length, buffer_.data() + begin_, sizeof length);
  if (length < sizeof(uint16_t) || length > kFrameBytesMax) {
    broken_ = true;
    buffer_.clear();
    begin_ = 0;
    return broken();
  }
  if (buffered_bytes() < kFrameHeaderBytes + length) return std::optional<std::string_view>();
  const std::string_view frame(buffer_.data() + begin_ + kFrameHeaderBytes, length);
  begin_ += kFrameHeaderBytes + length;
  return std::optional<std::string_view>(frame);
}

}  // namespace everstep
