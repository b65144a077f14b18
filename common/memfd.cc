// memfd_create, seals and fstat.
#include "common/memfd.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/clock.h"

namespace modelcache {
namespace {

constexpr unsigned kNoExecSeal = 0x0008U;  // MFD_NOEXEC_SEAL, Linux 6.3; headers may be older

constexpr int kSizeSeals = F_SEAL_GROW | F_SEAL_SHRINK;
constexpr int kWriteSeal = F_SEAL_WRITE;

int CreateNotExecutable(const std::string& name, Sys& sys) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = sys.MemfdCreate(name.c_str(), kFlags | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) {
    return sys.MemfdCreate(name.c_str(), kFlags);  // before Linux 6.3
  }
  return fd;
}

}  // namespace

Result<UniqueFd> CreateMemfd(const std::string& name, std::uint64_t size_bytes, Sys& sys) {
  if (size_bytes > static_cast<std::uint64_t>(INT64_MAX)) {
    return Error{ErrorCode::kInvalidArgument,
                 "memfd of " + std::to_string(size_bytes) + " bytes is larger than any file", 0};
  }
  UniqueFd fd(CreateNotExecutable(name, sys));
  if (!fd.valid()) {
    return SystemError("memfd_create", errno);
  }
  if (sys.Ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    const int saved = errno;
    return SystemError("ftruncate of a memfd to " + std::to_string(size_bytes) + " bytes", saved);
  }
  if (sys.AddSeals(fd.get(), kSizeSeals) != 0) {
    return SystemError("fcntl(F_ADD_SEALS)", errno);
  }
  return fd;
}

Result<UniqueFd> MakeSealedMemfd(const std::string& name, std::span<const std::byte> bytes) {
  Result<UniqueFd> fd = CreateMemfd(name, bytes.size());
  if (!fd.ok()) {
    return fd;
  }
  while (!bytes.empty()) {
    const ssize_t done = ::write(fd->get(), bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      const int saved = done < 0 ? errno : ENOSPC;
      Error error = SystemError("write of " + std::to_string(bytes.size()) + " bytes", saved);
      error.code = saved == ENOSPC || saved == ENOMEM ? ErrorCode::kNoRoom : error.code;
      return error;
    }
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  if (auto sealed = SealMemfd(fd->get()); !sealed.ok()) {
    return std::move(sealed).error();
  }
  return fd;
}

Result<void> SealMemfd(int fd, Sys& sys) {
  if (sys.AddSeals(fd, kSizeSeals | kWriteSeal | F_SEAL_SEAL) == 0) {
    return {};
  }
  const int saved = errno;
  Error error = SystemError("fcntl(F_ADD_SEALS)", saved);
  if (saved == EBUSY) {
    error.code = ErrorCode::kInUse;
    error.message += " (a writable map of the arena still exists)";
  }
  return error;
}

Result<MemfdInfo> InspectMemfd(int fd, Sys& sys) {
  struct stat status = {};
  if (sys.Fstat(fd, &status) != 0) {
    return SystemError("fstat", errno);
  }
  const int seals = sys.GetSeals(fd);
  if (!S_ISREG(status.st_mode) || seals < 0) {
    return Error{ErrorCode::kCorrupt, "descriptor is not a memfd that can be sealed", 0};
  }
  MemfdInfo info;
  info.inode = status.st_ino;
  info.size_bytes = static_cast<std::uint64_t>(status.st_size);
  info.allocated_bytes = static_cast<std::uint64_t>(status.st_blocks) * 512U;
  info.seals = seals;
  info.device = status.st_dev;
  info.changed_ns = ToNanoseconds(status.st_ctim);
  return info;
}

bool IsSealed(const MemfdInfo& info) {
  constexpr int kNeeded = kSizeSeals | kWriteSeal;
  return (info.seals & kNeeded) == kNeeded;
}

}  // namespace modelcache
