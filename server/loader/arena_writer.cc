// Placement, the copy loop, and what makes an arena self-describing.
#include "server/loader/arena_writer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <limits>
#include <string>
#include <utility>

#include "common/digest.h"
#include "proto/arena_header.h"
#include "server/loader/parallel.h"
#include "server/loader/record_crc.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

Result<void> WriteAt(int arena, std::uint64_t offset_bytes, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done =
        ::pwrite(arena, bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      const int saved = done < 0 ? errno : ENOSPC;
      Error error = SystemError("write of " + std::to_string(bytes.size()) +
                                    " bytes into an arena at byte " + std::to_string(offset_bytes),
                                saved);
      if (saved == ENOSPC || saved == ENOMEM) {
        error.code = ErrorCode::kNoRoom;
      }
      return error;
    }
    offset_bytes += static_cast<std::uint64_t>(done);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return {};
}

// A piece of work: some leaves of one storage.
struct FillItem {
  std::uint32_t storage = 0;
  bool write = true;  // false: the bytes are in an arena already, only their sum is asked for
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
};

// Copies and hashes storages; the state all threads share.
class Filler {
 public:
  Filler(const WriteInput& input, PlacedModel& placed) : input_(input), placed_(placed) {
    leaves_.resize(input.storages.size());
    sums_.resize(input.storages.size());
    for (const std::uint32_t storage : placed.written) {
      AddItems(storage, true);
    }
    for (std::uint32_t i = 0; i < input.storages.size(); ++i) {
      if (input.storages[i].crc && leaves_[i].empty()) {
        AddItems(i, false);
      }
    }
    SpreadOverArenas();
  }

  Result<void> Run(const ReportProgress& report) {
    const auto work = [this](std::size_t item, std::span<std::byte> scratch) {
      return Fill(items_[item], scratch);
    };
    auto filled = ParallelFor(items_.size(), work, [&] { return report(Progress()); });
    return filled.ok() ? report(Progress()) : filled;
  }

  // Digests and samples of everything, once all is written. Errors: also kBadFile, a wrong CRC.
  Result<void> FinishSpec() {
    for (std::uint32_t i = 0; i < input_.storages.size(); ++i) {
      if (input_.storages[i].crc) {
        if (auto checked = CheckCrc(input_.files, input_.storages[i], sums_[i]); !checked.ok()) {
          return checked;
        }
      }
    }
    for (const std::uint32_t storage : placed_.written) {
      StorageSpec& spec = placed_.spec.storages[storage];
      spec.digest = CombineLeaves(leaves_[storage], spec.size_bytes);
      auto sample = SampleOf(storage, spec);
      if (!sample.ok()) {
        return std::move(sample).error();
      }
      spec.sample = *sample;
    }
    for (std::uint32_t i = 0; i < placed_.spec.storages.size(); ++i) {
      StorageSpec& spec = placed_.spec.storages[i];
      const StorageSpec& original = placed_.spec.storages[input_.sharing.same_as[i]];
      spec.digest = original.digest;
      spec.sample = original.sample;
    }
    return {};
  }

 private:
  void AddItems(std::uint32_t storage, bool write) {
    const PlannedStorage& planned = input_.storages[storage];
    total_bytes_ += planned.size_bytes;
    const auto count = (planned.size_bytes + kDigestLeafBytes - 1) / kDigestLeafBytes;
    leaves_[storage].resize(write ? count : 0);
    sums_[storage].resize(planned.crc ? count : 0);
    if (!IsSeekable(planned)) {
      items_.push_back({storage, write, 0, planned.size_bytes});
      return;
    }
    for (std::uint64_t at = 0; at < planned.size_bytes; at += kDigestLeafBytes) {
      items_.push_back({storage, write, at, std::min(kDigestLeafBytes, planned.size_bytes - at)});
    }
  }

  // The kernel lets one thread at a time write to a memfd: neighbours in the list go to different
  // arenas, all of which fill at the same relative speed.
  void SpreadOverArenas() {
    const auto progress = [this](const FillItem& item) {
      const StorageSpec& spec = placed_.spec.storages[item.storage];
      return static_cast<double>(spec.offset_bytes + item.offset_bytes) /
             static_cast<double>(placed_.spec.arenas[spec.arena].size_bytes);
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const FillItem& a, const FillItem& b) {
      return progress(a) < progress(b);
    });
  }

  Result<void> Fill(const FillItem& item, std::span<std::byte> scratch) {
    const PlannedStorage& planned = input_.storages[item.storage];
    if (!IsSeekable(planned)) {
      std::uint64_t at = 0;
      return StreamStorage(input_.files, planned, scratch, [&](std::span<const std::byte> leaf) {
        auto written = TakeLeaf(item, at, leaf);
        at += leaf.size();
        return written;
      });
    }
    const auto leaf = scratch.first(item.size_bytes);
    if (auto read = ReadStorage(input_.files, planned, item.offset_bytes, leaf); !read.ok()) {
      return read;
    }
    return TakeLeaf(item, item.offset_bytes, leaf);
  }

  Result<void> TakeLeaf(const FillItem& item, std::uint64_t offset_bytes,
                        std::span<const std::byte> leaf) {
    const std::uint64_t number = offset_bytes / kDigestLeafBytes;
    done_bytes_ += leaf.size();
    if (!sums_[item.storage].empty()) {
      sums_[item.storage][number] = CrcOf(leaf);
    }
    if (!item.write) {
      return {};
    }
    leaves_[item.storage][number] = HashBytes(leaf);
    const StorageSpec& spec = placed_.spec.storages[item.storage];
    return WriteAt(OwnArena(spec), spec.offset_bytes + offset_bytes, leaf);
  }

  [[nodiscard]] Result<Digest> SampleOf(std::uint32_t storage, const StorageSpec& spec) const {
    if (const auto& known = input_.sharing.samples[storage]) {
      return *known;
    }
    int failed = 0;
    const auto read_back = [&](std::uint64_t offset_bytes, std::span<std::byte> out) {
      const ssize_t got = ::pread(OwnArena(spec), out.data(), out.size(),
                                  static_cast<off_t>(spec.offset_bytes + offset_bytes));
      failed = got < 0 ? errno : 0;
      return got == static_cast<ssize_t>(out.size());
    };
    const auto sample = SampleStorage(spec.size_bytes, read_back);
    return sample ? Result<Digest>(*sample)
                  : Result<Digest>(SystemError("read back from an arena", failed));
  }

  [[nodiscard]] int OwnArena(const StorageSpec& spec) const {
    return input_.arenas.arenas[spec.arena - input_.sharing.arenas.size()].get();
  }

  [[nodiscard]] LoaderProgressEvent Progress() const { return {done_bytes_, total_bytes_}; }

  const WriteInput& input_;
  PlacedModel& placed_;
  std::vector<FillItem> items_;
  std::vector<std::vector<Digest>> leaves_;
  std::vector<std::vector<std::uint32_t>> sums_;  // CRCs, where the storage has one
  std::atomic<std::uint64_t> done_bytes_{0};
  std::uint64_t total_bytes_ = 0;
};

Result<void> WriteHeaders(const WriteInput& input, const PlacedModel& placed,
                          std::uint64_t manifest_bytes) {
  const auto count = static_cast<std::uint32_t>(input.arenas.arenas.size());
  for (std::uint32_t i = 0; i < count; ++i) {
    ArenaHeader header;
    header.arena_id = input.arenas.ids[i];
    header.model_id = input.model_id;
    header.arena_index = i;
    header.arena_count = count;
    header.arena_bytes = placed.layout.arenas[i].size_bytes;
    if (i + 1 == count) {
      header.manifest = {placed.layout.manifest_offset_bytes, manifest_bytes};
    }
    std::array<std::byte, kArenaHeaderBytes> page{};
    EncodeArenaHeader(header, page);
    if (auto written = WriteAt(input.arenas.arenas[i].get(), 0, page); !written.ok()) {
      return written;
    }
  }
  return {};
}

// Storages of their own get the next place of the layout, others the place of what they repeat.
void AssignPlaces(const Sharing& sharing, PlacedModel& placed) {
  const auto own_first = static_cast<std::uint32_t>(sharing.arenas.size());
  for (std::size_t i = 0; i < placed.written.size(); ++i) {
    StorageSpec& spec = placed.spec.storages[placed.written[i]];
    spec.arena = own_first + placed.layout.placements[i].arena;
    spec.offset_bytes = placed.layout.placements[i].offset_bytes;
  }
  for (std::uint32_t i = 0; i < placed.spec.storages.size(); ++i) {
    StorageSpec& spec = placed.spec.storages[i];
    if (const auto& place = sharing.borrowed[i]) {
      spec.arena = place->arena;
      spec.offset_bytes = place->offset_bytes;
      spec.digest = place->digest;
      spec.sample = *sharing.samples[i];
    }
  }
  for (std::uint32_t i = 0; i < placed.spec.storages.size(); ++i) {
    const StorageSpec& original = placed.spec.storages[sharing.same_as[i]];
    placed.spec.storages[i].arena = original.arena;
    placed.spec.storages[i].offset_bytes = original.offset_bytes;
  }
}

// The size of the manifest depends on the number of arenas, and that on the size of the manifest.
Result<void> PlanOwnArenas(std::span<const std::uint64_t> sizes_bytes,
                           std::uint64_t arena_max_bytes, std::size_t borrowed,
                           PlacedModel& placed) {
  for (std::size_t own = 1;;) {
    auto layout =
        PlanLayout(sizes_bytes, ManifestBytes(placed.spec, borrowed + own), arena_max_bytes);
    if (!layout.ok()) {
      return std::move(layout).error();
    }
    placed.layout = std::move(*layout);
    if (placed.layout.arenas.size() <= own) {
      return {};
    }
    own = placed.layout.arenas.size();
  }
}

}  // namespace

Result<PlacedModel> PlaceModel(ModelPlan& plan, const Sharing& sharing,
                               std::uint64_t arena_max_bytes) {
  if (plan.storages.size() >= kNoStorage || plan.tensors.size() >= kNoStorage) {
    return Error{ErrorCode::kLimit,
                 std::to_string(plan.storages.size()) + " storages and " +
                     std::to_string(plan.tensors.size()) + " tensors, limit " +
                     std::to_string(kNoStorage - 1),
                 0};
  }
  PlacedModel placed;
  placed.spec.format = std::move(plan.format);
  placed.spec.metadata_json = std::move(plan.metadata_json);
  placed.spec.tensors = std::move(plan.tensors);
  placed.spec.storages.resize(plan.storages.size());
  std::vector<std::uint64_t> sizes_bytes;
  for (std::uint32_t i = 0; i < plan.storages.size(); ++i) {
    placed.spec.storages[i].size_bytes = plan.storages[i].size_bytes;
    if (sharing.same_as[i] == i && !sharing.borrowed[i]) {
      placed.written.push_back(i);
      sizes_bytes.push_back(plan.storages[i].size_bytes);
    }
  }
  auto planned = PlanOwnArenas(sizes_bytes, arena_max_bytes, sharing.arenas.size(), placed);
  if (!planned.ok()) {
    return std::move(planned).error();
  }
  AssignPlaces(sharing, placed);
  placed.spec.arenas = sharing.arenas;
  for (const ArenaPlan& arena : placed.layout.arenas) {
    placed.spec.arenas.push_back({ArenaId{}, arena.size_bytes});
  }
  // A bad tensor must be found before memory is asked for.
  if (auto encoded = EncodeManifest(placed.spec); !encoded.ok()) {
    return std::move(encoded).error();
  }
  return placed;
}

ReserveRequest ReservationFor(const PlacedModel& placed, const Sharing& sharing) {
  ReserveRequest request;
  for (const ArenaPlan& arena : placed.layout.arenas) {
    request.arenas.push_back({arena.size_bytes, arena.charge_bytes});
  }
  for (const ArenaSpec& arena : sharing.arenas) {
    request.borrowed.push_back(arena.id);
  }
  return request;
}

Result<void> WriteArenas(const WriteInput& input, PlacedModel& placed,
                         const ReportProgress& report) {
  for (std::size_t i = 0; i < input.arenas.ids.size(); ++i) {
    placed.spec.arenas[input.sharing.arenas.size() + i].id = input.arenas.ids[i];
  }
  Filler filler(input, placed);
  if (auto filled = filler.Run(report); !filled.ok()) {
    return filled;
  }
  if (auto finished = filler.FinishSpec(); !finished.ok()) {
    return finished;
  }
  auto manifest = EncodeManifest(placed.spec);
  if (!manifest.ok()) {
    return std::move(manifest).error();
  }
  auto written = WriteAt(input.arenas.arenas.back().get(), placed.layout.manifest_offset_bytes,
                         std::as_bytes(std::span(*manifest)));
  return written.ok() ? WriteHeaders(input, placed, manifest->size()) : written;
}

}  // namespace modelcache
