// mmap and munmap with alignment for huge pages.
#include "common/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace modelcache {
namespace {

std::uint64_t PageBytes() {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return page;
}

Error MapError(std::uint64_t size_bytes) {
  const int saved = errno;
  return SystemError("mmap of " + std::to_string(size_bytes) + " bytes", saved);
}

// Reserves address space and returns the address inside it that is congruent to `file_offset`
// modulo 2 MiB; the surplus at both ends is given back. MAP_FAILED and errno on failure.
void* ReserveAligned(std::uint64_t length, std::uint64_t file_offset, Sys& sys) {
  const std::uint64_t padded = length + kHugePageBytes;
  void* reserved =
      sys.Mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<std::uint64_t>(begin);
  const std::uint64_t skip = (file_offset - address) % kHugePageBytes;
  if (skip > 0) {
    (void)::munmap(begin, skip);
  }
  (void)::munmap(begin + skip + length, kHugePageBytes - skip);
  return begin + skip;
}

}  // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (base_ != nullptr) {
      (void)::munmap(base_, base_size_);
    }
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    base_ = std::exchange(other.base_, nullptr);
    base_size_ = std::exchange(other.base_size_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (base_ != nullptr) {
    (void)::munmap(base_, base_size_);
  }
}

Result<Mapping> Mapping::Map(int fd, ByteRange range, Access access, Sys& sys) {
  if (range.size_bytes == 0) {
    return Mapping();
  }
  constexpr std::uint64_t kMost = std::uint64_t{1} << 47U;  // user address space of x86-64
  if (!Within(range, kMost)) {
    errno = EOVERFLOW;
    return MapError(range.size_bytes);
  }
  const std::uint64_t start = AlignDown(range.offset_bytes, PageBytes());
  const std::uint64_t length = AlignUp(range.offset_bytes - start + range.size_bytes, PageBytes());
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  int flags = access == Access::kCopyOnWrite ? MAP_PRIVATE : MAP_SHARED;
  void* wanted = nullptr;
  if (length >= kHugePageBytes) {
    wanted = ReserveAligned(length, start, sys);
    if (wanted == MAP_FAILED) {
      return MapError(range.size_bytes);
    }
    flags |= MAP_FIXED;
  }
  void* mapped = sys.Mmap(wanted, length, protection, flags, fd, static_cast<off_t>(start));
  if (mapped == MAP_FAILED) {
    Error error = MapError(range.size_bytes);
    if (wanted != nullptr) {
      (void)::munmap(wanted, length);
    }
    return error;
  }
  Mapping mapping;
  mapping.base_ = static_cast<std::byte*>(mapped);
  mapping.base_size_ = length;
  mapping.data_ = mapping.base_ + (range.offset_bytes - start);
  mapping.size_ = range.size_bytes;
  return mapping;
}

void Mapping::PopulateRead(ByteRange range) const {
  if (!Within(range, size_) || range.size_bytes == 0) {
    return;
  }
  const auto begin =
      AlignDown(reinterpret_cast<std::uint64_t>(data_) + range.offset_bytes, PageBytes());
  const auto end = AlignUp(
      reinterpret_cast<std::uint64_t>(data_) + range.offset_bytes + range.size_bytes, PageBytes());
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
}

}  // namespace modelcache
