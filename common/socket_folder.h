// Where a daemon's socket lies, and the rule for its folder: who may write there can answer in the
// daemon's name.
#pragma once

#include <cstddef>
#include <string>

#include "common/result.h"

namespace modelcache {

// Longest path a Unix socket address holds, without its final zero byte.
inline constexpr std::size_t kMaxSocketPathBytes = 107;

// Where the daemon listens unless told otherwise: $MODELCACHE_SOCKET, else
// $XDG_RUNTIME_DIR/modelcache/socket, else /run/modelcache/socket where that folder is writable by
// this user or its socket may be written by this user, else /tmp/modelcache-<uid>/socket. Client
// and daemon compute it alike. Errors: those of CheckSocketPath.
Result<std::string> DefaultSocketPath();

// kInvalidArgument with both numbers when `path` is longer than a socket address can hold, or
// empty.
Result<void> CheckSocketPath(const std::string& path);

// What is before the last slash of `path`: "." without one, "/" for a path right below the root.
std::string FolderOf(const std::string& path);

// Checks the folder of `socket_path`: a real folder of this user or root, which others may write to
// only when it is sticky. Errors: kNotFound, kInvalidArgument (a symlink or no folder), kPermission
// (another user's, or writable by others), kSystem.
Result<void> CheckSocketFolder(const std::string& socket_path);

// Makes the folder with mode 0700 where it is missing (not those above it), then checks it.
// Errors: as CheckSocketFolder; kNotFound when there is no folder above.
Result<void> PrepareSocketFolder(const std::string& socket_path);

}  // namespace modelcache
