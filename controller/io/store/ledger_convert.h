// Records and the ledger's state ↔ bytes on disk (everstep.storage.v1). Used by the loop, which encodes what the core
// appends, and at start. Thread-safe: pure functions.
#pragma once

#include <string>
#include <string_view>

#include "controller/core/ledger/record.h"
#include "proto/base/status.h"

namespace everstep {

inline constexpr uint32_t kLedgerFormatVersion = 1;

std::string EncodeRecord(const Record& record);
// kDataLoss: the bytes are no record · kFailedPrecondition: a newer version wrote it.
Result<Record> DecodeRecord(std::string_view bytes);

std::string EncodeLedgerState(const LedgerState& state);
// As DecodeRecord.
Result<LedgerState> DecodeLedgerState(std::string_view bytes);

}  // namespace everstep
