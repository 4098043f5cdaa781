// Writes the progress page: plain stores under its seqlock, no system call but the clock's. Called under the session's
// mutex, so there is one writer at a time; the agent reads it at any moment, also after this process died.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

#include "proto/model/progress.h"

namespace everstep::client {

inline uint64_t BoottimeNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

inline void WriteProgress(ProgressPage& page, const Progress& progress) {
  const uint32_t version = page.version.load(std::memory_order_relaxed);
  page.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  page.phase = static_cast<uint8_t>(progress.phase);
  page.memory_valid = progress.memory_valid ? 1 : 0;
  page.applied_step = progress.applied.step.value;
  page.applied_generation = progress.applied.generation.value;
  page.generation = progress.generation.value;
  page.vote_passed = progress.vote_passed.value;
  page.collective_sequence = progress.collective_sequence;
  page.changed_boottime_ns = BoottimeNanoseconds();
  page.version.store(version + 2, std::memory_order_release);
}

}  // namespace everstep::client
