// Reference counts and sums over arenas.
#include "server/arena_table.h"

#include <utility>

namespace modelcache {

void ArenaTable::Add(ArenaEntry entry) {
  entry.users = 1;
  Account(entry) += entry.cost_bytes;
  const ArenaId id = entry.id;
  arenas_.emplace(id, entry);
}

void ArenaTable::Change(const ArenaId& id, int users, int lingerers) {
  auto found = arenas_.find(id);
  ArenaEntry& entry = found->second;
  Account(entry) -= entry.cost_bytes;
  entry.users += static_cast<std::uint32_t>(users);
  entry.lingerers += static_cast<std::uint32_t>(lingerers);
  Account(entry) += entry.cost_bytes;
  if (entry.users == 0 && entry.lingerers == 0) {
    closing_.emplace(id, entry.cost_bytes);
    unused_.push_back(id);
    arenas_.erase(found);
  }
}

void ArenaTable::Use(const ArenaId& id) { Change(id, 1, 0); }

void ArenaTable::Unuse(const ArenaId& id) { Change(id, -1, 0); }

void ArenaTable::UseLingering(const ArenaId& id) { Change(id, 0, 1); }

void ArenaTable::UnuseLingering(const ArenaId& id) { Change(id, 0, -1); }

void ArenaTable::Linger(const ArenaId& id) { Change(id, -1, 1); }

void ArenaTable::SetCost(const ArenaId& id, std::uint64_t cost_bytes, bool sealed) {
  auto found = arenas_.find(id);
  if (found == arenas_.end()) {
    return;
  }
  ArenaEntry& entry = found->second;
  Account(entry) -= entry.cost_bytes;
  entry.sealed = sealed;
  entry.cost_bytes = cost_bytes;
  Account(entry) += entry.cost_bytes;
}

const ArenaEntry* ArenaTable::Find(const ArenaId& id) const {
  auto found = arenas_.find(id);
  return found == arenas_.end() ? nullptr : &found->second;
}

std::vector<ArenaId> ArenaTable::TakeUnused() { return std::exchange(unused_, {}); }

void ArenaTable::Closed(const ArenaId& id) {
  auto found = closing_.find(id);
  if (found != closing_.end()) {
    closing_bytes_ -= found->second;
    closing_.erase(found);
  }
}

}  // namespace modelcache
