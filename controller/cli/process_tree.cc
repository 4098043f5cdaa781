#include "controller/cli/process_tree.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

namespace everstep::cli {
namespace {

constexpr int kRoundsMax = 50;

std::optional<ProcessInfo> ReadProcess(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The command's name may hold spaces and parentheses: the fields begin after the last ')'.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(end + 1));
  ProcessInfo info;
  info.key.pid = pid;
  fields >> info.state >> info.parent;
  std::string skipped;
  for (int field = 5; field < 22; ++field) fields >> skipped;
  fields >> info.key.start_ticks;
  if (!fields || info.state == 'Z' || info.state == 'X') return std::nullopt;
  return info;
}

bool CarriesMark(pid_t pid, const std::string& mark) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
  std::string entry;
  while (std::getline(file, entry, '\0')) {
    if (entry == mark) return true;
  }
  return false;
}

}  // namespace

std::vector<ProcessInfo> AllProcesses() {
  std::vector<ProcessInfo> all;
  DIR* folder = opendir("/proc");
  if (folder == nullptr) return all;
  while (const dirent* entry = readdir(folder)) {
    pid_t pid = 0;
    const char* end = entry->d_name + std::strlen(entry->d_name);
    const auto parsed = std::from_chars(entry->d_name, end, pid);
    if (parsed.ec != std::errc() || parsed.ptr != end) continue;
    if (auto info = ReadProcess(pid)) all.push_back(*info);
  }
  closedir(folder);
  return all;
}

uint64_t StartTicks(pid_t pid) {
  const auto info = ReadProcess(pid);
  return info ? info->key.start_ticks : 0;
}

bool IsAlive(const ProcessKey& key) {
  return key.pid > 0 && StartTicks(key.pid) == key.start_ticks && key.start_ticks != 0;
}

std::vector<ProcessInfo> ProcessTree(const ProcessKey& root, const std::string& mark) {
  const std::vector<ProcessInfo> all = AllProcesses();
  std::set<pid_t> members;
  for (const ProcessInfo& info : all) {
    if (info.key.pid == getpid()) continue;
    if (info.key == root || CarriesMark(info.key.pid, mark)) members.insert(info.key.pid);
  }
  // Descendants of members, however deep: repeat until a pass adds nobody.
  for (bool grown = true; grown;) {
    grown = false;
    for (const ProcessInfo& info : all) {
      if (info.key.pid != getpid() && members.count(info.parent) != 0) {
        grown = members.insert(info.key.pid).second || grown;
      }
    }
  }
  std::vector<ProcessInfo> tree;
  for (const ProcessInfo& info : all) {
    if (members.count(info.key.pid) != 0) tree.push_back(info);
  }
  // The root first, the rest by pid.
  std::sort(tree.begin(), tree.end(), [&](const ProcessInfo& a, const ProcessInfo& b) {
    if ((a.key == root) != (b.key == root)) return a.key == root;
    return a.key < b.key;
  });
  return tree;
}

std::vector<pid_t> SignalTree(const ProcessKey& root, const std::string& mark, int signal) {
  std::set<ProcessKey> reached;
  std::vector<pid_t> pids;
  for (int round = 0; round < kRoundsMax; ++round) {
    bool news = false;
    for (const ProcessInfo& info : ProcessTree(root, mark)) {
      if (reached.count(info.key) != 0) continue;
      // Look again just before the signal: the pid may have been reused since.
      if (!IsAlive(info.key) || kill(info.key.pid, signal) != 0) continue;
      reached.insert(info.key);
      pids.push_back(info.key.pid);
      news = true;
    }
    if (!news) break;
  }
  return pids;
}

bool WaitUntilGone(const ProcessKey& key, Duration timeout) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, key.pid, 0));
  if (fd < 0) return !IsAlive(key);
  if (!IsAlive(key)) {
    close(fd);
    return true;
  }
  pollfd waited{fd, POLLIN, 0};
  const int ready = poll(&waited, 1, static_cast<int>(ToMilliseconds(timeout)));
  close(fd);
  return ready > 0 || !IsAlive(key);
}

}  // namespace everstep::cli
