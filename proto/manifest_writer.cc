// Builds the bytes of a manifest from what a loader knows.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/checked_math.h"
#include "common/utf8.h"
#include "proto/manifest.h"
#include "proto/manifest_internal.h"
#include "proto/version.h"

namespace modelcache {
namespace {

// Counts and offsets of the sections, in file order.
struct Sections {
  std::uint64_t arenas = 0;
  std::uint64_t storages = 0;
  std::uint64_t tensors = 0;
  std::uint64_t order = 0;
  std::uint64_t dimensions = 0;
  std::uint64_t strings = 0;
  std::uint64_t strings_bytes = 0;
  std::uint64_t dimension_count = 0;
  std::uint64_t total_bytes = 0;
};

Sections PlanSections(const ManifestSpec& spec, std::size_t arena_count) {
  Sections at;
  at.strings_bytes = spec.format.size() + 1 + spec.metadata_json.size() + 1;
  for (const TensorSpec& tensor : spec.tensors) {
    at.strings_bytes += tensor.name.size() + 1;
    at.dimension_count += tensor.shape.size() + tensor.stride.size();
  }
  at.arenas = sizeof(ManifestHeader);
  at.storages = at.arenas + arena_count * sizeof(ArenaRecord);
  at.tensors = at.storages + spec.storages.size() * sizeof(StorageRecord);
  at.order = at.tensors + spec.tensors.size() * sizeof(TensorRecord);
  at.dimensions = AlignUp(at.order + spec.tensors.size() * sizeof(std::uint32_t), 8);
  at.strings = at.dimensions + at.dimension_count * sizeof(std::int64_t);
  at.total_bytes = AlignUp(at.strings + at.strings_bytes, 8);
  return at;
}

// Appends zero-terminated text to the strings section.
class StringPool {
 public:
  StringPool(std::string& bytes, std::uint64_t offset) : bytes_(bytes), next_(offset) {}

  std::uint64_t Add(std::string_view text) {
    const std::uint64_t at = next_;
    std::memcpy(&bytes_[at], text.data(), text.size());
    next_ += text.size() + 1;
    return at;
  }

 private:
  std::string& bytes_;
  std::uint64_t next_;
};

Error BadTensor(const TensorSpec& tensor, const std::string& message) {
  return Error{ErrorCode::kBadFile, "tensor '" + tensor.name + "': " + message, 0};
}

Result<std::uint64_t> CheckTensor(const TensorSpec& tensor, const ManifestSpec& spec) {
  if (tensor.shape.size() != tensor.stride.size() || tensor.shape.size() > kMaxDimensions) {
    return BadTensor(tensor, std::to_string(tensor.shape.size()) + " sizes and " +
                                 std::to_string(tensor.stride.size()) + " strides, limit " +
                                 std::to_string(kMaxDimensions));
  }
  if (tensor.name.find('\0') != std::string::npos || !IsUtf8(tensor.name)) {
    return BadTensor(tensor, "its name holds a zero byte or is not UTF-8");
  }
  auto extent = TensorExtentBytes(tensor);
  if (!extent.ok()) {
    return BadTensor(tensor, extent.error().message);
  }
  if (tensor.storage == kNoStorage) {
    return extent;
  }
  if (tensor.storage >= spec.storages.size()) {
    return BadTensor(tensor, "names storage " + std::to_string(tensor.storage) + " of " +
                                 std::to_string(spec.storages.size()));
  }
  const std::uint64_t storage_bytes = spec.storages[tensor.storage].size_bytes;
  if (!Within({tensor.data_offset_bytes, *extent}, storage_bytes)) {
    return BadTensor(tensor, "needs " + std::to_string(*extent) + " bytes at offset " +
                                 std::to_string(tensor.data_offset_bytes) + ", its storage " +
                                 std::to_string(tensor.storage) + " has " +
                                 std::to_string(storage_bytes));
  }
  return extent;
}

Result<void> CheckCounts(const ManifestSpec& spec, const Sections& at) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max() - 1;
  const std::uint64_t largest = std::max<std::uint64_t>(
      {spec.arenas.size(), spec.storages.size(), spec.tensors.size(), at.dimension_count});
  if (largest > kMost) {
    return Error{
        ErrorCode::kBadFile,
        "model with " + std::to_string(largest) + " records, limit " + std::to_string(kMost), 0};
  }
  return {};
}

Result<std::vector<std::uint32_t>> OrderNames(const ManifestSpec& spec) {
  std::vector<std::uint32_t> order(spec.tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&spec](std::uint32_t a, std::uint32_t b) {
    return spec.tensors[a].name < spec.tensors[b].name;
  });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const TensorSpec& tensor = spec.tensors[order[i]];
    if (spec.tensors[order[i - 1]].name == tensor.name) {
      return BadTensor(tensor, "occurs twice");
    }
  }
  return order;
}

template <typename T>
void Put(std::string& bytes, std::uint64_t offset, const T& record) {
  std::memcpy(&bytes[offset], &record, sizeof record);
}

void PutStorages(std::string& bytes, const Sections& at, const ManifestSpec& spec) {
  for (std::size_t i = 0; i < spec.arenas.size(); ++i) {
    ArenaRecord record{};
    std::memcpy(record.id, spec.arenas[i].id.bytes.data(), sizeof record.id);
    record.size_bytes = spec.arenas[i].size_bytes;
    Put(bytes, at.arenas + i * sizeof record, record);
  }
  for (std::size_t i = 0; i < spec.storages.size(); ++i) {
    const StorageSpec& storage = spec.storages[i];
    StorageRecord record{};
    record.arena = storage.arena;
    record.offset_bytes = storage.offset_bytes;
    record.size_bytes = storage.size_bytes;
    std::memcpy(record.digest, storage.digest.bytes.data(), sizeof record.digest);
    std::memcpy(record.sample, storage.sample.bytes.data(), sizeof record.sample);
    Put(bytes, at.storages + i * sizeof record, record);
  }
}

Result<void> PutTensors(std::string& bytes, const Sections& at, const ManifestSpec& spec,
                        StringPool& strings) {
  std::uint32_t dimension = 0;
  for (std::size_t i = 0; i < spec.tensors.size(); ++i) {
    const TensorSpec& tensor = spec.tensors[i];
    auto extent = CheckTensor(tensor, spec);
    if (!extent.ok()) {
      return std::move(extent).error();
    }
    TensorRecord record{};
    record.name_offset = strings.Add(tensor.name);
    record.name_bytes = static_cast<std::uint32_t>(tensor.name.size());
    record.storage = tensor.storage;
    record.data_offset_bytes = tensor.data_offset_bytes;
    record.extent_bytes = *extent;
    record.dimensions_index = dimension;
    record.dimension_count = static_cast<std::uint16_t>(tensor.shape.size());
    record.dtype = static_cast<std::uint16_t>(tensor.dtype);
    record.flags = tensor.flags & kTensorFlagMask;
    Put(bytes, at.tensors + i * sizeof record, record);
    for (const auto* list : {&tensor.shape, &tensor.stride}) {
      for (const std::int64_t value : *list) {
        Put(bytes, at.dimensions + std::uint64_t{dimension++} * sizeof value, value);
      }
    }
  }
  return {};
}

void PutHeader(std::string& bytes, const Sections& at, const ManifestSpec& spec,
               StringPool& strings) {
  ManifestHeader header{};
  std::memcpy(header.magic, kManifestMagic, sizeof header.magic);
  header.version = kArenaFormatVersion;
  header.header_bytes = sizeof header;
  header.total_bytes = at.total_bytes;
  header.arena_count = static_cast<std::uint32_t>(spec.arenas.size());
  header.storage_count = static_cast<std::uint32_t>(spec.storages.size());
  header.tensor_count = static_cast<std::uint32_t>(spec.tensors.size());
  header.dimension_count = static_cast<std::uint32_t>(at.dimension_count);
  header.arenas_offset = at.arenas;
  header.storages_offset = at.storages;
  header.tensors_offset = at.tensors;
  header.order_offset = at.order;
  header.dimensions_offset = at.dimensions;
  header.strings_offset = at.strings;
  header.strings_bytes = at.strings_bytes;
  header.format_offset = strings.Add(spec.format);
  header.format_bytes = spec.format.size();
  header.metadata_offset = strings.Add(spec.metadata_json);
  header.metadata_bytes = spec.metadata_json.size();
  Put(bytes, 0, header);
  const Digest digest = ManifestDigest(std::as_bytes(std::span(bytes)));
  std::memcpy(&bytes[offsetof(ManifestHeader, digest)], digest.bytes.data(), digest.bytes.size());
}

}  // namespace

Result<std::uint64_t> TensorExtentBytes(const TensorSpec& tensor) {
  return ViewExtentBytes(tensor.shape, tensor.stride, tensor.dtype);
}

std::vector<std::int64_t> ContiguousStride(std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t i = shape.size(); i > 1; --i) {
    // Wraps only where the element count already overflows; TensorExtentBytes refuses that.
    stride[i - 2] = static_cast<std::int64_t>(
        static_cast<std::uint64_t>(stride[i - 1]) *
        static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i - 1], 1)));
  }
  return stride;
}

std::uint64_t ManifestBytes(const ManifestSpec& spec, std::size_t arena_count) {
  return PlanSections(spec, arena_count).total_bytes;
}

Result<std::string> EncodeManifest(const ManifestSpec& spec) {
  const Sections at = PlanSections(spec, spec.arenas.size());
  if (auto checked = CheckCounts(spec, at); !checked.ok()) {
    return std::move(checked).error();
  }
  auto order = OrderNames(spec);
  if (!order.ok()) {
    return std::move(order).error();
  }
  std::string bytes(at.total_bytes, '\0');
  StringPool strings(bytes, at.strings);
  PutStorages(bytes, at, spec);
  if (auto put = PutTensors(bytes, at, spec, strings); !put.ok()) {
    return std::move(put).error();
  }
  if (!order->empty()) {  // memcpy takes no null pointer, not even for nothing
    std::memcpy(&bytes[at.order], order->data(), order->size() * sizeof(std::uint32_t));
  }
  PutHeader(bytes, at, spec, strings);
  return bytes;
}

}  // namespace modelcache
