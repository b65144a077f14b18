// Places by location and by sample.
#include "server/storage_index.h"

#include <algorithm>
#include <tuple>

namespace modelcache {

void StorageIndex::Add(std::span<const StoragePlace> places) {
  for (const StoragePlace& place : places) {
    if (place.size_bytes == 0) {
      continue;
    }
    const Key key{place.arena, place.offset_bytes};
    Counted& counted = places_[key];
    if (counted.users++ == 0) {
      counted.place = place;
      payload_bytes_ += place.size_bytes;
      if (place.size_bytes >= kMinSharedBytes) {
        by_sample_.emplace(place.sample, key);
      }
    }
  }
}

void StorageIndex::Remove(std::span<const StoragePlace> places) {
  for (const StoragePlace& place : places) {
    const Key key{place.arena, place.offset_bytes};
    auto found = places_.find(key);
    if (found == places_.end() || place.size_bytes == 0 || --found->second.users > 0) {
      continue;
    }
    const StoragePlace& stored = found->second.place;
    payload_bytes_ -= stored.size_bytes;
    auto [first, last] = by_sample_.equal_range(stored.sample);
    auto entry = std::find_if(first, last, [&](const auto& pair) { return pair.second == key; });
    if (entry != last) {
      by_sample_.erase(entry);
    }
    places_.erase(found);
  }
}

std::vector<StoragePlace> StorageIndex::Candidates(std::uint64_t size_bytes, const Digest& sample,
                                                   std::size_t limit) const {
  std::vector<StoragePlace> found;
  auto [first, last] = by_sample_.equal_range(sample);
  for (auto entry = first; entry != last && found.size() < limit; ++entry) {
    const StoragePlace& place = places_.at(entry->second).place;
    if (place.size_bytes == size_bytes) {
      found.push_back(place);
    }
  }
  return found;
}

std::vector<StoragePlace> DistinctPlaces(std::span<const StoragePlace> places) {
  std::vector<StoragePlace> distinct;
  std::copy_if(places.begin(), places.end(), std::back_inserter(distinct),
               [](const StoragePlace& place) { return place.size_bytes > 0; });
  const auto by_location = [](const StoragePlace& place) {
    return std::tuple(place.arena, place.offset_bytes);
  };
  std::sort(distinct.begin(), distinct.end(),
            [&](const auto& a, const auto& b) { return by_location(a) < by_location(b); });
  auto last = std::unique(distinct.begin(), distinct.end(), [&](const auto& a, const auto& b) {
    return by_location(a) == by_location(b);
  });
  distinct.erase(last, distinct.end());
  return distinct;
}

}  // namespace modelcache
