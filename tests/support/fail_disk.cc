// Preloaded into a process under test: while the file named by EVERSTEP_FAIL_DISK_SWITCH exists, writes and syncs of files
// under EVERSTEP_FAIL_DISK_PREFIX fail as on a full or broken disk (the switch's first line: ENOSPC or EIO). With
// STALL_SYNC the first sync, with STALL_WRITE the first write, says so by making the file "SWITCH.held" and never returns:
// what waits for it is not durable (and after STALL_WRITE not even there), and the process is there to be killed. Called by whatever thread writes; keeps no state.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int kStallSync = -1, kStallWrite = -2;

// The error to fail with, where to stall, or 0.
int FaultFor(int fd) {
  const char* name = getenv("EVERSTEP_FAIL_DISK_SWITCH");
  const char* prefix = getenv("EVERSTEP_FAIL_DISK_PREFIX");
  if (name == nullptr || prefix == nullptr || access(name, F_OK) != 0) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return 0;
  path[length] = '\0';
  if (strncmp(path, prefix, strlen(prefix)) != 0) return 0;
  char kind[16] = {0};
  const int file = open(name, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t got = read(file, kind, sizeof(kind) - 1);
  close(file);
  if (strncmp(kind, "STALL_SYNC", 10) == 0) return kStallSync;
  if (strncmp(kind, "STALL_WRITE", 11) == 0) return kStallWrite;
  return got >= 3 && strncmp(kind, "EIO", 3) == 0 ? EIO : ENOSPC;
}

[[noreturn]] void Hold() {
  char held[4096];
  snprintf(held, sizeof(held), "%s.held", getenv("EVERSTEP_FAIL_DISK_SWITCH"));
  const int file = open(held, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (file >= 0) close(file);
  for (;;) pause();
}

// Syncs begin with f, writes with w or p.
constexpr int StallFor(const char* function) { return function[0] == 'f' ? kStallSync : kStallWrite; }

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define EVERSTEP_FAIL_OR_CALL(name, fd, ...)                    \
  if (const int fault = FaultFor(fd); fault > 0) {              \
    errno = fault;                                              \
    return -1;                                                  \
  } else if (fault == StallFor(#name)) {                       \
    Hold();                                                     \
  }                                                             \
  static auto* const next = Next<decltype(::name)>(#name);      \
  return next(__VA_ARGS__)

extern "C" {

ssize_t write(int fd, const void* data, size_t bytes) { EVERSTEP_FAIL_OR_CALL(write, fd, fd, data, bytes); }
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) { EVERSTEP_FAIL_OR_CALL(pwrite, fd, fd, data, bytes, at); }
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) { EVERSTEP_FAIL_OR_CALL(pwrite64, fd, fd, data, bytes, at); }
int fsync(int fd) { EVERSTEP_FAIL_OR_CALL(fsync, fd, fd); }
int fdatasync(int fd) { EVERSTEP_FAIL_OR_CALL(fdatasync, fd, fd); }

}  // extern "C"
