// Anonymous shared memory that an agent creates and a rank process inherits: the progress page and the staging
// memory. Both are sealed against shrinking, so that a reader's mapping can't be pulled away under it.
// Loop-only or thread-compatible, as said per class.
#pragma once

#include <cstdint>
#include <string>

#include "proto/base/status.h"
#include "proto/model/progress.h"
#include "worker/io/unique_fd.h"

namespace everstep {

// A memfd that can grow but not shrink. kResourceExhausted: the kernel has no descriptor or memory left.
Result<UniqueFd> CreateGrowingMemory(const std::string& name);

// Decodes a page that its rank may be writing. `writer_gone`: nobody will finish a write that was interrupted, so a
// torn page is read as it is, with memory_valid false: what was being changed can't be told from what was not.
// Thread-safe.
Progress ReadProgressPage(const ProgressPage& page, bool writer_gone);

// One rank process's page, mapped by the agent. Move-only; thread-compatible.
class ProgressPageMapping {
 public:
  static Result<ProgressPageMapping> Create();
  ProgressPageMapping(ProgressPageMapping&& other) noexcept;
  ProgressPageMapping& operator=(ProgressPageMapping&& other) noexcept;
  ~ProgressPageMapping();

  int fd() const { return fd_.get(); }
  Progress Read(bool writer_gone) const { return ReadProgressPage(*page_, writer_gone); }
  ProgressPage* page() { return page_; }

 private:
  ProgressPageMapping(UniqueFd fd, ProgressPage* page) : fd_(std::move(fd)), page_(page) {}
  UniqueFd fd_;
  ProgressPage* page_ = nullptr;
};

}  // namespace everstep
