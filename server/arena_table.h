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
  bool leaving = false;     // its job failed; it goes as soon as the loader is gone
  std::uint32_t users = 0;  // resident models and running jobs that need it
};

// An arena lives while at least one user refers to it. When the last one lets go it is queued for
// closing, and its memory counts until the close is reported. Not synchronised.
class ArenaTable {
 public:
  // Adds an arena with one user. REQUIRES a new id.
  void Add(ArenaEntry entry);

  // REQUIRES a live arena.
  void Use(const ArenaId& id);
  void Unuse(const ArenaId& id);

  // What the arena really holds from now on. Ignored for an arena that is gone.
  void SetCost(const ArenaId& id, std::uint64_t cost_bytes, bool sealed);

  // Counts the arena as on its way out although its job still holds it.
  void MarkLeaving(const ArenaId& id);

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
  std::uint64_t& Account(const ArenaEntry& entry) {
    if (entry.leaving) {
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
