// The manifest: the tensor table of one model, read in place from its last arena.
//
// Binary, little-endian, every section on an 8-byte boundary, so that a reader needs no parsing:
// a header, then arenas, storages, tensors, the order of names, dimensions, strings.
// docs/protocol.md draws it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/ids.h"
#include "common/result.h"
#include "proto/dtype.h"

namespace modelcache {

inline constexpr std::uint32_t kNoStorage = 0xFFFFFFFFU;  // of a tensor on the meta device
inline constexpr std::uint16_t kMaxDimensions = 64;       // what PyTorch's own loops accept

// Tensor flags.
inline constexpr std::uint32_t kTensorRequiresGrad = 1;
inline constexpr std::uint32_t kTensorConjugate = 2;
inline constexpr std::uint32_t kTensorNegative = 4;
inline constexpr std::uint32_t kTensorParameter = 8;  // was an nn.Parameter
inline constexpr std::uint32_t kTensorFlagMask = 15;

// Records as they lie in the arena. Plain integers only; offsets are from the manifest's start.
struct ManifestHeader {
  char magic[8];  // "MCMANIF1"
  std::uint32_t version;
  std::uint32_t header_bytes;  // sizeof(ManifestHeader)
  std::uint64_t total_bytes;
  std::uint32_t arena_count;
  std::uint32_t storage_count;
  std::uint32_t tensor_count;
  std::uint32_t dimension_count;
  std::uint64_t arenas_offset;
  std::uint64_t storages_offset;
  std::uint64_t tensors_offset;
  std::uint64_t order_offset;       // tensor_count x uint32: tensor numbers by ascending name
  std::uint64_t dimensions_offset;  // dimension_count x int64
  std::uint64_t strings_offset;
  std::uint64_t strings_bytes;
  std::uint64_t format_offset;  // the strings below lie inside the strings section
  std::uint64_t format_bytes;   // "safetensors", "torch", "torchscript", "npz", …
  std::uint64_t metadata_offset;
  std::uint64_t metadata_bytes;  // JSON; docs/protocol.md lists the members
  std::uint8_t digest[16];       // checksum of everything but this field
};
static_assert(sizeof(ManifestHeader) == 144);

struct ArenaRecord {
  std::uint8_t id[16];
  std::uint64_t size_bytes;
};
static_assert(sizeof(ArenaRecord) == 24);

struct StorageRecord {
  std::uint32_t arena;  // index into the arena records
  std::uint32_t flags;  // 0
  std::uint64_t offset_bytes;
  std::uint64_t size_bytes;
  std::uint8_t digest[16];  // HashStorage of its bytes
  std::uint8_t sample[16];  // SampleStorage of its bytes
};
static_assert(sizeof(StorageRecord) == 56);

struct TensorRecord {
  std::uint64_t name_offset;  // from the manifest's start; UTF-8, followed by a zero byte
  std::uint32_t name_bytes;
  std::uint32_t storage;            // index into the storage records, or kNoStorage
  std::uint64_t data_offset_bytes;  // first element, from the storage's start
  std::uint64_t extent_bytes;       // from there to the end of the last element it can reach
  std::uint32_t dimensions_index;   // shape, then stride, `dimension_count` int64 each
  std::uint16_t dimension_count;
  std::uint16_t dtype;
  std::uint32_t flags;
  std::uint32_t reserved;  // 0
};
static_assert(sizeof(TensorRecord) == 48);

// What a loader says of one storage. `arena` is an index into ManifestSpec::arenas.
struct StorageSpec {
  std::uint32_t arena = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
  Digest digest;
  Digest sample;
};

// What a loader says of one tensor. Strides and shape in elements.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  std::uint32_t storage = kNoStorage;
  std::uint64_t data_offset_bytes = 0;
  std::uint32_t flags = 0;
};

struct ArenaSpec {
  ArenaId id;
  std::uint64_t size_bytes = 0;
};

struct ManifestSpec {
  std::string format;
  std::string metadata_json = "{}";
  std::vector<ArenaSpec> arenas;  // those of other models first, then the model's own in order
  std::vector<StorageSpec> storages;
  std::vector<TensorSpec> tensors;
};

// Bytes from the first to the last element of a view, 0 when it has none: what PyTorch calls the
// storage extent. Errors: kBadFile when a size or stride is negative or the sum overflows.
Result<std::uint64_t> TensorExtentBytes(const TensorSpec& tensor);

// Row-major strides of `shape`, as PyTorch gives them (a dimension of 0 counts as 1).
std::vector<std::int64_t> ContiguousStride(std::span<const std::int64_t> shape);

// Size of the manifest of `spec`; it does not depend on digests, offsets, arena ids or sizes, only
// on the counts and texts. `arena_count` replaces spec.arenas.size().
std::uint64_t ManifestBytes(const ManifestSpec& spec, std::size_t arena_count);

// The bytes of the manifest. Errors: kBadFile naming the tensor: a view that leaves its storage, a
// negative size, overflow, a name twice, or a count beyond 32 bits.
Result<std::string> EncodeManifest(const ManifestSpec& spec);

// A validated view of a manifest. Holds no memory: `bytes` must outlive it. Any thread.
class Manifest {
 public:
  Manifest() = default;

  // Checks everything once: magic, version, checksum, every offset, count and range, that storages
  // lie inside their arenas, that every view lies inside its storage, that names are unique and in
  // order. Errors: kCorrupt with what, where and both numbers.
  static Result<Manifest> Parse(std::span<const std::byte> bytes);

  // The view of bytes that Parse accepted before, without checking the records again.
  // REQUIRES that nothing can have changed them since (a sealed arena). Errors: kCorrupt.
  static Result<Manifest> Attach(std::span<const std::byte> bytes);

  [[nodiscard]] std::span<const ArenaRecord> arenas() const { return arenas_; }
  [[nodiscard]] std::span<const StorageRecord> storages() const { return storages_; }
  [[nodiscard]] std::span<const TensorRecord> tensors() const { return tensors_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  [[nodiscard]] std::span<const std::int64_t> dimensions() const { return dimensions_; }
  [[nodiscard]] std::string_view format() const { return format_; }
  [[nodiscard]] std::string_view metadata_json() const { return metadata_; }

  [[nodiscard]] std::string_view Name(const TensorRecord& tensor) const;
  [[nodiscard]] std::span<const std::int64_t> Shape(const TensorRecord& tensor) const;
  [[nodiscard]] std::span<const std::int64_t> Stride(const TensorRecord& tensor) const;

  // Number of the tensor with this name, by binary search.
  [[nodiscard]] std::optional<std::uint32_t> Find(std::string_view name) const;

  // Sum of the sizes of the distinct places storages lie in: payload, shared bytes once.
  [[nodiscard]] std::uint64_t PayloadBytes() const;

 private:
  [[nodiscard]] Result<void> CheckSections(const ManifestHeader& header);
  [[nodiscard]] Result<void> CheckStorages() const;
  [[nodiscard]] Result<void> CheckTensors() const;
  [[nodiscard]] Result<void> CheckTensor(const TensorRecord& tensor) const;
  [[nodiscard]] Result<void> CheckOrder() const;

  std::span<const std::byte> bytes_;
  std::span<const ArenaRecord> arenas_;
  std::span<const StorageRecord> storages_;
  std::span<const TensorRecord> tensors_;
  std::span<const std::uint32_t> order_;
  std::span<const std::int64_t> dimensions_;
  std::string_view format_;
  std::string_view metadata_;
};

}  // namespace modelcache
