// FakeSys: the real system calls, of which the Nth can be made to fail.
#pragma once

#include <sys/mman.h>

#include <cerrno>

#include "common/sys.h"

namespace modelcache {

// Fails call number `fail_at` (counted from 0 over all functions) with `errno_value`.
class FakeSys final : public Sys {
 public:
  explicit FakeSys(int fail_at, int errno_value = EIO)
      : fail_at_(fail_at), errno_value_(errno_value) {}

  // True once the call to fail was reached; a run that never reaches it ends a "fail every N" loop.
  [[nodiscard]] bool failed() const { return failed_; }
  [[nodiscard]] unsigned last_memfd_flags() const { return last_memfd_flags_; }

  int MemfdCreate(const char* name, unsigned flags) override {
    last_memfd_flags_ = flags;
    return Fails() ? -1 : Real().MemfdCreate(name, flags);
  }
  int Ftruncate(int fd, off_t length) override {
    return Fails() ? -1 : Real().Ftruncate(fd, length);
  }
  int AddSeals(int fd, int seals) override { return Fails() ? -1 : Real().AddSeals(fd, seals); }
  int GetSeals(int fd) override { return Fails() ? -1 : Real().GetSeals(fd); }
  int Fstat(int fd, struct stat* out) override { return Fails() ? -1 : Real().Fstat(fd, out); }
  void* Mmap(void* address, std::size_t length, int protection, int flags, int fd,
             off_t offset) override {
    return Fails() ? MAP_FAILED : Real().Mmap(address, length, protection, flags, fd, offset);
  }

 private:
  bool Fails() {
    if (calls_++ != fail_at_) {
      return false;
    }
    failed_ = true;
    errno = errno_value_;
    return true;
  }

  int fail_at_;
  int errno_value_;
  int calls_ = 0;
  bool failed_ = false;
  unsigned last_memfd_flags_ = 0;
};

}  // namespace modelcache
