#include "worker/io/root_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "worker/io/process_tree.h"
#include "worker/io/spawner.h"

namespace everstep {

Result<RootDirectory> OpenRoot(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    return InvalidArgument("--root: cannot create " + path + " (" + error.message() +
                           "): choose a directory that this user can write");
  }
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr || access(resolved, W_OK | X_OK) != 0) {
    return InvalidArgument("--root: cannot write to " + path + " (" + strerror(errno) +
                           "): choose a directory that this user can write");
  }
  RootDirectory root;
  root.path = resolved;
  const std::string lock_path = root.path + "/lock";
  root.lock.Reset(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!root.lock.valid()) {
    return InvalidArgument("--root: cannot write " + lock_path + " (" + strerror(errno) +
                           "): choose a directory that this user can write");
  }
  if (flock(root.lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return InvalidArgument("--root: " + root.path +
                           " is in use by another agent: stop it, or choose another directory");
  }
  return root;
}

Result<int> KillLeftovers(const RootDirectory& root) {
  return KillMarkedProcesses({RootMark(root.path)}, Seconds(10));
}

}  // namespace everstep
