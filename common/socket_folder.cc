// The path from the environment. For the folder mkdir, then lstat: the rule holds for what is
// there, whoever made it.
#include "common/socket_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

namespace modelcache {
namespace {

constexpr char kSystemFolder[] = "/run/modelcache";

bool MayUseSystemFolder() {
  const std::string socket = std::string(kSystemFolder) + "/socket";
  return ::access(kSystemFolder, W_OK | X_OK) == 0 || ::access(socket.c_str(), W_OK) == 0;
}

std::string DefaultSocketFolder() {
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR");
      runtime != nullptr && *runtime != '\0') {
    return std::string(runtime) + "/modelcache";
  }
  return MayUseSystemFolder() ? kSystemFolder : "/tmp/modelcache-" + std::to_string(::getuid());
}

Error Refused(const std::string& folder, const std::string& why) {
  return Error{ErrorCode::kPermission, "the socket's folder " + folder + " " + why, 0};
}

}  // namespace

Result<std::string> DefaultSocketPath() {
  const char* told = std::getenv("MODELCACHE_SOCKET");
  std::string path =
      told != nullptr && *told != '\0' ? std::string(told) : DefaultSocketFolder() + "/socket";
  if (auto checked = CheckSocketPath(path); !checked.ok()) {
    return std::move(checked).error();
  }
  return path;
}

Result<void> CheckSocketPath(const std::string& path) {
  if (path.empty()) {
    return Error{ErrorCode::kInvalidArgument, "socket path is empty", 0};
  }
  if (path.size() > kMaxSocketPathBytes) {
    return Error{ErrorCode::kInvalidArgument,
                 "socket path has " + std::to_string(path.size()) + " bytes, limit " +
                     std::to_string(kMaxSocketPathBytes) + ": " + path,
                 0};
  }
  return {};
}

std::string FolderOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) {
    return ".";
  }
  return slash == 0 ? "/" : path.substr(0, slash);
}

Result<void> CheckSocketFolder(const std::string& socket_path) {
  const std::string folder = FolderOf(socket_path);
  struct stat status = {};
  if (::lstat(folder.c_str(), &status) != 0) {
    const int saved = errno;
    return SystemError("looking at the socket's folder " + folder, saved);
  }
  if (!S_ISDIR(status.st_mode)) {
    return Error{ErrorCode::kInvalidArgument,
                 "the socket's folder " + folder + " is a symlink or no folder", 0};
  }
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    return Refused(folder, "belongs to user " + std::to_string(status.st_uid) + ", not to " +
                               std::to_string(::geteuid()));
  }
  const bool others_write = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (others_write && (status.st_mode & S_ISVTX) == 0) {
    return Refused(folder, "may be written by others");
  }
  return {};
}

Result<void> PrepareSocketFolder(const std::string& socket_path) {
  const std::string folder = FolderOf(socket_path);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    const int saved = errno;
    return SystemError("creating the socket's folder " + folder, saved);
  }
  return CheckSocketFolder(socket_path);
}

}  // namespace modelcache
