// Mapping: the only owner of a range of mapped memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "common/checked_math.h"
#include "common/result.h"
#include "common/sys.h"

namespace modelcache {

inline constexpr std::uint64_t kHugePageBytes = 2U << 20U;

enum class Access {
  kRead,         // MAP_SHARED, PROT_READ: files and arenas that are only looked at
  kCopyOnWrite,  // MAP_PRIVATE, PROT_READ|PROT_WRITE: writes stay in this process
  kWrite,        // MAP_SHARED, PROT_READ|PROT_WRITE: a loader filling its arena
};

// Unmaps when destroyed. Move-only. An empty mapping (0 bytes) maps nothing.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Maps `range` of `fd`, which may be closed afterwards. The offset need not be page-aligned.
  // A range of 2 MiB or more is placed so that address and file offset agree modulo 2 MiB, which
  // lets the kernel map huge pages of the file whole.
  // Errors: kSystem (the message names `mmap` and the size).
  static Result<Mapping> Map(int fd, ByteRange range, Access access, Sys& sys = Sys::Real());

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }

  // Asks the kernel to map `range` of this mapping for reading now (MADV_POPULATE_READ). A hint:
  // where the kernel refuses, pages are mapped when they are touched.
  void PopulateRead(ByteRange range) const;

 private:
  std::byte* data_ = nullptr;  // first byte of the range asked for
  std::size_t size_ = 0;
  std::byte* base_ = nullptr;  // what munmap takes
  std::size_t base_size_ = 0;
};

}  // namespace modelcache
