// Sys: the few system calls that tests must be able to fail.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>

namespace modelcache {

// Each call has the contract of its namesake in section 2 of the manual: -1 (or MAP_FAILED) and
// errno on failure. The real one is stateless and may be used from any thread.
class Sys {
 public:
  virtual ~Sys() = default;
  virtual int MemfdCreate(const char* name, unsigned flags) = 0;
  virtual int Ftruncate(int fd, off_t length) = 0;
  virtual int AddSeals(int fd, int seals) = 0;
  virtual int GetSeals(int fd) = 0;
  virtual int Fstat(int fd, struct stat* out) = 0;
  virtual void* Mmap(void* address, std::size_t length, int protection, int flags, int fd,
                     off_t offset) = 0;

  // The kernel's own.
  static Sys& Real();
};

}  // namespace modelcache
