// CHECK for broken invariants: prints and aborts. REPORT_BUG for survivable surprises: counted, printed once
// per site, fatal when EVERSTEP_BUGS_ARE_FATAL is set at build time (tests). Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace everstep {

[[noreturn]] inline void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "CHECK failed: %s at %s:%d\n", condition, file, line);
  std::abort();
}

inline std::atomic<uint64_t> g_bug_count{0};

inline void ReportBug(const char* what, const char* file, int line) {
  g_bug_count.fetch_add(1, std::memory_order_relaxed);
  std::fprintf(stderr, "BUG: %s at %s:%d\n", what, file, line);
#ifdef EVERSTEP_BUGS_ARE_FATAL
  std::abort();
#endif
}

}  // namespace everstep

#define EVERSTEP_CHECK(condition)                                             \
  do {                                                                        \
    if (!(condition)) ::everstep::CheckFailed(#condition, __FILE__, __LINE__); \
  } while (false)
#define EVERSTEP_REPORT_BUG(what) ::everstep::ReportBug(what, __FILE__, __LINE__)
