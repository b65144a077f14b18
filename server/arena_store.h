// ArenaStore: the only owner of the arenas' descriptors.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/ids.h"
#include "common/result.h"
#include "common/sys.h"
#include "common/unique_fd.h"
#include "proto/arena_header.h"
#include "proto/messages.h"
#include "server/actions.h"
#include "server/catalog.h"
#include "server/reaper.h"

namespace modelcache {

// System calls without decisions; event loop thread only. `reaper` must outlive it.
class ArenaStore {
 public:
  explicit ArenaStore(Reaper& reaper, Sys& sys = Sys::Real()) : reaper_(reaper), sys_(sys) {}

  // All or nothing; each with a fresh random id and the cost it is charged.
  // Errors: kLimit (descriptors), kSystem.
  Result<std::vector<ArenaEntry>> Create(std::span<const ReserveArena> wanted);

  // Seals the own arenas and validates their header pages and the manifest. On failure the arenas
  // are still there, for the caller to close.
  // Errors: kInUse (the loader still maps one writable), kCorrupt, kSystem.
  Result<SealedModel> Seal(const SealArenas& request);

  // -1 for an arena that is not here.
  [[nodiscard]] int Fd(const ArenaId& id) const;

  // Kernel memory it holds now.
  Result<std::uint64_t> AllocatedBytes(const ArenaId& id);

  // Gives the descriptor to the reaper.
  void Close(const ArenaId& id);

 private:
  struct Arena {
    UniqueFd fd;
    std::uint64_t size_bytes = 0;
  };

  Result<ArenaHeader> SealOne(const SealArenas& request, std::size_t index);
  Result<SealedModel> ReadManifest(const SealArenas& request, const ArenaHeader& last);

  Reaper& reaper_;
  Sys& sys_;
  std::unordered_map<ArenaId, Arena> arenas_;
};

}  // namespace modelcache
