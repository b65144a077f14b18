// The .npy header is a Python literal; only the one form numpy writes is read.
#include "server/loader/npz_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/checked_math.h"
#include "server/loader/storage_stream.h"
#include "server/loader/zip_directory.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 64U << 10U;
constexpr std::string_view kMagic{"\x93NUMPY", 6};

struct DtypeRow {
  std::string_view descr;
  Dtype dtype;
};

constexpr std::array<DtypeRow, 14> kDtypes = {{
    {"|b1", Dtype::kBool},
    {"|u1", Dtype::kUint8},
    {"|i1", Dtype::kInt8},
    {"<i2", Dtype::kInt16},
    {"<i4", Dtype::kInt32},
    {"<i8", Dtype::kInt64},
    {"<u2", Dtype::kUint16},
    {"<u4", Dtype::kUint32},
    {"<u8", Dtype::kUint64},
    {"<f2", Dtype::kFloat16},
    {"<f4", Dtype::kFloat32},
    {"<f8", Dtype::kFloat64},
    {"<c8", Dtype::kComplex64},
    {"<c16", Dtype::kComplex128},
}};

Error Malformed(const std::string& what) { return Error{ErrorCode::kBadFile, what, 0}; }

// The text between `key`: and the next delimiter, without spaces around it.
std::optional<std::string_view> ValueOf(std::string_view header, std::string_view key,
                                        std::string_view ends) {
  const std::size_t found = header.find(key);
  const std::size_t colon = found == std::string_view::npos ? found : header.find(':', found);
  if (colon == std::string_view::npos) {
    return std::nullopt;
  }
  const std::size_t first = header.find_first_not_of(' ', colon + 1);
  if (first == std::string_view::npos) {
    return std::nullopt;
  }
  const std::size_t last = header.find_first_of(ends, first + 1);
  return last == std::string_view::npos ? std::nullopt
                                        : std::optional(header.substr(first, last - first));
}

Result<std::vector<std::int64_t>> ParseShape(std::string_view text) {
  std::vector<std::int64_t> shape;
  std::uint64_t value = 0;
  bool digits = false;
  for (const char c : text.substr(1)) {
    if (c >= '0' && c <= '9') {
      const auto shifted = CheckedMul(value, 10);
      const auto next = shifted ? CheckedAdd(*shifted, static_cast<unsigned>(c - '0')) : shifted;
      if (!next || *next > static_cast<std::uint64_t>(INT64_MAX)) {
        return Malformed("a shape " + Quoted(text) + " beyond 64 bits");
      }
      value = *next;
      digits = true;
    } else if (c == ',' && digits) {
      shape.push_back(static_cast<std::int64_t>(value));
      value = 0;
      digits = false;
    } else if (c != ' ') {
      return Malformed("an unreadable shape " + Quoted(text));
    }
  }
  if (digits) {
    shape.push_back(static_cast<std::int64_t>(value));
  }
  return shape;
}

Result<TensorSpec> ParseHeader(std::string_view header) {
  const auto descr = ValueOf(header, "'descr'", ",");
  const auto order = ValueOf(header, "'fortran_order'", ",}");
  const auto shape_text = ValueOf(header, "'shape'", ")");
  if (!descr || !order || !shape_text || shape_text->front() != '(' || descr->size() < 2) {
    return Malformed("an unreadable header " + Quoted(header));
  }
  const std::string_view name = descr->substr(1, descr->size() - 2);
  const auto* row = std::find_if(kDtypes.begin(), kDtypes.end(),
                                 [&](const DtypeRow& known) { return known.descr == name; });
  if (row == kDtypes.end()) {
    return Error{ErrorCode::kUnsupported, "dtype " + Quoted(*descr) + " has no tensor type", 0};
  }
  auto shape = ParseShape(*shape_text);
  if (!shape.ok()) {
    return std::move(shape).error();
  }
  TensorSpec tensor;
  tensor.dtype = row->dtype;
  tensor.shape = std::move(*shape);
  if (tensor.shape.size() > kMaxDimensions) {
    return Malformed("more than " + std::to_string(kMaxDimensions) + " dimensions");
  }
  if (*order == "True") {
    const std::vector<std::int64_t> reversed(tensor.shape.rbegin(), tensor.shape.rend());
    tensor.stride = ContiguousStride(reversed);
    std::reverse(tensor.stride.begin(), tensor.stride.end());
  } else {
    tensor.stride = ContiguousStride(tensor.shape);
  }
  return tensor;
}

std::optional<std::uint64_t> DataBytes(const TensorSpec& tensor) {
  std::optional<std::uint64_t> total = DtypeBits(tensor.dtype) / 8;
  bool empty = false;
  for (const std::int64_t size : tensor.shape) {
    empty = empty || size == 0;
    total = CheckedMul(*total, static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1)));
    if (!total || *total > static_cast<std::uint64_t>(INT64_MAX)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : total;
}

// The first bytes of a record, inflated where it is deflated.
Result<std::string> ReadStart(std::span<const SourceFile> files, std::size_t file,
                              const ZipRecord& record) {
  const std::uint64_t wanted = std::min(record.size_bytes, kMaxHeaderBytes);
  const PlannedStorage storage{"record " + Quoted(record.name), record.size_bytes,
                               RecordBytes(file, record)};
  std::string text;
  std::vector<std::byte> scratch(std::min(record.size_bytes, std::uint64_t{1} << 20U));
  const Error enough{ErrorCode::kCancelled, "enough was read", 0};
  auto streamed = StreamStorage(files, storage, scratch, [&](std::span<const std::byte> leaf) {
    text.assign(reinterpret_cast<const char*>(leaf.data()), std::min(wanted, leaf.size()));
    return Result<void>(enough);
  });
  if (!streamed.ok() && streamed.error().code != ErrorCode::kCancelled) {
    return std::move(streamed).error();
  }
  return text;
}

// Length of everything before the data, by version of the format.
Result<std::uint64_t> HeaderEnd(std::string_view start) {
  if (start.size() < 12 || start.substr(0, kMagic.size()) != kMagic) {
    return Malformed("is no .npy array, it starts with " + Quoted(start));
  }
  const bool long_length = start[6] >= 2;
  std::uint32_t length = 0;
  std::memcpy(&length, &start[8], long_length ? 4 : 2);
  const std::uint64_t end = (long_length ? 12U : 10U) + std::uint64_t{length};
  if (end > start.size()) {
    return Malformed("a header of " + std::to_string(length) + " bytes, " +
                     std::to_string(start.size()) + " are there");
  }
  return end;
}

StorageBytes SkipHeader(StorageBytes bytes, std::uint64_t header_bytes) {
  if (auto* plain = std::get_if<FileBytes>(&bytes)) {
    plain->offset_bytes += header_bytes;
  } else if (auto* deflated = std::get_if<DeflatedBytes>(&bytes)) {
    deflated->skip_bytes = header_bytes;
  }
  return bytes;
}

Result<void> AddArray(std::span<const SourceFile> files, std::size_t file, const ZipRecord& record,
                      ModelPlan& plan) {
  auto start = ReadStart(files, file, record);
  if (!start.ok()) {
    return std::move(start).error();
  }
  auto end = HeaderEnd(*start);
  if (!end.ok()) {
    return std::move(end).error();
  }
  auto tensor = ParseHeader(std::string_view(*start).substr(10, *end - 10));
  if (!tensor.ok()) {
    return std::move(tensor).error();
  }
  const auto needed = DataBytes(*tensor);
  const std::uint64_t present = record.size_bytes - *end;
  if (!needed || *needed != present) {
    return Malformed((needed ? std::to_string(*needed) : "over 2^63") + " bytes needed, has " +
                     std::to_string(present));
  }
  tensor->name = record.name.substr(0, record.name.size() - std::strlen(".npy"));
  tensor->storage = static_cast<std::uint32_t>(plan.storages.size());
  plan.storages.push_back(
      {"record " + Quoted(record.name), present, SkipHeader(RecordBytes(file, record), *end)});
  plan.tensors.push_back(std::move(*tensor));
  return {};
}

}  // namespace

Result<ModelPlan> ReadNpz(std::span<const SourceFile> files, std::size_t file) {
  auto directory = ZipDirectory::Read(files[file]);
  if (!directory.ok()) {
    return std::move(directory).error();
  }
  ModelPlan plan;
  plan.format = "npz";
  for (const ZipRecord& record : directory->records()) {
    if (auto added = AddArray(files, file, record, plan); !added.ok()) {
      return files[file].Fault(added.error().code,
                               "record " + Quoted(record.name) + ": " + added.error().message);
    }
  }
  return plan;
}

}  // namespace modelcache
