// pread with full checks, identity by fstat.
#include "server/loader/source_file.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <thread>
#include <utility>

namespace modelcache {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

// Time stamps of files move in steps of a scheduler tick, 10 ms at most.
constexpr Nanoseconds kTimestampGranularity = std::chrono::milliseconds(20);

Nanoseconds SinceEpoch(const timespec& time) {
  return std::chrono::seconds(time.tv_sec) + Nanoseconds(time.tv_nsec);
}

bool SameTime(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

bool SameIdentity(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size &&
         SameTime(a.st_mtim, b.st_mtim) && SameTime(a.st_ctim, b.st_ctim);
}

}  // namespace

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMost = 32;
  std::string quoted = "'";
  for (const char c : text.substr(0, kMost)) {
    if (c >= ' ' && c <= '~' && c != '\'') {
      quoted += c;
    } else {
      std::array<char, 5> escape{};
      (void)std::snprintf(escape.data(), escape.size(), "\\x%02x", static_cast<unsigned char>(c));
      quoted += escape.data();
    }
  }
  return quoted + (text.size() > kMost ? "…'" : "'");
}

Result<SourceFile> SourceFile::Open(UniqueFd fd, FileRef ref) {
  SourceFile file;
  file.fd_ = std::move(fd);
  file.ref_ = std::move(ref);
  if (file.ref_.path.empty()) {
    file.ref_.path = file.ref_.name;
  }
  if (::fstat(file.fd_.get(), &file.status_) != 0) {
    return SystemError("fstat of " + file.path(), errno);
  }
  if (!S_ISREG(file.status_.st_mode)) {
    return file.Bad("is not a regular file");
  }
  return file;
}

Result<void> SourceFile::ReadAt(std::uint64_t offset_bytes, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got =
        ::pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return SystemError("read of " + path() + " at byte " + std::to_string(offset_bytes), errno);
    }
    if (got == 0) {
      return Fault(ErrorCode::kFileChanged,
                   "became shorter while it was read: it had " + std::to_string(size()) +
                       " bytes, now it ends at or before byte " + std::to_string(offset_bytes));
    }
    offset_bytes += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

Result<std::string> SourceFile::ReadText(ByteRange range) const {
  std::string text(range.size_bytes, '\0');
  if (auto read = ReadAt(range.offset_bytes, std::as_writable_bytes(std::span(text))); !read.ok()) {
    return std::move(read).error();
  }
  return text;
}

void SourceFile::AdviseSequential() const {
  (void)::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
}

void SourceFile::WaitUntilSettled() const {
  const Nanoseconds youngest = std::max(SinceEpoch(status_.st_mtim), SinceEpoch(status_.st_ctim));
  timespec now = {};
  if (::clock_gettime(CLOCK_REALTIME, &now) != 0) {
    return;
  }
  const Nanoseconds age = SinceEpoch(now) - youngest;
  // A time in the future (a skewed clock) would wait without end and proves nothing.
  if (age >= Nanoseconds(0) && age < kTimestampGranularity) {
    std::this_thread::sleep_for(kTimestampGranularity - age);
  }
}

Result<void> SourceFile::CheckUnchanged() const {
  struct stat now = {};
  if (::fstat(fd_.get(), &now) != 0) {
    return SystemError("fstat of " + path(), errno);
  }
  if (!SameIdentity(now, status_)) {
    return Fault(ErrorCode::kFileChanged, "changed while it was read (size then " +
                                              std::to_string(status_.st_size) + ", now " +
                                              std::to_string(now.st_size) + " bytes)");
  }
  return {};
}

Error SourceFile::Fault(ErrorCode code, const std::string& message) const {
  return Error{code, path() + ": " + message, 0};
}

}  // namespace modelcache
