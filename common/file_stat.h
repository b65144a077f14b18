// FileStat: what tells one version of a file from another.
#pragma once

#include <sys/stat.h>

#include <compare>
#include <cstdint>

#include "common/clock.h"

namespace modelcache {

// What fstat tells of an open file; times as ToNanoseconds gives them.
struct FileStat {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t mtime_ns = 0;
  std::int64_t ctime_ns = 0;
  auto operator<=>(const FileStat&) const = default;
};

inline FileStat ToFileStat(const struct stat& status) {
  return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
          ToNanoseconds(status.st_mtim), ToNanoseconds(status.st_ctim)};
}

}  // namespace modelcache
