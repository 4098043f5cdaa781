#include "worker/examples/step_log.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cstring>

namespace everstep::examples {
namespace {

const char* EventName(StepEvent event) {
  switch (event) {
    case StepEvent::kComputed: return "computed";
    case StepEvent::kApplied: return "applied";
    case StepEvent::kDiscarded: return "discarded";
    case StepEvent::kRolledForward: return "rolled-forward";
  }
  return "unknown";
}

}  // namespace

StepLog::~StepLog() {
  if (fd_ >= 0) close(fd_);
}

Status StepLog::Open(const std::string& folder, ProcessId process) {
  const std::string path = fmt::format("{}/steps-{}.log", folder, process.value);
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) return Unavailable(fmt::format("step log {}: {}", path, std::strerror(errno)));
  pid_ = getpid();
  return OkStatus();
}

void StepLog::Write(StepEvent event, Step step, Generation generation, double loss) {
  if (fd_ < 0) return;
  const std::string line = fmt::format("{} step {} generation {} pid {} loss {:.9g}\n", EventName(event),
                                       step.value, generation.value, pid_, loss);
  // One write per line: it is in the kernel before anything else happens to this process.
  if (write(fd_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    fmt::print(stderr, "everstep-train: the step log lost a line: {}\n", std::strerror(errno));
  }
}

}  // namespace everstep::examples
