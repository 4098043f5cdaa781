#include "worker/collective/algorithms.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

namespace everstep::collective {
namespace {

// Below these sizes the number of messages matters, above them the number of bytes.
constexpr size_t kAllReduceSmallBytes = 16 * 1024;
constexpr size_t kTreeSmallBytes = 64 * 1024;
constexpr size_t kChainPieceBytes = 256 * 1024;
constexpr size_t kScratchKeptBytes = size_t{64} << 20;

int32_t Wrap(int32_t rank, int32_t size) { return ((rank % size) + size) % size; }

void CopyUnlessSame(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace

std::byte* Algorithms::Scratch(size_t bytes) {
  if (scratch_.size() < bytes) {
    scratch_ = std::vector<std::byte>();  // frees first: contents need not survive
    scratch_.resize(bytes);
  }
  return scratch_.data();
}

size_t Algorithms::CountOf(std::span<const size_t> counts, size_t count, int32_t rank) const {
  return counts.empty() ? count : counts[static_cast<size_t>(rank)];
}

Status Algorithms::Validate(const Operation& op) const {
  const auto size = static_cast<size_t>(transport_.size());
  if (static_cast<int>(op.type) >= kDataTypeCount ||
      static_cast<int>(op.reduce) >= kReduceOpCount) {
    return InvalidArgument("unknown data type or reduction");
  }
  if (op.root.value < 0 || op.root.value >= transport_.size()) {
    return InvalidArgument(fmt::format("rank {} is not in a group of {}", op.root.value, size));
  }
  if (op.kind == OperationKind::kSendReceive) {
    const bool good = op.source.value >= 0 && op.source.value < transport_.size() &&
                      op.source.value != transport_.rank() && op.root.value != transport_.rank() &&
                      op.send_counts.size() == 1 && op.receive_counts.size() == 1;
    return good ? OkStatus()
                : InvalidArgument("SendReceive needs two other ranks and one count for each");
  }
  if (!op.send_counts.empty() && op.send_counts.size() != size)
    return InvalidArgument("one send count per rank is needed");
  if (!op.receive_counts.empty() && op.receive_counts.size() != size) {
    return InvalidArgument("one receive count per rank is needed");
  }
  const bool reduces = op.kind == OperationKind::kAllReduce ||
                       op.kind == OperationKind::kReduceScatter ||
                       op.kind == OperationKind::kReduce;
  if (reduces && !ReductionApplies(op.reduce, op.type)) {
    return InvalidArgument(
        fmt::format("{} of {} makes no sense", ReduceOpName(op.reduce), DataTypeName(op.type)));
  }
  const bool to_self = op.root.value == transport_.rank();
  if ((op.kind == OperationKind::kSend || op.kind == OperationKind::kReceive) && to_self) {
    return InvalidArgument("a rank cannot send to itself");
  }
  return OkStatus();
}

Status Algorithms::Run(const Operation& op) {
  EVERSTEP_RETURN_IF_ERROR(Validate(op));
  const bool point_to_point =
      op.kind == OperationKind::kReceive || op.kind == OperationKind::kSendReceive;
  transport_.Begin({static_cast<uint8_t>(point_to_point ? OperationKind::kSend : op.kind),
                    static_cast<uint8_t>(op.type), static_cast<uint8_t>(op.reduce)});
  Status status;
  switch (op.kind) {
    case OperationKind::kAllReduce: status = AllReduce(op); break;
    case OperationKind::kAllGather: status = AllGather(op); break;
    case OperationKind::kReduceScatter: status = ReduceScatter(op); break;
    case OperationKind::kBroadcast: status = Broadcast(op); break;
    case OperationKind::kReduce: status = Reduce(op); break;
    case OperationKind::kGather: status = Gather(op); break;
    case OperationKind::kScatter: status = Scatter(op); break;
    case OperationKind::kAllToAll: status = AllToAll(op); break;
    case OperationKind::kSend:
      status = transport_.Exchange({op.root.value, op.input, op.count * ElementBytes(op.type)}, {});
      break;
    case OperationKind::kReceive:
      status =
          transport_.Exchange({}, {op.root.value, op.output, op.count * ElementBytes(op.type)});
      break;
    case OperationKind::kSendReceive:
      status = transport_.Exchange(
          {op.root.value, op.input, op.send_counts[0] * ElementBytes(op.type)},
          {op.source.value, op.output, op.receive_counts[0] * ElementBytes(op.type)});
      break;
    case OperationKind::kBarrier: status = Barrier(); break;
  }
  if (scratch_.size() > kScratchKeptBytes) scratch_ = std::vector<std::byte>();
  return status;
}

Status Algorithms::AllReduce(const Operation& op) {
  const size_t bytes = op.count * ElementBytes(op.type);
  if (transport_.size() == 1) {
    CopyUnlessSame(op.output, op.input, bytes);
    return OkStatus();
  }
  // The choice depends on the size alone, so that all ranks make the same one.
  return bytes <= kAllReduceSmallBytes ? AllReduceSmall(op) : AllReduceRing(op);
}

// Partners combine with the lower rank's value on the left, so both get the same bits even for NaN
// and signed zero.
Status Algorithms::AllReduceSmall(const Operation& op) {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  const size_t bytes = op.count * ElementBytes(op.type);
  const ReduceFunction reduce = ReductionFor(op.reduce, op.type);
  const auto power = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(size)));
  CopyUnlessSame(op.output, op.input, bytes);
  if (rank >= power) {  // fold in, and take the result
    EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({rank - power, op.output, bytes}, {}));
    return transport_.Exchange({}, {rank - power, op.output, bytes});
  }
  std::byte* incoming = Scratch(bytes);
  if (rank + power < size) {
    EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({}, {rank + power, incoming, bytes}));
    reduce(op.output, op.output, incoming, op.count);
  }
  for (int32_t distance = 1; distance < power; distance *= 2) {
    const int32_t partner = rank ^ distance;
    EVERSTEP_RETURN_IF_ERROR(
        transport_.Exchange({partner, op.output, bytes}, {partner, incoming, bytes}));
    if (rank < partner) {
      reduce(op.output, op.output, incoming, op.count);
    } else {
      reduce(op.output, incoming, op.output, op.count);
    }
  }
  if (op.reduce == ReduceOp::kAvg) DivisionFor(op.type)(op.output, op.count, size);
  if (rank + power < size) return transport_.Exchange({rank + power, op.output, bytes}, {});
  return OkStatus();
}

// Block b starts at rank b, collects b+1, b+2, ... and is complete at rank b-1, which sends it
// round once more. Seen from one rank that is a single stream: it sends block `rank` and then
// everything it receives, reduced, in order.
//
// A block that comes round complete overwrites the partial one in place: safe, because its bytes
// passed through this rank as part of the partial block before, so they have left.
Status Algorithms::AllReduceRing(const Operation& op) {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  const size_t element = ElementBytes(op.type);
  const auto* input = static_cast<const std::byte*>(op.input);
  auto* output = static_cast<std::byte*>(op.output);
  const auto start = [&](int32_t block) {
    return op.count * static_cast<size_t>(block) / static_cast<size_t>(size) * element;
  };
  const auto bytes_of = [&](int32_t block) { return start(block + 1) - start(block); };

  receives_.clear();
  sends_.clear();
  sends_.push_back({input + start(rank), bytes_of(rank)});
  for (int32_t i = 1; i <= 2 * (size - 1); ++i) {
    const int32_t block = Wrap(rank - i, size);
    const bool reduces = i <= size - 1;
    const bool complete = i == size - 1;
    receives_.push_back({output + start(block), reduces ? input + start(block) : nullptr,
                         bytes_of(block), complete && op.reduce == ReduceOp::kAvg});
    if (i < 2 * (size - 1)) sends_.push_back({output + start(block), bytes_of(block)});
  }
  StreamPlan plan{.from = Wrap(rank - 1, size),
                  .to = Wrap(rank + 1, size),
                  .receives = receives_,
                  .sends = sends_,
                  .head = 1,
                  .element_bytes = element,
                  .reduce = ReductionFor(op.reduce, op.type)};
  if (op.reduce == ReduceOp::kAvg) {
    plan.divide = DivisionFor(op.type);
    plan.divisor = size;
  }
  return transport_.Stream(plan);
}

Status Algorithms::AllGather(const Operation& op) {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  const size_t element = ElementBytes(op.type);
  auto* output = static_cast<std::byte*>(op.output);
  std::vector<size_t> offsets(static_cast<size_t>(size) + 1, 0);
  for (int32_t i = 0; i < size; ++i) {
    offsets[static_cast<size_t>(i) + 1] =
        offsets[static_cast<size_t>(i)] + CountOf(op.receive_counts, op.count, i) * element;
  }
  const auto start = [&](int32_t block) { return offsets[static_cast<size_t>(block)]; };
  const auto bytes_of = [&](int32_t block) { return start(block + 1) - start(block); };
  CopyUnlessSame(output + start(rank), op.input, bytes_of(rank));
  if (size == 1) return OkStatus();

  receives_.clear();
  sends_.clear();
  sends_.push_back({output + start(rank), bytes_of(rank)});
  for (int32_t i = 1; i < size; ++i) {
    const int32_t block = Wrap(rank - i, size);
    receives_.push_back({output + start(block), nullptr, bytes_of(block), false});
    if (i < size - 1) sends_.push_back({output + start(block), bytes_of(block)});
  }
  return transport_.Stream({.from = Wrap(rank - 1, size),
                            .to = Wrap(rank + 1, size),
                            .receives = receives_,
                            .sends = sends_,
                            .head = 1,
                            .element_bytes = element});
}

// As the first half of the ring all-reduce, shifted by one so that block `rank` ends here.
Status Algorithms::ReduceScatter(const Operation& op) {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  const size_t element = ElementBytes(op.type);
  const auto* input = static_cast<const std::byte*>(op.input);
  auto* output = static_cast<std::byte*>(op.output);
  std::vector<size_t> offsets(static_cast<size_t>(size) + 1, 0);
  for (int32_t i = 0; i < size; ++i) {
    offsets[static_cast<size_t>(i) + 1] =
        offsets[static_cast<size_t>(i)] + CountOf(op.send_counts, op.count, i) * element;
  }
  const auto start = [&](int32_t block) { return offsets[static_cast<size_t>(block)]; };
  const auto bytes_of = [&](int32_t block) { return start(block + 1) - start(block); };
  if (size == 1) {
    CopyUnlessSame(output, input, bytes_of(0));
    return OkStatus();
  }
  // Partial sums need a place to stay until they are passed on: the input itself when the caller
  // works in place.
  const bool in_place = output == input + start(rank);
  std::byte* partial = in_place ? output - start(rank) : Scratch(start(size));

  receives_.clear();
  sends_.clear();
  sends_.push_back({input + start(Wrap(rank - 1, size)), bytes_of(Wrap(rank - 1, size))});
  for (int32_t i = 2; i <= size; ++i) {
    const int32_t block = Wrap(rank - i, size);
    const bool last = i == size;
    std::byte* into = last ? output : partial + start(block);
    receives_.push_back(
        {into, input + start(block), bytes_of(block), last && op.reduce == ReduceOp::kAvg});
    if (!last) sends_.push_back({into, bytes_of(block)});
  }
  StreamPlan plan{.from = Wrap(rank - 1, size),
                  .to = Wrap(rank + 1, size),
                  .receives = receives_,
                  .sends = sends_,
                  .head = 1,
                  .element_bytes = element,
                  .reduce = ReductionFor(op.reduce, op.type)};
  if (op.reduce == ReduceOp::kAvg) {
    plan.divide = DivisionFor(op.type);
    plan.divisor = size;
  }
  return transport_.Stream(plan);
}

Status Algorithms::Broadcast(const Operation& op) {
  const int32_t size = transport_.size();
  const size_t bytes = op.count * ElementBytes(op.type);
  const int32_t relative = Wrap(transport_.rank() - op.root.value, size);
  const auto absolute = [&](int32_t r) { return Wrap(r + op.root.value, size); };
  if (relative == 0) CopyUnlessSame(op.output, op.input, bytes);
  if (size == 1) return OkStatus();
  auto* data = static_cast<std::byte*>(op.output);

  if (bytes <= kTreeSmallBytes) {
    int32_t bit = 1;  // ends as the distance over which this rank received
    while (bit < size && (relative & bit) == 0) bit *= 2;
    if (relative != 0)
      EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({}, {absolute(relative - bit), data, bytes}));
    for (int32_t child = bit / 2; child >= 1; child /= 2) {
      if (relative + child >= size) continue;
      EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({absolute(relative + child), data, bytes}, {}));
    }
    return OkStatus();
  }
  receives_.clear();
  sends_.clear();
  for (size_t offset = 0; offset < bytes; offset += kChainPieceBytes) {
    const size_t piece = std::min(kChainPieceBytes, bytes - offset);
    if (relative != 0) receives_.push_back({data + offset, nullptr, piece, false});
    if (relative != size - 1) sends_.push_back({data + offset, piece});
  }
  return transport_.Stream({.from = absolute(relative - 1),
                            .to = absolute(relative + 1),
                            .receives = receives_,
                            .sends = sends_,
                            .head = relative == 0 ? sends_.size() : 0,
                            .element_bytes = ElementBytes(op.type)});
}

Status Algorithms::Reduce(const Operation& op) {
  const int32_t size = transport_.size();
  const size_t element = ElementBytes(op.type);
  const size_t bytes = op.count * element;
  const int32_t relative = Wrap(transport_.rank() - op.root.value, size);
  const auto absolute = [&](int32_t r) { return Wrap(r + op.root.value, size); };
  const ReduceFunction reduce = ReductionFor(op.reduce, op.type);
  if (size == 1) {
    CopyUnlessSame(op.output, op.input, bytes);
    return OkStatus();
  }

  if (bytes <= kTreeSmallBytes) {
    std::byte* incoming = Scratch(2 * bytes);
    std::byte* sum = relative == 0 ? static_cast<std::byte*>(op.output) : incoming + bytes;
    CopyUnlessSame(sum, op.input, bytes);
    for (int32_t distance = 1; distance < size; distance *= 2) {
      if ((relative & distance) != 0)
        return transport_.Exchange({absolute(relative - distance), sum, bytes}, {});
      if (relative + distance >= size) continue;
      EVERSTEP_RETURN_IF_ERROR(
          transport_.Exchange({}, {absolute(relative + distance), incoming, bytes}));
      reduce(sum, sum, incoming, op.count);
    }
    if (op.reduce == ReduceOp::kAvg) DivisionFor(op.type)(sum, op.count, size);
    return OkStatus();
  }
  // Chain: root+1 starts, each rank adds its own, the root ends.
  const auto* input = static_cast<const std::byte*>(op.input);
  std::byte* into = relative == 0   ? static_cast<std::byte*>(op.output)
                    : relative == 1 ? nullptr
                                    : Scratch(bytes);
  receives_.clear();
  sends_.clear();
  const size_t piece_bytes = kChainPieceBytes / element * element;
  for (size_t offset = 0; offset < bytes; offset += piece_bytes) {
    const size_t piece = std::min(piece_bytes, bytes - offset);
    if (relative != 1)
      receives_.push_back(
          {into + offset, input + offset, piece, relative == 0 && op.reduce == ReduceOp::kAvg});
    if (relative != 0) sends_.push_back({relative == 1 ? input + offset : into + offset, piece});
  }
  StreamPlan plan{.from = absolute(relative - 1),
                  .to = absolute(relative + 1),
                  .receives = receives_,
                  .sends = sends_,
                  .head = relative == 1 ? sends_.size() : 0,
                  .element_bytes = element,
                  .reduce = reduce};
  if (op.reduce == ReduceOp::kAvg) {
    plan.divide = DivisionFor(op.type);
    plan.divisor = size;
  }
  return transport_.Stream(plan);
}

Status Algorithms::Gather(const Operation& op) {
  const int32_t rank = transport_.rank();
  const size_t element = ElementBytes(op.type);
  if (rank != op.root.value) {
    return transport_.Exchange(
        {op.root.value, op.input, CountOf(op.receive_counts, op.count, rank) * element}, {});
  }
  auto* output = static_cast<std::byte*>(op.output);
  for (int32_t from = 0; from < transport_.size(); ++from) {
    const size_t bytes = CountOf(op.receive_counts, op.count, from) * element;
    if (from == rank) {
      CopyUnlessSame(output, op.input, bytes);
    } else {
      EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({}, {from, output, bytes}));
    }
    output += bytes;
  }
  return OkStatus();
}

Status Algorithms::Scatter(const Operation& op) {
  const int32_t rank = transport_.rank();
  const size_t element = ElementBytes(op.type);
  if (rank != op.root.value) {
    return transport_.Exchange(
        {}, {op.root.value, op.output, CountOf(op.send_counts, op.count, rank) * element});
  }
  const auto* input = static_cast<const std::byte*>(op.input);
  for (int32_t to = 0; to < transport_.size(); ++to) {
    const size_t bytes = CountOf(op.send_counts, op.count, to) * element;
    if (to == rank) {
      CopyUnlessSame(op.output, input, bytes);
    } else {
      EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({to, input, bytes}, {}));
    }
    input += bytes;
  }
  return OkStatus();
}

Status Algorithms::AllToAll(const Operation& op) {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  const size_t element = ElementBytes(op.type);
  std::vector<size_t> send_at(static_cast<size_t>(size) + 1, 0);
  std::vector<size_t> receive_at(static_cast<size_t>(size) + 1, 0);
  for (int32_t i = 0; i < size; ++i) {
    const auto at = static_cast<size_t>(i);
    send_at[at + 1] = send_at[at] + CountOf(op.send_counts, op.count, i) * element;
    receive_at[at + 1] = receive_at[at] + CountOf(op.receive_counts, op.count, i) * element;
  }
  const auto* input = static_cast<const std::byte*>(op.input);
  auto* output = static_cast<std::byte*>(op.output);
  for (int32_t distance = 0; distance < size; ++distance) {
    const auto to = static_cast<size_t>(Wrap(rank + distance, size));
    const auto from = static_cast<size_t>(Wrap(rank - distance, size));
    const size_t out_bytes = send_at[to + 1] - send_at[to];
    const size_t in_bytes = receive_at[from + 1] - receive_at[from];
    if (distance == 0) {
      if (out_bytes != in_bytes) return InvalidArgument("a rank's block for itself has two sizes");
      CopyUnlessSame(output + receive_at[from], input + send_at[to], out_bytes);
      continue;
    }
    EVERSTEP_RETURN_IF_ERROR(
        transport_.Exchange({static_cast<int32_t>(to), input + send_at[to], out_bytes},
                            {static_cast<int32_t>(from), output + receive_at[from], in_bytes}));
  }
  return OkStatus();
}

Status Algorithms::Barrier() {
  const int32_t rank = transport_.rank();
  const int32_t size = transport_.size();
  for (int32_t distance = 1; distance < size; distance *= 2) {
    EVERSTEP_RETURN_IF_ERROR(transport_.Exchange({Wrap(rank + distance, size), nullptr, 0},
                                                 {Wrap(rank - distance, size), nullptr, 0}));
  }
  return OkStatus();
}

}  // namespace everstep::collective
