// Rebuilds the ledger's state from what was stored, with the same Apply that the core uses live.
#pragma once

#include "controller/core/ledger/record.h"
#include "controller/io/store/ledger_store.h"
#include "proto/base/status.h"

namespace everstep {

// kDataLoss: damaged · kFailedPrecondition: written by a newer version.
Result<LedgerState> ReplayLedger(const StoredLedger& stored);

}  // namespace everstep
