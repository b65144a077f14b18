// SourceFile: one file of a model, read through its descriptor and watched for changes.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/checked_math.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "proto/messages.h"

namespace modelcache {

// Owns the descriptor. Read with pread and never mapped: a file that shrinks under a map kills the
// reader with SIGBUS, and pread into a cache-hot buffer was measured no slower. Reads from any
// thread.
class SourceFile {
 public:
  // Remembers the identity (device, inode, size, mtime, ctime) at this moment.
  // Errors: kBadFile when it is not a regular file, kSystem.
  static Result<SourceFile> Open(UniqueFd fd, FileRef ref);

  [[nodiscard]] const std::string& name() const { return ref_.name; }
  [[nodiscard]] const std::string& path() const { return ref_.path; }
  [[nodiscard]] std::uint64_t size() const { return static_cast<std::uint64_t>(status_.st_size); }

  // Fills `out` from `offset_bytes` on. Errors: kFileChanged when the file has become shorter,
  // kSystem. REQUIRES that the range lay inside the file when it was opened.
  Result<void> ReadAt(std::uint64_t offset_bytes, std::span<std::byte> out) const;

  // The bytes of `range` as text. Errors: as ReadAt.
  [[nodiscard]] Result<std::string> ReadText(ByteRange range) const;

  // Tells the kernel that all of it will be read soon, from front to back.
  void AdviseSequential() const;

  // Waits (20 ms at most) until the last change of the file is older than the granularity of time
  // stamps, so that whoever writes from now on leaves another time.
  void WaitUntilSettled() const;

  // Errors: kFileChanged when the identity is no longer what it was at Open.
  [[nodiscard]] Result<void> CheckUnchanged() const;

  // An error about this file: "<path>: <message>".
  [[nodiscard]] Error Fault(ErrorCode code, const std::string& message) const;
  [[nodiscard]] Error Bad(const std::string& message) const {
    return Fault(ErrorCode::kBadFile, message);
  }

 private:
  UniqueFd fd_;
  FileRef ref_;
  struct stat status_ = {};
};

// "'text'" with unprintable bytes as \xNN, cut after 32 bytes: file content inside messages.
std::string Quoted(std::string_view text);

}  // namespace modelcache
