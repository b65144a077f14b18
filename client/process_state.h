// ProcessState: what the library keeps once per process, and what fork does to it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/file_stat.h"
#include "common/ids.h"
#include "proto/arena_header.h"

namespace modelcache {

class Connection;

// Which memfd since boot. The kernel does not give an inode number of its memfds out again, and
// the change time is there for kernels that once did. Content and size of a sealed one are fixed.
struct ArenaKey {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t changed_ns = 0;
  auto operator<=>(const ArenaKey&) const = default;
};

// What was found out about a manifest when it was validated.
struct ManifestFacts {
  std::vector<std::uint32_t> overlapping;  // storages whose bytes an earlier storage covers too
  std::uint64_t payload_bytes = 0;
};

// What was found out about a sealed arena when it was validated.
struct ArenaFacts {
  ArenaHeader header;
  std::shared_ptr<const ManifestFacts> manifest;  // set once its manifest was validated
};

// One object, never destroyed. Its mutex is held for short, non-blocking work only: fork takes it,
// so that a child finds everything it guards whole.
class ProcessState {
 public:
  static ProcessState& Get();

  std::mutex& mutex() { return mutex_; }

  // Connections add themselves when they are made and leave when they are destroyed. Thread-safe.
  void Add(Connection* connection);
  void Remove(Connection* connection);

  // Copies of what was learnt of an arena; nullptr when nothing. Thread-safe.
  std::shared_ptr<const ArenaFacts> FindArena(const ArenaKey& key);
  void RememberArena(const ArenaKey& key, std::shared_ptr<const ArenaFacts> facts);

  // Shards an index file names; nullptr when unknown. Thread-safe.
  std::shared_ptr<const std::vector<std::string>> FindIndex(const FileStat& key);
  void RememberIndex(const FileStat& key, std::shared_ptr<const std::vector<std::string>> shards);

 private:
  ProcessState();
  static void BeforeFork();
  static void AfterForkInParent();
  static void AfterForkInChild();

  std::mutex mutex_;
  std::set<Connection*> connections_;
  std::set<Connection*> abandoned_;  // of our parent: kept, so that nothing ever destroys them
  std::map<ArenaKey, std::shared_ptr<const ArenaFacts>> arenas_;
  std::map<FileStat, std::shared_ptr<const std::vector<std::string>>> indexes_;
};

}  // namespace modelcache
