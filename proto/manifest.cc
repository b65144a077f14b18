// Validation of a manifest and access to it in place.
#include "proto/manifest.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/checked_math.h"
#include "common/digest.h"
#include "proto/arena_layout.h"
#include "proto/manifest_internal.h"
#include "proto/version.h"

namespace modelcache {
namespace {

Error Corrupt(std::string message) {
  return Error{ErrorCode::kCorrupt, "manifest: " + std::move(message), 0};
}

Error CorruptNumber(const std::string& what, std::uint64_t expected, std::uint64_t found) {
  return Corrupt(what + " is " + std::to_string(found) + ", expected " + std::to_string(expected));
}

// The section of `count` records of T at `offset`. Errors: kCorrupt.
template <typename T>
Result<std::span<const T>> Section(std::span<const std::byte> bytes, std::uint64_t offset,
                                   std::uint64_t count) {
  const auto size = CheckedMul(count, sizeof(T));
  if (offset % alignof(T) != 0 || !size || !Within({offset, *size}, bytes.size())) {
    return Corrupt("a section of " + std::to_string(count) + " records at " +
                   std::to_string(offset) + " leaves its " + std::to_string(bytes.size()) +
                   " bytes");
  }
  return std::span<const T>(reinterpret_cast<const T*>(bytes.data() + offset), count);
}

bool DigestMatches(std::span<const std::byte> bytes, const ManifestHeader& header) {
  const Digest found = ManifestDigest(bytes);
  return std::memcmp(header.digest, found.bytes.data(), sizeof header.digest) == 0;
}

}  // namespace

Digest ManifestDigest(std::span<const std::byte> bytes) {
  // The header up to its digest, then everything behind the header: the field itself is left out.
  const std::array<Digest, 2> parts = {HashBytes(bytes.first(offsetof(ManifestHeader, digest))),
                                       HashBytes(bytes.subspan(sizeof(ManifestHeader)))};
  return CombineLeaves(parts, bytes.size());
}

Result<std::uint64_t> ViewExtentBytes(std::span<const std::int64_t> shape,
                                      std::span<const std::int64_t> stride, Dtype dtype) {
  std::uint64_t last = 0;  // element number of the farthest element
  bool empty = false;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0 || stride[i] < 0) {
      return Error{ErrorCode::kBadFile,
                   "dimension " + std::to_string(i) + " has size " + std::to_string(shape[i]) +
                       " and stride " + std::to_string(stride[i]) + ", both must be >= 0",
                   0};
    }
    if (shape[i] == 0) {
      empty = true;
      continue;
    }
    const auto step =
        CheckedMul(static_cast<std::uint64_t>(shape[i]) - 1, static_cast<std::uint64_t>(stride[i]));
    const auto sum = step ? CheckedAdd(last, *step) : std::nullopt;
    if (!sum) {
      return Error{ErrorCode::kBadFile, "sizes times strides overflow 64 bits", 0};
    }
    last = *sum;
  }
  if (empty) {
    return std::uint64_t{0};
  }
  const auto bits = CheckedMul(last, DtypeBits(dtype));
  const auto all = bits ? CheckedAdd(*bits, std::uint64_t{DtypeBits(dtype)} + 7) : std::nullopt;
  if (!all) {
    return Error{ErrorCode::kBadFile, "sizes times strides overflow 64 bits", 0};
  }
  return *all / 8;
}

Result<Manifest> Manifest::Parse(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(ManifestHeader) ||
      reinterpret_cast<std::uintptr_t>(bytes.data()) % 8 != 0) {
    return CorruptNumber("size", sizeof(ManifestHeader), bytes.size());
  }
  ManifestHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, kManifestMagic, sizeof header.magic) != 0) {
    return Corrupt("wrong magic");
  }
  if (header.version != kArenaFormatVersion) {
    return CorruptNumber("format version", kArenaFormatVersion, header.version);
  }
  if (header.header_bytes != sizeof header || header.total_bytes != bytes.size()) {
    return CorruptNumber("size", bytes.size(), header.total_bytes);
  }
  if (!DigestMatches(bytes, header)) {
    return Corrupt("its checksum does not match");
  }
  Manifest manifest;
  manifest.bytes_ = bytes;
  // Each step relies on the ones before it.
  auto checked = manifest.CheckSections(header);
  checked = checked.ok() ? manifest.CheckStorages() : std::move(checked);
  checked = checked.ok() ? manifest.CheckTensors() : std::move(checked);
  checked = checked.ok() ? manifest.CheckOrder() : std::move(checked);
  if (!checked.ok()) {
    return std::move(checked).error();
  }
  return manifest;
}

Result<Manifest> Manifest::Attach(std::span<const std::byte> bytes) {
  ManifestHeader header{};
  if (bytes.size() < sizeof header) {
    return CorruptNumber("size", sizeof header, bytes.size());
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  Manifest manifest;
  manifest.bytes_ = bytes;
  if (auto checked = manifest.CheckSections(header); !checked.ok()) {
    return std::move(checked).error();
  }
  return manifest;
}

Result<void> Manifest::CheckSections(const ManifestHeader& header) {
  auto arenas = Section<ArenaRecord>(bytes_, header.arenas_offset, header.arena_count);
  auto storages = Section<StorageRecord>(bytes_, header.storages_offset, header.storage_count);
  auto tensors = Section<TensorRecord>(bytes_, header.tensors_offset, header.tensor_count);
  auto order = Section<std::uint32_t>(bytes_, header.order_offset, header.tensor_count);
  auto dimensions = Section<std::int64_t>(bytes_, header.dimensions_offset, header.dimension_count);
  auto strings = Section<char>(bytes_, header.strings_offset, header.strings_bytes);
  auto format = Section<char>(bytes_, header.format_offset, header.format_bytes);
  auto metadata = Section<char>(bytes_, header.metadata_offset, header.metadata_bytes);
  for (const bool good : {arenas.ok(), storages.ok(), tensors.ok(), order.ok(), dimensions.ok(),
                          strings.ok(), format.ok(), metadata.ok()}) {
    if (!good) {
      return Corrupt("a section leaves its " + std::to_string(bytes_.size()) + " bytes");
    }
  }
  arenas_ = *arenas;
  storages_ = *storages;
  tensors_ = *tensors;
  order_ = *order;
  dimensions_ = *dimensions;
  format_ = {format->data(), format->size()};
  metadata_ = {metadata->data(), metadata->size()};
  return {};
}

Result<void> Manifest::CheckStorages() const {
  if (arenas_.empty()) {
    return Corrupt("names no arena");
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const StorageRecord& storage = storages_[i];
    if (storage.arena >= arenas_.size()) {
      return CorruptNumber("arena of storage " + std::to_string(i) + " (below the count)",
                           arenas_.size(), storage.arena);
    }
    const std::uint64_t arena_bytes = arenas_[storage.arena].size_bytes;
    if (!Within({storage.offset_bytes, storage.size_bytes}, arena_bytes) ||
        storage.offset_bytes < kArenaHeaderBytes ||
        storage.offset_bytes % kSmallAlignmentBytes != 0) {
      return Corrupt("storage " + std::to_string(i) + " of " + std::to_string(storage.size_bytes) +
                     " bytes at " + std::to_string(storage.offset_bytes) +
                     " does not lie in its arena of " + std::to_string(arena_bytes) + " bytes");
    }
  }
  return {};
}

Result<void> Manifest::CheckTensors() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (auto checked = CheckTensor(tensors_[i]); !checked.ok()) {
      Error error = std::move(checked).error();
      error.message += " (tensor " + std::to_string(i) + ")";
      return error;
    }
  }
  return {};
}

Result<void> Manifest::CheckTensor(const TensorRecord& tensor) const {
  const std::uint64_t name_bytes = std::uint64_t{tensor.name_bytes} + 1;
  if (!Within({tensor.name_offset, name_bytes}, bytes_.size()) ||
      bytes_[tensor.name_offset + tensor.name_bytes] != std::byte{0}) {
    return Corrupt("a name leaves the manifest");
  }
  const auto dtype = static_cast<Dtype>(tensor.dtype);
  const std::uint32_t bits = DtypeBits(dtype);
  if (bits == 0) {
    return CorruptNumber("dtype (at most)", kDtypeCount, tensor.dtype);
  }
  const std::uint64_t dimensions = 2ULL * tensor.dimension_count;
  if (tensor.dimension_count > kMaxDimensions ||
      !Within({tensor.dimensions_index, dimensions}, dimensions_.size())) {
    return CorruptNumber("end of dimensions (at most)", dimensions_.size(),
                         tensor.dimensions_index + dimensions);
  }
  const auto extent = ViewExtentBytes(Shape(tensor), Stride(tensor), dtype);
  if (!extent.ok() || *extent != tensor.extent_bytes) {
    return CorruptNumber("extent", extent.ok() ? *extent : 0, tensor.extent_bytes);
  }
  if (tensor.storage == kNoStorage) {
    return {};
  }
  if (tensor.storage >= storages_.size()) {
    return CorruptNumber("storage (below the count)", storages_.size(), tensor.storage);
  }
  const std::uint64_t storage_bytes = storages_[tensor.storage].size_bytes;
  if (!Within({tensor.data_offset_bytes, tensor.extent_bytes}, storage_bytes) ||
      tensor.data_offset_bytes % std::max(bits / 8, 1U) != 0) {
    return Corrupt(std::to_string(tensor.extent_bytes) + " bytes are needed at " +
                   std::to_string(tensor.data_offset_bytes) + ", storage " +
                   std::to_string(tensor.storage) + " has " + std::to_string(storage_bytes));
  }
  return {};
}

Result<void> Manifest::CheckOrder() const {
  std::string_view previous;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (order_[i] >= tensors_.size()) {
      return CorruptNumber("order of names (below the count)", tensors_.size(), order_[i]);
    }
    const std::string_view name = Name(tensors_[order_[i]]);
    if (i > 0 && previous >= name) {
      return Corrupt("names are not unique and ascending at '" + std::string(name) + "'");
    }
    previous = name;
  }
  return {};
}

std::string_view Manifest::Name(const TensorRecord& tensor) const {
  return {reinterpret_cast<const char*>(bytes_.data()) + tensor.name_offset, tensor.name_bytes};
}

std::span<const std::int64_t> Manifest::Shape(const TensorRecord& tensor) const {
  return dimensions_.subspan(tensor.dimensions_index, tensor.dimension_count);
}

std::span<const std::int64_t> Manifest::Stride(const TensorRecord& tensor) const {
  return dimensions_.subspan(tensor.dimensions_index + tensor.dimension_count,
                             tensor.dimension_count);
}

std::optional<std::uint32_t> Manifest::Find(std::string_view name) const {
  const auto found = std::lower_bound(order_.begin(), order_.end(), name,
                                      [this](std::uint32_t number, std::string_view wanted) {
                                        return Name(tensors_[number]) < wanted;
                                      });
  if (found == order_.end() || Name(tensors_[*found]) != name) {
    return std::nullopt;
  }
  return *found;
}

std::uint64_t Manifest::PayloadBytes() const {
  std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> places;
  places.reserve(storages_.size());
  for (const StorageRecord& storage : storages_) {
    places.emplace_back(storage.arena, storage.offset_bytes, storage.size_bytes);
  }
  if (!std::is_sorted(places.begin(), places.end())) {  // a loader writes them in order
    std::sort(places.begin(), places.end());
  }
  const auto end = std::unique(places.begin(), places.end());
  return std::accumulate(
      places.begin(), end, std::uint64_t{0},
      [](std::uint64_t sum, const auto& place) { return sum + std::get<2>(place); });
}

}  // namespace modelcache
