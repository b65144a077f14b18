// Samples first, then bytes.
#include "server/loader/sharing.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "common/digest.h"
#include "common/mapping.h"
#include "proto/arena_layout.h"
#include "server/loader/parallel.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

// Storages with one sample but different bytes: after this many, further ones are simply written.
constexpr std::size_t kMaxTwinsCompared = 4;

// The daemon's answer must fit into one message.
constexpr std::size_t kMaxAsked = 50'000;

class Finder {
 public:
  Finder(std::span<const SourceFile> files, std::span<const PlannedStorage> storages)
      : files_(files), storages_(storages) {
    sharing_.samples.resize(storages.size());
    sharing_.borrowed.resize(storages.size());
    sharing_.same_as.resize(storages.size());
    for (std::uint32_t i = 0; i < storages.size(); ++i) {
      sharing_.same_as[i] = i;
      if (storages[i].size_bytes >= kMinSharedBytes && IsSeekable(storages[i])) {
        large_.push_back(i);
      }
    }
  }

  Result<void> SampleAll() {
    return ParallelFor(large_.size(), [&](std::size_t item, std::span<std::byte> /*scratch*/) {
      auto sample = SamplePlanned(files_, storages_[large_[item]]);
      if (!sample.ok()) {
        return Result<void>(std::move(sample).error());
      }
      sharing_.samples[large_[item]] = *sample;
      return Result<void>();
    });
  }

  Result<void> FindTwins() {
    std::map<std::pair<std::uint64_t, Digest>, std::vector<std::uint32_t>> groups;
    for (const std::uint32_t storage : large_) {
      auto& group = groups[{storages_[storage].size_bytes, *sharing_.samples[storage]}];
      for (const std::uint32_t earlier : group) {
        auto equal = Equal(storages_[earlier], storages_[storage]);
        if (!equal.ok()) {
          return std::move(equal).error();
        }
        if (*equal) {
          sharing_.same_as[storage] = earlier;
          break;
        }
      }
      if (sharing_.same_as[storage] == storage && group.size() < kMaxTwinsCompared) {
        group.push_back(storage);
      }
    }
    return {};
  }

  Result<void> Borrow(LoaderChannel& channel) {
    CandidatesRequest request;
    for (const std::uint32_t storage : large_) {
      if (sharing_.same_as[storage] == storage && request.storages.size() < kMaxAsked) {
        request.storages.push_back(
            {storage, storages_[storage].size_bytes, *sharing_.samples[storage]});
      }
    }
    if (request.storages.empty()) {
      return {};
    }
    auto candidates = channel.AskCandidates(request);
    if (!candidates.ok()) {
      return std::move(candidates).error();
    }
    if (auto checked = CheckCandidates(candidates->reply); !checked.ok()) {
      return checked;
    }
    if (auto compared = CompareCandidates(*candidates); !compared.ok()) {
      return compared;
    }
    KeepWorthwhile(candidates->reply);
    return {};
  }

  Sharing Take() { return std::move(sharing_); }

 private:
  [[nodiscard]] Result<bool> Equal(const PlannedStorage& a, const PlannedStorage& b) const {
    constexpr std::size_t kPieceBytes = 256U << 10U;
    std::vector<std::byte> left(kPieceBytes);
    std::vector<std::byte> right(kPieceBytes);
    for (std::uint64_t at = 0; at < a.size_bytes; at += kPieceBytes) {
      const auto size = std::min<std::uint64_t>(kPieceBytes, a.size_bytes - at);
      auto read = ReadStorage(files_, a, at, std::span(left).first(size));
      if (read.ok()) {
        read = ReadStorage(files_, b, at, std::span(right).first(size));
      }
      if (!read.ok()) {
        return std::move(read).error();
      }
      if (std::memcmp(left.data(), right.data(), size) != 0) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] Result<void> CheckCandidates(const CandidatesReply& reply) const {
    for (const StorageCandidate& candidate : reply.candidates) {
      const bool known = candidate.storage < storages_.size() &&
                         candidate.arena < reply.arenas.size() &&
                         sharing_.samples[candidate.storage].has_value();
      if (!known || !Within({candidate.offset_bytes, storages_[candidate.storage].size_bytes},
                            reply.arenas[candidate.arena].size_bytes)) {
        return Error{ErrorCode::kProtocol,
                     "candidate for storage " + std::to_string(candidate.storage) + " at byte " +
                         std::to_string(candidate.offset_bytes) + " of arena " +
                         std::to_string(candidate.arena) + " is outside of it",
                     0};
      }
    }
    return {};
  }

  // One work item per storage, so that no two threads decide about the same one.
  Result<void> CompareCandidates(const Candidates& candidates) {
    std::map<std::uint32_t, std::vector<StorageCandidate>> by_storage;
    for (const StorageCandidate& candidate : candidates.reply.candidates) {
      by_storage[candidate.storage].push_back(candidate);
    }
    std::vector<std::vector<StorageCandidate>> items;
    items.reserve(by_storage.size());
    for (auto& [storage, places] : by_storage) {
      items.push_back(std::move(places));
    }
    return ParallelFor(items.size(), [&](std::size_t item, std::span<std::byte> scratch) {
      for (const StorageCandidate& candidate : items[item]) {
        auto digest = CompareOne(candidate, candidates.arenas[candidate.arena].get(), scratch);
        if (!digest.ok()) {
          return Result<void>(std::move(digest).error());
        }
        if (digest->has_value()) {
          sharing_.borrowed[candidate.storage] =
              BorrowedPlace{candidate.arena, candidate.offset_bytes, **digest};
          break;
        }
      }
      return Result<void>();
    });
  }

  // The digest of the storage when the bytes are equal.
  [[nodiscard]] Result<std::optional<Digest>> CompareOne(const StorageCandidate& candidate,
                                                         int arena,
                                                         std::span<std::byte> scratch) const {
    const PlannedStorage& storage = storages_[candidate.storage];
    auto mapping = Mapping::Map(arena, {candidate.offset_bytes, storage.size_bytes}, Access::kRead);
    if (!mapping.ok()) {
      return std::move(mapping).error();
    }
    std::vector<Digest> leaves;
    std::uint64_t at = 0;
    bool equal = true;
    const Error stop{ErrorCode::kCancelled, "the bytes differ", 0};
    auto streamed = StreamStorage(files_, storage, scratch, [&](std::span<const std::byte> leaf) {
      equal = std::memcmp(mapping->data() + at, leaf.data(), leaf.size()) == 0;
      leaves.push_back(HashBytes(leaf));
      at += leaf.size();
      return equal ? Result<void>() : Result<void>(stop);
    });
    if (!equal) {
      return std::optional<Digest>();
    }
    if (!streamed.ok()) {
      return std::move(streamed).error();
    }
    return std::optional(CombineLeaves(leaves, storage.size_bytes));
  }

  // Gives up arenas of which too little would be used, and numbers the others anew.
  void KeepWorthwhile(const CandidatesReply& reply) {
    std::vector<std::uint64_t> used_bytes(reply.arenas.size());
    for (const std::uint32_t storage : large_) {
      if (const auto& place = sharing_.borrowed[storage]) {
        used_bytes[place->arena] += storages_[storage].size_bytes;
      }
    }
    std::vector<std::optional<std::uint32_t>> number(reply.arenas.size());
    for (std::size_t i = 0; i < reply.arenas.size(); ++i) {
      const ArenaSpecRef& arena = reply.arenas[i];
      if (used_bytes[i] > 0 && used_bytes[i] >= arena.size_bytes / kBorrowFraction) {
        number[i] = static_cast<std::uint32_t>(sharing_.arenas.size());
        sharing_.arenas.push_back({arena.id, arena.size_bytes});
      }
    }
    for (auto& place : sharing_.borrowed) {
      if (place && number[place->arena]) {
        place->arena = *number[place->arena];
      } else {
        place.reset();
      }
    }
  }

  std::span<const SourceFile> files_;
  std::span<const PlannedStorage> storages_;
  std::vector<std::uint32_t> large_;
  Sharing sharing_;
};

}  // namespace

Result<Sharing> FindSharing(std::span<const SourceFile> files,
                            std::span<const PlannedStorage> storages, LoaderChannel* ask) {
  Finder finder(files, storages);
  auto done = finder.SampleAll();
  if (done.ok()) {
    done = finder.FindTwins();
  }
  if (done.ok() && ask != nullptr) {
    done = finder.Borrow(*ask);
  }
  if (!done.ok()) {
    return std::move(done).error();
  }
  return finder.Take();
}

}  // namespace modelcache
