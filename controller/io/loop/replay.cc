#include "controller/io/loop/replay.h"

#include <fmt/format.h>

#include "controller/io/store/ledger_convert.h"

namespace everstep {

Result<LedgerState> ReplayLedger(const StoredLedger& stored) {
  LedgerState state;
  if (stored.snapshot_upto.value > 0) {
    EVERSTEP_ASSIGN_OR_RETURN(state, DecodeLedgerState(stored.snapshot));
    if (state.applied != stored.snapshot_upto) {
      return DataLoss(fmt::format("the ledger's snapshot is of record {}, not of {}", state.applied.value,
                                  stored.snapshot_upto.value));
    }
  }
  for (const StoredRecord& record : stored.records) {
    const Result<Record> decoded = DecodeRecord(record.bytes);
    if (!decoded.ok()) {
      return Status(decoded.status().code(),
                    fmt::format("record {}: {}", record.sequence.value, decoded.status().message()));
    }
    Apply(state, record.sequence, *decoded);
  }
  return state;
}

}  // namespace everstep
