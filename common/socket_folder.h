// The rule for the folder a daemon's socket lies in: who may write there can answer in its name.
#pragma once

#include <string>

#include "common/result.h"

namespace modelcache {

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
