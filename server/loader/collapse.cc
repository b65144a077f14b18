// MADV_COLLAPSE over a read-only shared map: the pages of a sealed memfd belong to the file, so one
// process that collapses them does it for all.
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>

#include "common/checked_math.h"
#include "common/mapping.h"
#include "common/memfd.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/manifest.h"
#include "server/loader/job.h"

namespace modelcache {
namespace {

constexpr int kMadvCollapse = 25;  // MADV_COLLAPSE, Linux 6.1; the C library's headers may be older

constexpr std::uint64_t kStepBytes = 16U << 20U;

struct OpenArena {
  Mapping mapping;
  ArenaId id;
};

void CollapseRange(const Mapping& arena, ByteRange storage) {
  const std::uint64_t first = AlignUp(storage.offset_bytes, kHugePageBytes);
  const std::uint64_t last = AlignDown(storage.offset_bytes + storage.size_bytes, kHugePageBytes);
  for (std::uint64_t at = first; at < last; at += kStepBytes) {
    // The kernel may have no huge page left: the next step can still succeed.
    (void)::madvise(arena.data() + at, std::min(kStepBytes, last - at), kMadvCollapse);
  }
}

// The manifest of the model that owns the last arena.
Result<Manifest> FindManifest(const Mapping& arena) {
  auto header = DecodeArenaHeader(arena.bytes(), arena.size());
  if (!header.ok()) {
    return std::move(header).error();
  }
  return Manifest::Parse(
      arena.bytes().subspan(header->manifest.offset_bytes, header->manifest.size_bytes));
}

std::vector<OpenArena> MapArenas(const std::vector<UniqueFd>& arenas) {
  std::vector<OpenArena> open;
  for (const UniqueFd& fd : arenas) {
    auto info = InspectMemfd(fd.get());
    if (!info.ok() || info->size_bytes < kArenaHeaderBytes) {
      continue;
    }
    auto mapping = Mapping::Map(fd.get(), {0, info->size_bytes}, Access::kRead);
    if (!mapping.ok()) {
      continue;
    }
    auto header = DecodeArenaHeader(mapping->bytes(), info->size_bytes);
    if (header.ok()) {
      open.push_back({std::move(*mapping), header->arena_id});
    }
  }
  return open;
}

}  // namespace

void RunCollapse(const std::vector<UniqueFd>& arenas) {
  (void)::setpriority(PRIO_PROCESS, 0, 19);
  const std::vector<OpenArena> open = MapArenas(arenas);
  if (open.empty()) {
    return;
  }
  const auto manifest = FindManifest(open.back().mapping);
  if (!manifest.ok()) {
    return;
  }
  for (const StorageRecord& storage : manifest->storages()) {
    if (storage.size_bytes < kHugePageBytes) {
      continue;
    }
    const ArenaRecord& record = manifest->arenas()[storage.arena];
    for (const OpenArena& arena : open) {
      if (std::memcmp(record.id, arena.id.bytes.data(), sizeof record.id) == 0) {
        CollapseRange(arena.mapping, {storage.offset_bytes, storage.size_bytes});
      }
    }
  }
}

}  // namespace modelcache
