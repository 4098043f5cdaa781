#include "controller/sim/ledger_disk.h"

#include <algorithm>

#include "proto/base/check.h"

namespace everstep::sim {

std::vector<LedgerDisk::Entry> LedgerDisk::Synced(size_t count) {
  std::vector<Entry> synced;
  for (size_t i = 0; i < count; ++i) {
    durable_.push_back(pending_.front());
    synced.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return synced;
}

void LedgerDisk::Crash(Prng& prng) {
  const uint64_t kept = prng.UpTo(pending_.size());
  for (uint64_t i = 0; i < kept; ++i) durable_.push_back(std::move(pending_[i]));
  pending_.clear();
  failing = false;
}

LedgerState LedgerDisk::Replay() const {
  LedgerState state;
  for (const auto& [sequence, record] : durable_) {
    EVERSTEP_CHECK(sequence == state.applied.Next());  // no hole, whatever became of unfinished writes
    Apply(state, sequence, record);
  }
  return state;
}

void LedgerDisk::AppendDurable(Record record) {
  const LedgerSequence next = durable_.empty() ? LedgerSequence(1) : durable_.back().first.Next();
  durable_.emplace_back(next, std::move(record));
}

}  // namespace everstep::sim
