// pread with full checks, identity by fstat.
#include "server/loader/source_file.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <thread>
#include <utility>

#include "common/file_stat.h"

namespace modelcache {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

// Time stamps of files move in steps of a scheduler tick, 10 ms at most.
constexpr Nanoseconds kTimestampGranularity = std::chrono::milliseconds(20);

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
  const FileStat stat = ToFileStat(status_);
  const std::int64_t youngest = std::max(stat.mtime_ns, stat.ctime_ns);
  timespec time = {};
  if (::clock_gettime(CLOCK_REALTIME, &time) != 0) {
    return;
  }
  const std::int64_t now = ToNanoseconds(time);
  // A time in the future (a skewed clock) would wait without end and proves nothing.
  if (youngest <= now && youngest > now - kTimestampGranularity.count()) {
    std::this_thread::sleep_for(kTimestampGranularity - Nanoseconds(now - youngest));
  }
}

Result<void> SourceFile::CheckUnchanged() const {
  struct stat now = {};
  if (::fstat(fd_.get(), &now) != 0) {
    return SystemError("fstat of " + path(), errno);
  }
  if (ToFileStat(now) != ToFileStat(status_)) {
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
