// StorageIndex: where the bytes of every resident storage lie, so that equal ones can be shared.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "common/ids.h"
#include "proto/arena_layout.h"

namespace modelcache {

// The bytes of one storage.
struct StoragePlace {
  ArenaId arena;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
  Digest sample;
};

// Counts each place once, however many models use it. Not synchronised.
class StorageIndex {
 public:
  // The places of a model; a place may occur more than once. Empty storages are ignored.
  void Add(std::span<const StoragePlace> places);
  // REQUIRES the same places as one earlier Add.
  void Remove(std::span<const StoragePlace> places);

  // At most `limit` places that may hold the same bytes as a storage of this size and sample.
  [[nodiscard]] std::vector<StoragePlace> Candidates(std::uint64_t size_bytes, const Digest& sample,
                                                     std::size_t limit) const;

  // Sum of the sizes of all places.
  [[nodiscard]] std::uint64_t payload_bytes() const { return payload_bytes_; }

 private:
  struct Key {
    ArenaId arena;
    std::uint64_t offset_bytes = 0;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<ArenaId>{}(key.arena) ^ (key.offset_bytes * 0x9E3779B97F4A7C15ULL);
    }
  };
  struct Counted {
    StoragePlace place;
    std::uint32_t users = 0;
  };

  std::unordered_map<Key, Counted, KeyHash> places_;
  std::unordered_multimap<Digest, Key> by_sample_;
  std::uint64_t payload_bytes_ = 0;
};

// The distinct, not empty places of `places`, in order.
std::vector<StoragePlace> DistinctPlaces(std::span<const StoragePlace> places);

}  // namespace modelcache
