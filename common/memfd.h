// Memfds: created at their final size, inspected, sealed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/result.h"
#include "common/sys.h"
#include "common/unique_fd.h"

namespace modelcache {

// What tells one memfd from another and how much memory it holds.
struct MemfdInfo {
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t allocated_bytes = 0;  // pages the kernel really holds for it
  int seals = 0;                      // F_SEAL_*
  std::uint64_t device = 0;           // with the inode and the change time: which memfd since boot
  std::int64_t changed_ns = 0;        // CLOCK_REALTIME
};

// A close-on-exec memfd of exactly `size_bytes` (sparse, zero), not executable where the kernel
// knows MFD_NOEXEC_SEAL, sealed against growing and shrinking.
// Errors: kLimit (descriptors), kSystem.
Result<UniqueFd> CreateMemfd(const std::string& name, std::uint64_t size_bytes,
                             Sys& sys = Sys::Real());

// A memfd that holds `bytes` and nothing can change any more. Errors: kLimit, kNoRoom (memory),
// kSystem.
Result<UniqueFd> MakeSealedMemfd(const std::string& name, std::span<const std::byte> bytes);

// Forbids every further write and every further seal. Every writable shared map must be gone.
// Errors: kInUse when one is left (EBUSY), kSystem.
Result<void> SealMemfd(int fd, Sys& sys = Sys::Real());

// Errors: kCorrupt when `fd` is not a regular memory file that can be sealed, kSystem.
Result<MemfdInfo> InspectMemfd(int fd, Sys& sys = Sys::Real());

// True when nothing can change the content or the size any more.
bool IsSealed(const MemfdInfo& info);

}  // namespace modelcache
