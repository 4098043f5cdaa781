#include "worker/io/process_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>

#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"

namespace everstep {
namespace {

// A file of /proc, up to a bound. Empty when it can't be read: the process is gone, or another user's.
std::string ReadProcFile(const std::string& path) {
  constexpr size_t kBytesMax = 4 << 20;
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string content;
  if (!fd.valid()) return content;
  char buffer[16384];
  ssize_t got = 0;
  while (content.size() < kBytesMax && (got = read(fd.get(), buffer, sizeof(buffer))) > 0) {
    content.append(buffer, static_cast<size_t>(got));
  }
  return content;
}

bool HasEntry(std::string_view environment, std::string_view entry) {
  while (!environment.empty()) {
    const size_t end = std::min(environment.find('\0'), environment.size());
    if (environment.substr(0, end) == entry) return true;
    environment.remove_prefix(std::min(end + 1, environment.size()));
  }
  return false;
}

}  // namespace

std::vector<int> FindMarkedProcesses(const std::vector<std::string>& marks) {
  std::vector<int> found;
  DIR* directory = opendir("/proc");
  if (directory == nullptr) return found;
  const int self = getpid();
  while (const dirent* entry = readdir(directory)) {
    const int pid = atoi(entry->d_name);
    if (pid <= 0 || pid == self) continue;
    const std::string environment = ReadProcFile("/proc/" + std::to_string(pid) + "/environ");
    if (environment.empty()) continue;
    if (std::all_of(marks.begin(), marks.end(), [&](const std::string& m) { return HasEntry(environment, m); })) {
      found.push_back(pid);
    }
  }
  closedir(directory);
  return found;
}

Result<int> KillMarkedProcesses(const std::vector<std::string>& marks, Duration limit) {
  const Instant deadline = BootTimeNow() + limit;
  std::set<int> killed;
  for (;;) {
    const std::vector<int> found = FindMarkedProcesses(marks);
    if (found.empty()) return static_cast<int>(killed.size());
    for (int pid : found) {
      UniqueFd handle(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
      if (!handle.valid()) continue;
      // Looked at again through a handle, so that a pid used anew in between is not hit.
      const std::string environment = ReadProcFile("/proc/" + std::to_string(pid) + "/environ");
      if (!std::all_of(marks.begin(), marks.end(), [&](const std::string& m) { return HasEntry(environment, m); })) {
        continue;
      }
      if (syscall(SYS_pidfd_send_signal, handle.get(), SIGKILL, nullptr, 0) == 0) killed.insert(pid);
      const Duration left = deadline - BootTimeNow();
      if (left <= Duration::zero()) {
        return DeadlineExceeded("process " + std::to_string(pid) + " of an earlier run survives SIGKILL");
      }
      pollfd waiting{handle.get(), POLLIN, 0};
      poll(&waiting, 1, static_cast<int>(std::min<int64_t>(left.count() / 1'000'000 + 1, 1000)));
      // Its environment is gone once it is a zombie. Orphans come to us, because the agent is a subreaper.
      siginfo_t info{};
      waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(handle.get()), &info, WEXITED | WNOHANG);
    }
  }
}

}  // namespace everstep
