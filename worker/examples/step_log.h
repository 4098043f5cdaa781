// The step log of one process: a line for whatever happened to a step, written at once, so that after
// any failure it can be proved which steps were computed, applied, discarded or rolled forward, in which
// generation and by which process. Thread-compatible.
//
//   <kind> step <n> generation <g> pid <pid> loss <l>
#pragma once

#include <string>

#include "proto/base/ids.h"
#include "proto/base/status.h"

namespace everstep::examples {

enum class StepEvent { kComputed, kApplied, kDiscarded, kRolledForward };

class StepLog {
 public:
  StepLog() = default;
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  // Appends to <folder>/steps-<process>.log. UNAVAILABLE: it can't be opened; the message names it.
  Status Open(const std::string& folder, ProcessId process);
  // Nothing happens while it is not open.
  void Write(StepEvent event, Step step, Generation generation, double loss);

 private:
  int fd_ = -1;
  long pid_ = 0;
};

}  // namespace everstep::examples
