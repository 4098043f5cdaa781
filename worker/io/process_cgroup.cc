#include "worker/io/process_cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "worker/io/event_loop.h"
#include "worker/io/unique_fd.h"

namespace everstep {
namespace {

constexpr char kPrefix[] = "rank-";

// Where the unified hierarchy is mounted; empty: nowhere.
std::string UnifiedMount() {
  std::ifstream mounts("/proc/self/mountinfo");
  std::string line;
  while (std::getline(mounts, line)) {
    const size_t separator = line.find(" - ");
    if (separator == std::string::npos || line.compare(separator + 3, 8, "cgroup2 ") != 0) continue;
    // "id parent major:minor root mount-point options ..."
    std::istringstream fields(line);
    std::string id, parent, device, root, mount_point;
    fields >> id >> parent >> device >> root >> mount_point;
    if (root == "/") return mount_point;
  }
  return "";
}

// This process's own path in it.
std::string UnifiedPath() {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    if (line.compare(0, 3, "0::") == 0) return line.substr(3);
  }
  return "";
}

bool WriteTo(const std::string& file, const char* text) {
  UniqueFd fd(open(file.c_str(), O_WRONLY | O_CLOEXEC));
  const size_t length = std::char_traits<char>::length(text);
  return fd.valid() && write(fd.get(), text, length) == static_cast<ssize_t>(length);
}

std::vector<pid_t> PidsIn(const std::string& folder) {
  std::vector<pid_t> pids;
  std::ifstream file(folder + "/cgroup.procs");
  pid_t pid = 0;
  while (file >> pid) {
    if (pid > 0) pids.push_back(pid);
  }
  return pids;
}

// A zombie does not: it runs nothing and only waits to be reaped.
bool Lives(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  const size_t end = stat.rfind(") ");
  return end != std::string::npos && stat.size() > end + 2 && stat[end + 2] != 'Z' && stat[end + 2] != 'X';
}

void KillIn(const std::string& folder) {
  // One write kills everybody, whoever forks meanwhile included; kernels before 5.14 have not got it.
  if (WriteTo(folder + "/cgroup.kill", "1")) return;
  for (pid_t pid : PidsIn(folder)) kill(pid, SIGKILL);
}

Result<int> KillAndRemove(const std::string& folder, Duration limit) {
  const Instant deadline = BootTimeNow() + limit;
  int seen = 0;
  for (;;) {
    const std::vector<pid_t> pids = PidsIn(folder);
    seen = std::max(seen, static_cast<int>(pids.size()));
    const auto living = std::find_if(pids.begin(), pids.end(), Lives);
    if (living == pids.end()) break;
    UniqueFd handle(static_cast<int>(syscall(SYS_pidfd_open, *living, 0)));
    KillIn(folder);
    if (!handle.valid()) continue;  // it has just ended
    const Duration left = deadline - BootTimeNow();
    if (left <= Duration::zero()) {
      return DeadlineExceeded("process " + std::to_string(*living) + " of " + folder + " survives SIGKILL");
    }
    pollfd waiting{handle.get(), POLLIN, 0};
    poll(&waiting, 1, static_cast<int>(std::min<int64_t>(left.count() / 1'000'000 + 1, 1000)));
    // The rank itself is reaped already; its orphans came to us, because the agent is a subreaper.
    siginfo_t info{};
    waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(handle.get()), &info, WEXITED | WNOHANG);
  }
  rmdir(folder.c_str());  // a zombie that is not reaped yet keeps it until the next sweep
  return seen;
}

}  // namespace

std::string ProcessCgroups::NameOf(const std::string& root) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (unsigned char c : root) hash = (hash ^ c) * 1099511628211u;
  std::ostringstream name;
  name << "everstep-" << std::hex << hash;
  return name.str();
}

ProcessCgroups ProcessCgroups::Find(const std::string& root) {
  const std::string mount = UnifiedMount(), path = UnifiedPath();
  if (mount.empty() || path.empty()) return {};
  return At(path == "/" ? mount : mount + path, root);
}

ProcessCgroups ProcessCgroups::At(const std::string& parent, const std::string& root) {
  ProcessCgroups cgroups;
  // To move a process down, both ends' lists must be writable.
  if (access((parent + "/cgroup.procs").c_str(), W_OK) != 0) return cgroups;
  const std::string folder = parent + "/" + NameOf(root);
  if (mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) return cgroups;
  if (access((folder + "/cgroup.procs").c_str(), W_OK) != 0) {
    rmdir(folder.c_str());
    return cgroups;
  }
  cgroups.folder_ = folder;
  return cgroups;
}

std::string ProcessCgroups::MakeFor(ProcessId process) const {
  if (!available()) return "";
  const std::string folder = FolderOf(process);
  mkdir(folder_.c_str(), 0755);  // whoever tidies up may have taken it while it was empty
  if (mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) return "";
  return folder + "/cgroup.procs";
}

void ProcessCgroups::Kill(ProcessId process) const {
  if (available()) KillIn(FolderOf(process));
}

Status ProcessCgroups::Remove(ProcessId process, Duration limit) const {
  if (!available()) return OkStatus();
  return KillAndRemove(FolderOf(process), limit).status();
}

Result<int> ProcessCgroups::RemoveLeftovers(Duration limit) const {
  if (!available()) return 0;
  std::vector<std::string> left;
  DIR* directory = opendir(folder_.c_str());
  if (directory == nullptr) return 0;
  while (const dirent* entry = readdir(directory)) {
    if (std::string(entry->d_name).compare(0, sizeof(kPrefix) - 1, kPrefix) == 0) {
      left.push_back(folder_ + "/" + entry->d_name);
    }
  }
  closedir(directory);
  int killed = 0;
  for (const std::string& folder : left) {
    EVERSTEP_ASSIGN_OR_RETURN(const int count, KillAndRemove(folder, limit));
    killed += count;
  }
  return killed;
}

void ProcessCgroups::Close() const {
  if (available()) rmdir(folder_.c_str());
}

}  // namespace everstep
