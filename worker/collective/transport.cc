#include "worker/collective/transport.h"

#include <vector>

namespace everstep::collective {

Status Transport::Stream(const StreamPlan& plan) {
  std::vector<std::byte> scratch;
  const auto receive_one = [&](const StreamReceive& piece, const Outgoing& out) -> Status {
    if (piece.other == nullptr) return Exchange(out, {plan.from, piece.into, piece.bytes});
    scratch.resize(piece.bytes);
    EVERSTEP_RETURN_IF_ERROR(Exchange(out, {plan.from, scratch.data(), piece.bytes}));
    const size_t count = piece.bytes / plan.element_bytes;
    plan.reduce(piece.into, scratch.data(), piece.other, count);
    if (piece.divide) plan.divide(piece.into, count, plan.divisor);
    return OkStatus();
  };
  // With a head, send i and receive i run side by side; without, a receive must be complete before
  // it is passed on.
  size_t sent = 0;
  for (const StreamReceive& piece : plan.receives) {
    Outgoing out;
    if (plan.head > 0 && sent < plan.sends.size()) {
      out = {plan.to, plan.sends[sent].data, plan.sends[sent].bytes};
      ++sent;
    }
    EVERSTEP_RETURN_IF_ERROR(receive_one(piece, out));
    if (plan.head == 0 && sent < plan.sends.size()) {
      EVERSTEP_RETURN_IF_ERROR(
          Exchange({plan.to, plan.sends[sent].data, plan.sends[sent].bytes}, {}));
      ++sent;
    }
  }
  for (; sent < plan.sends.size(); ++sent) {
    EVERSTEP_RETURN_IF_ERROR(
        Exchange({plan.to, plan.sends[sent].data, plan.sends[sent].bytes}, {}));
  }
  return OkStatus();
}

}  // namespace everstep::collective
