// ArenaTable: which arenas exist, who needs them, and what they cost against the budget.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common/ids.h"

namespace modelcache {

// One arena. Its descriptor is owned by the arena store; `fd` is only the number clients are told.
struct ArenaEntry {
  ArenaId id;
  int fd = -1;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t cost_bytes = 0;  // what it is promised until it is sealed, then what it holds
  bool sealed = false;
  std::uint32_t users = 0;      // resident models and running jobs that need it
  std::uint32_t lingerers = 0;  // processes that still have it, but need not: they can be killed
};

// An arena lives while a user or a lingerer refers to it. When the last user lets go, its memory
// counts as on its way out; when the last lingerer lets go too, it is queued for closing, and its
// memory counts until the close is reported. Not synchronised.
class ArenaTable {
 public:
  // Adds an arena with one user. REQUIRES a new id.
  void Add(ArenaEntry entry);

  // REQUIRES a live arena.
  void Use(const ArenaId& id);
  void Unuse(const ArenaId& id);

  // What the arena really holds from now on. Ignored for an arena that is gone.
  void SetCost(const ArenaId& id, std::uint64_t cost_bytes, bool sealed);

  // As Use and Unuse for lingerers.
  void UseLingering(const ArenaId& id);
  void UnuseLingering(const ArenaId& id);
  // Makes one of its users a lingerer.
  void Linger(const ArenaId& id);

  // Nothing for an arena that is gone or being closed.
  [[nodiscard]] const ArenaEntry* Find(const ArenaId& id) const;

  // The arenas to close since the last call. Each must be reported by Closed().
  std::vector<ArenaId> TakeUnused();
  void Closed(const ArenaId& id);

  // Kernel memory of sealed arenas; promised to loads; of arenas on their way out.
  [[nodiscard]] std::uint64_t resident_bytes() const { return resident_bytes_; }
  [[nodiscard]] std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  [[nodiscard]] std::uint64_t closing_bytes() const { return closing_bytes_; }
  [[nodiscard]] std::size_t count() const { return arenas_.size(); }

 private:
  void Change(const ArenaId& id, int users, int lingerers);
  std::uint64_t& Account(const ArenaEntry& entry) {
    if (entry.users == 0) {
      return closing_bytes_;
    }
    return entry.sealed ? resident_bytes_ : reserved_bytes_;
  }

  std::unordered_map<ArenaId, ArenaEntry> arenas_;
  std::unordered_map<ArenaId, std::uint64_t> closing_;  // bytes of each
  std::vector<ArenaId> unused_;
  std::uint64_t resident_bytes_ = 0;
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t closing_bytes_ = 0;
};

}  // namespace modelcache
