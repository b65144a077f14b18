// Meaning of the header: dtypes, sizes and ranges against the file.
#include "server/loader/safetensors_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "common/checked_math.h"
#include "server/loader/json_guard.h"
#include "server/loader/safetensors_header.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference's limit

struct DtypeRow {
  std::string_view name;
  Dtype dtype;
  std::uint32_t bits;  // of one element as the format counts them
};

constexpr std::array<DtypeRow, 22> kDtypes = {{
    {"BOOL", Dtype::kBool, 8},
    {"U8", Dtype::kUint8, 8},
    {"I8", Dtype::kInt8, 8},
    {"I16", Dtype::kInt16, 16},
    {"I32", Dtype::kInt32, 32},
    {"I64", Dtype::kInt64, 64},
    {"U16", Dtype::kUint16, 16},
    {"U32", Dtype::kUint32, 32},
    {"U64", Dtype::kUint64, 64},
    {"F16", Dtype::kFloat16, 16},
    {"BF16", Dtype::kBfloat16, 16},
    {"F32", Dtype::kFloat32, 32},
    {"F64", Dtype::kFloat64, 64},
    {"C64", Dtype::kComplex64, 64},
    {"F8_E4M3", Dtype::kFloat8E4m3fn, 8},
    {"F8_E5M2", Dtype::kFloat8E5m2, 8},
    {"F8_E8M0", Dtype::kFloat8E8m0fnu, 8},
    {"F8_E4M3FNUZ", Dtype::kFloat8E4m3fnuz, 8},
    {"F8_E5M2FNUZ", Dtype::kFloat8E5m2fnuz, 8},
    {"F4", Dtype::kFloat4E2m1fnX2, 4},
    {"F6_E2M3", Dtype::kFloat6E2m3, 6},
    {"F6_E3M2", Dtype::kFloat6E3m2, 6},
}};

const DtypeRow* FindDtype(std::string_view name) {
  const auto* row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                 [&](const DtypeRow& candidate) { return candidate.name == name; });
  return row == kDtypes.end() ? nullptr : row;
}

std::string ShapeText(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const std::uint64_t size : shape) {
    text += (text.size() > 1 ? "," : "") + std::to_string(size);
  }
  return text + "]";
}

// Nothing on overflow. A dimension of 0 counts as 1 for the overflow test, because strides do.
std::optional<std::uint64_t> ElementBits(const SafetensorsEntry& entry, std::uint32_t bits) {
  std::uint64_t total = bits;
  bool empty = false;
  for (const std::uint64_t size : entry.shape) {
    empty = empty || size == 0;
    const auto product = CheckedMul(total, std::max<std::uint64_t>(size, 1));
    if (!product || *product > static_cast<std::uint64_t>(INT64_MAX)) {
      return std::nullopt;
    }
    total = *product;
  }
  return empty ? 0 : total;
}

// Bytes the tensor needs by its dtype and shape.
Result<std::uint64_t> NeededBytes(const SafetensorsEntry& entry, const DtypeRow& row) {
  const std::string what = "tensor " + Quoted(entry.name) + ": ";
  const auto bits = ElementBits(entry, row.bits);
  if (!bits) {
    return Error{
        ErrorCode::kBadFile,
        what + "shape " + ShapeText(entry.shape) + " of " + entry.dtype + " overflows 64 bits", 0};
  }
  if (*bits % 8 != 0) {
    return Error{ErrorCode::kBadFile,
                 what + "shape " + ShapeText(entry.shape) + " of " + entry.dtype + " takes " +
                     std::to_string(*bits) + " bits, not a whole number of bytes",
                 0};
  }
  return *bits / 8;
}

Result<TensorSpec> MakeTensor(const SafetensorsEntry& entry, const DtypeRow& row) {
  TensorSpec tensor;
  tensor.name = entry.name;
  tensor.dtype = row.dtype;
  if (entry.shape.size() > kMaxDimensions) {
    return Error{ErrorCode::kBadFile,
                 "tensor " + Quoted(entry.name) + ": " + std::to_string(entry.shape.size()) +
                     " dimensions, limit " + std::to_string(kMaxDimensions),
                 0};
  }
  for (const std::uint64_t size : entry.shape) {
    tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  if (row.dtype == Dtype::kFloat4E2m1fnX2) {
    // The format counts single values, PyTorch packed pairs.
    if (tensor.shape.empty() || tensor.shape.back() % 2 != 0) {
      return Error{ErrorCode::kUnsupported,
                   "tensor " + Quoted(entry.name) + ": the last dimension of F4 shape " +
                       ShapeText(entry.shape) + " is odd, packed pairs need an even one",
                   0};
    }
    tensor.shape.back() /= 2;
  }
  tensor.stride = ContiguousStride(tensor.shape);
  return tensor;
}

Result<SafetensorsHeader> ReadHeader(const SourceFile& file, std::uint64_t& data_offset_bytes) {
  if (file.size() < kLengthBytes) {
    return file.Bad("has " + std::to_string(file.size()) +
                    " bytes, a safetensors file has at least 8");
  }
  std::array<std::byte, kLengthBytes> raw{};
  if (auto read = file.ReadAt(0, raw); !read.ok()) {
    return std::move(read).error();
  }
  std::uint64_t length = 0;
  std::memcpy(&length, raw.data(), sizeof length);
  if (length > kMaxHeaderBytes || length > file.size() - kLengthBytes) {
    return file.Bad("safetensors header of " + std::to_string(length) +
                    " bytes, but the file has " + std::to_string(file.size()) +
                    " bytes (limit of a header " + std::to_string(kMaxHeaderBytes) + ")");
  }
  auto text = file.ReadText({kLengthBytes, length});
  if (!text.ok()) {
    return std::move(text).error();
  }
  if (text->empty() || text->front() != '{') {
    return file.Bad("safetensors header of " + std::to_string(length) +
                    " bytes must start with '{', found " + Quoted(*text));
  }
  auto header = ParseSafetensorsHeader(*text);
  if (!header.ok()) {
    return file.Bad(header.error().message);
  }
  data_offset_bytes = kLengthBytes + length;
  return header;
}

// Ranges in order of offset must follow each other from 0 to the end of the file.
Result<void> CheckCoverage(const SourceFile& file, std::span<const SafetensorsEntry> entries,
                           std::uint64_t data_offset_bytes) {
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::uint64_t first = entry.data_offsets[0];
    const std::uint64_t last = entry.data_offsets[1];
    const std::string range = "tensor " + Quoted(entry.name) + ": data_offsets [" +
                              std::to_string(first) + "," + std::to_string(last) + "] ";
    if (first != end) {
      return file.Bad(range + (first < end ? "overlap" : "leave a hole behind") +
                      " the range before, which ends at " + std::to_string(end));
    }
    end = last;
  }
  const auto needed = CheckedAdd(data_offset_bytes, end);
  if (!needed || *needed > file.size()) {
    return file.Bad("is cut short: needs " + (needed ? std::to_string(*needed) : "over 2^64") +
                    ", has " + std::to_string(file.size()) + " bytes" +
                    (entries.empty() ? "" : " (tensor " + Quoted(entries.back().name) + ")"));
  }
  if (*needed < file.size()) {
    return file.Bad("the tensors end at byte " + std::to_string(*needed) + ", but the file has " +
                    std::to_string(file.size()) + " bytes");
  }
  return {};
}

// Adds the tensor and its storage. Checks the size its dtype and shape need against its range.
Result<void> AddEntry(const SafetensorsEntry& entry, FileBytes data, ModelPlan& plan) {
  const DtypeRow* row = FindDtype(entry.dtype);
  if (row == nullptr) {
    return Error{ErrorCode::kUnsupported,
                 "tensor " + Quoted(entry.name) + ": unknown dtype " + Quoted(entry.dtype), 0};
  }
  if (entry.data_offsets[1] < entry.data_offsets[0]) {
    return Error{ErrorCode::kBadFile,
                 "tensor " + Quoted(entry.name) + ": data_offsets [" +
                     std::to_string(entry.data_offsets[0]) + "," +
                     std::to_string(entry.data_offsets[1]) + "] end before they start",
                 0};
  }
  auto needed = NeededBytes(entry, *row);
  if (!needed.ok()) {
    return std::move(needed).error();
  }
  const std::uint64_t present = entry.data_offsets[1] - entry.data_offsets[0];
  if (*needed != present) {
    return Error{ErrorCode::kBadFile,
                 "tensor " + Quoted(entry.name) + ": shape " + ShapeText(entry.shape) + " of " +
                     entry.dtype + ": " + std::to_string(*needed) + " bytes needed, range has " +
                     std::to_string(present),
                 0};
  }
  auto tensor = MakeTensor(entry, *row);
  if (!tensor.ok()) {
    return std::move(tensor).error();
  }
  tensor->storage = static_cast<std::uint32_t>(plan.storages.size());
  data.offset_bytes += entry.data_offsets[0];
  plan.storages.push_back({"tensor " + Quoted(entry.name), present, data});
  plan.tensors.push_back(std::move(*tensor));
  return {};
}

}  // namespace

bool LooksLikeSafetensors(std::string_view first_bytes, std::uint64_t size_bytes) {
  if (first_bytes.size() < kLengthBytes) {
    return false;
  }
  std::uint64_t length = 0;
  std::memcpy(&length, first_bytes.data(), sizeof length);
  if (length <= size_bytes - kLengthBytes && length <= kMaxHeaderBytes) {
    return true;  // whatever follows the length, the reader has a better message than "unknown"
  }
  // The zero byte keeps JSON texts out.
  return first_bytes.size() > kLengthBytes && first_bytes[kLengthBytes] == '{' &&
         first_bytes[kLengthBytes - 1] == '\0';
}

Result<ModelPlan> ReadSafetensors(std::span<const SourceFile> files, std::size_t file) {
  const SourceFile& source = files[file];
  std::uint64_t data_offset_bytes = 0;
  auto header = ReadHeader(source, data_offset_bytes);
  if (!header.ok()) {
    return std::move(header).error();
  }
  std::sort(header->entries.begin(), header->entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.data_offsets, a.name) < std::tie(b.data_offsets, b.name);
  });
  ModelPlan plan;
  plan.format = "safetensors";
  for (const SafetensorsEntry& entry : header->entries) {
    if (auto added = AddEntry(entry, {file, data_offset_bytes}, plan); !added.ok()) {
      return source.Fault(added.error().code, added.error().message);
    }
  }
  if (auto covered = CheckCoverage(source, header->entries, data_offset_bytes); !covered.ok()) {
    return std::move(covered).error();
  }
  nlohmann::json metadata = nlohmann::json::object();
  metadata["metadata"] = header->metadata;
  plan.metadata_json = DumpJson(metadata);
  return plan;
}

}  // namespace modelcache
