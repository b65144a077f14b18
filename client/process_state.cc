// The registry of connections, the fork handlers and the small caches of validated facts.
#include "client/process_state.h"

#include <pthread.h>

#include <utility>

#include "client/connection.h"

namespace modelcache {
namespace {

constexpr std::size_t kMaxRemembered = 4096;  // entries; then start again rather than grow

template <typename Map>
typename Map::mapped_type Find(std::mutex& mutex, const Map& map,
                               const typename Map::key_type& key) {
  const std::lock_guard lock(mutex);
  const auto found = map.find(key);
  return found == map.end() ? nullptr : found->second;
}

template <typename Map>
void Remember(std::mutex& mutex, Map& map, const typename Map::key_type& key,
              typename Map::mapped_type value) {
  const std::lock_guard lock(mutex);
  if (map.size() >= kMaxRemembered) {
    map.clear();
  }
  map[key] = std::move(value);
}

}  // namespace

ProcessState& ProcessState::Get() {
  static auto* const state = new ProcessState();  // outlives the destructors of every static
  return *state;
}

ProcessState::ProcessState() {
  (void)::pthread_atfork(&BeforeFork, &AfterForkInParent, &AfterForkInChild);
}

void ProcessState::BeforeFork() { Get().mutex_.lock(); }

void ProcessState::AfterForkInParent() { Get().mutex_.unlock(); }

void ProcessState::AfterForkInChild() {
  ProcessState& state = Get();
  for (Connection* connection : state.connections_) {
    connection->AbandonInChild();
  }
  // Swapped, not copied: allocating here could meet a lock of another library.
  if (state.abandoned_.empty()) {
    state.abandoned_.swap(state.connections_);
  } else {
    state.abandoned_.merge(state.connections_);
  }
  state.mutex_.unlock();
}

void ProcessState::Add(Connection* connection) {
  const std::lock_guard lock(mutex_);
  connections_.insert(connection);
}

void ProcessState::Remove(Connection* connection) {
  const std::lock_guard lock(mutex_);
  connections_.erase(connection);
}

std::shared_ptr<const ArenaFacts> ProcessState::FindArena(const ArenaKey& key) {
  return Find(mutex_, arenas_, key);
}

void ProcessState::RememberArena(const ArenaKey& key, std::shared_ptr<const ArenaFacts> facts) {
  Remember(mutex_, arenas_, key, std::move(facts));
}

std::shared_ptr<const std::vector<std::string>> ProcessState::FindIndex(const FileStat& key) {
  return Find(mutex_, indexes_, key);
}

void ProcessState::RememberIndex(const FileStat& key,
                                 std::shared_ptr<const std::vector<std::string>> shards) {
  Remember(mutex_, indexes_, key, std::move(shards));
}

}  // namespace modelcache
