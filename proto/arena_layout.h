// Turns storage sizes into places in arenas.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/result.h"

namespace modelcache {

inline constexpr std::uint64_t kArenaHeaderBytes = 4096;
inline constexpr std::uint64_t kSmallAlignmentBytes = 64;
inline constexpr std::uint64_t kLargeStorageBytes = 2U << 20U;  // from here on 2 MiB boundaries
inline constexpr std::uint64_t kDefaultArenaMaxBytes = 1U << 30U;

// Smaller storages are never shared: looking for their twins would cost more than they do.
inline constexpr std::uint64_t kMinSharedBytes = 64U << 10U;

// A borrowed arena stays in memory while its borrower does. A storage is borrowed only if it is at
// least this fraction of the arena.
inline constexpr std::uint64_t kBorrowFraction = 256;

// Where one storage lies. `arena` counts the arenas of this layout from 0.
struct Placement {
  std::uint32_t arena = 0;
  std::uint64_t offset_bytes = 0;
};

struct ArenaPlan {
  std::uint64_t size_bytes = 0;    // final size of the memfd, a multiple of 4096; sparse
  std::uint64_t charge_bytes = 0;  // bytes of the pages that will be filled: what it costs
};

struct ArenaLayout {
  std::vector<ArenaPlan> arenas;            // at least one
  std::vector<Placement> placements;        // one per storage, in the caller's order
  std::uint64_t manifest_offset_bytes = 0;  // in the last arena
};

// Places storages of `sizes_bytes` and a manifest of `manifest_bytes` in arenas of at most
// `arena_max_bytes`; a storage that alone needs more gets an arena of its own that is larger.
// Small storages come first, packed on 64-byte boundaries; those of 2 MiB and more follow on 2 MiB
// boundaries; the manifest comes last, on a page of its own. Empty storages get the place of the
// next byte and take no room. Deterministic.
// Errors: kInvalidArgument when the sum overflows or arena_max_bytes < 4 MiB.
Result<ArenaLayout> PlanLayout(std::span<const std::uint64_t> sizes_bytes,
                               std::uint64_t manifest_bytes, std::uint64_t arena_max_bytes);

}  // namespace modelcache
