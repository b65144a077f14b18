// First the small storages, then the large ones on huge-page boundaries, then the manifest.
#include "proto/arena_layout.h"

#include <algorithm>
#include <string>

#include "common/checked_math.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kSmallestArenaMaxBytes = 4U << 20U;

// Appends to the current arena or opens the next one. Offsets stay far below 2^63 because the
// caller has bounded the sum of all sizes.
class Packer {
 public:
  Packer(ArenaLayout& layout, std::uint64_t arena_max_bytes)
      : layout_(layout), arena_max_bytes_(arena_max_bytes) {}

  Placement Place(std::uint64_t size_bytes, std::uint64_t alignment) {
    std::uint64_t offset = AlignUp(end_, alignment);
    if (AlignUp(offset + size_bytes, kPageBytes) > arena_max_bytes_ && end_ > kArenaHeaderBytes) {
      CloseArena();
      offset = AlignUp(end_, alignment);
    }
    Charge({offset, size_bytes});
    end_ = offset + size_bytes;
    return Placement{static_cast<std::uint32_t>(layout_.arenas.size()), offset};
  }

  void CloseArena() {
    layout_.arenas.push_back({AlignUp(end_, kPageBytes), charge_});
    end_ = charged_to_ = charge_ = kArenaHeaderBytes;
  }

 private:
  // Counts the pages of `range` that no earlier range of this arena has touched.
  void Charge(ByteRange range) {
    if (range.size_bytes == 0) {
      return;
    }
    const std::uint64_t first = std::max(charged_to_, AlignDown(range.offset_bytes, kPageBytes));
    const std::uint64_t last = AlignUp(range.offset_bytes + range.size_bytes, kPageBytes);
    if (last > first) {
      charge_ += last - first;
      charged_to_ = last;
    }
  }

  ArenaLayout& layout_;
  std::uint64_t arena_max_bytes_;
  std::uint64_t end_ = kArenaHeaderBytes;
  std::uint64_t charged_to_ = kArenaHeaderBytes;
  std::uint64_t charge_ = kArenaHeaderBytes;
};

Result<void> CheckSizes(std::span<const std::uint64_t> sizes_bytes, std::uint64_t manifest_bytes,
                        std::uint64_t arena_max_bytes) {
  if (arena_max_bytes < kSmallestArenaMaxBytes) {
    return Error{ErrorCode::kInvalidArgument,
                 "arenas of at most " + std::to_string(arena_max_bytes) +
                     " bytes, smallest limit " + std::to_string(kSmallestArenaMaxBytes),
                 0};
  }
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62U;
  std::uint64_t total = 0;
  for (const std::uint64_t size : sizes_bytes) {
    const auto padded = CheckedAdd(size, kLargeStorageBytes);
    const auto sum = padded ? CheckedAdd(total, *padded) : std::nullopt;
    if (!sum || *sum > kMostBytes) {
      return Error{ErrorCode::kInvalidArgument, "sum of the storage sizes overflows", 0};
    }
    total = *sum;
  }
  if (manifest_bytes > kMostBytes) {
    return Error{ErrorCode::kInvalidArgument, "size of the manifest overflows", 0};
  }
  return {};
}

}  // namespace

Result<ArenaLayout> PlanLayout(std::span<const std::uint64_t> sizes_bytes,
                               std::uint64_t manifest_bytes, std::uint64_t arena_max_bytes) {
  if (auto checked = CheckSizes(sizes_bytes, manifest_bytes, arena_max_bytes); !checked.ok()) {
    return std::move(checked).error();
  }
  ArenaLayout layout;
  layout.placements.resize(sizes_bytes.size());
  Packer packer(layout, arena_max_bytes);
  for (const bool large : {false, true}) {
    for (std::size_t i = 0; i < sizes_bytes.size(); ++i) {
      if ((sizes_bytes[i] >= kLargeStorageBytes) == large) {
        layout.placements[i] =
            packer.Place(sizes_bytes[i], large ? kLargeStorageBytes : kSmallAlignmentBytes);
      }
    }
  }
  layout.manifest_offset_bytes = packer.Place(manifest_bytes, kPageBytes).offset_bytes;
  packer.CloseArena();
  return layout;
}

}  // namespace modelcache
