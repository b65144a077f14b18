// The real system calls.
#include "common/sys.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace modelcache {
namespace {

class RealSys final : public Sys {
 public:
  int MemfdCreate(const char* name, unsigned flags) override { return ::memfd_create(name, flags); }
  int Ftruncate(int fd, off_t length) override { return ::ftruncate(fd, length); }
  int AddSeals(int fd, int seals) override { return ::fcntl(fd, F_ADD_SEALS, seals); }
  int GetSeals(int fd) override { return ::fcntl(fd, F_GET_SEALS); }
  int Fstat(int fd, struct stat* out) override { return ::fstat(fd, out); }
  void* Mmap(void* address, std::size_t length, int protection, int flags, int fd,
             off_t offset) override {
    return ::mmap(address, length, protection, flags, fd, offset);
  }
};

}  // namespace

Sys& Sys::Real() {
  static RealSys real;
  return real;
}

}  // namespace modelcache
