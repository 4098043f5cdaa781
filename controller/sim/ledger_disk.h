// The controller's disk: records are durable once a sync covers them; a crash keeps any prefix of what was being
// written, and a sync that failed says nothing about which. Used by World only.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "controller/core/ledger/record.h"
#include "proto/base/prng.h"

namespace everstep::sim {

class LedgerDisk {
 public:
  using Entry = std::pair<LedgerSequence, Record>;

  void Append(LedgerSequence sequence, Record record) { pending_.emplace_back(sequence, std::move(record)); }
  bool idle() const { return pending_.empty(); }
  // How many records a sync that starts now will cover.
  size_t pending() const { return pending_.size(); }
  // A sync of `count` records ended well; returns them.
  std::vector<Entry> Synced(size_t count);
  // The process ended: of what was pending any prefix survives.
  void Crash(Prng& prng);
  const std::vector<Entry>& durable() const { return durable_; }
  // The whole log as a controller that starts reads it.
  LedgerState Replay() const;
  // Sets the log back to its first `records` records, as a restored backup does.
  void Restore(size_t records) { durable_.resize(std::min(records, durable_.size())); }
  // Of a restored log: a record that raises the term far above any that was allotted after the backup.
  void AppendDurable(Record record);

  bool failing = false;       // the next sync fails
  Duration slow{};            // added to each sync

 private:
  std::vector<Entry> durable_;
  std::deque<Entry> pending_;
};

}  // namespace everstep::sim
