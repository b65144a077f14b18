// Records, the lengths in front of their headers, and storages behind them.
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
#include "server/loader/npy_header.h"
#include "server/loader/record_crc.h"
#include "server/loader/storage_stream.h"
#include "server/loader/zip_directory.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 64U << 10U;
constexpr std::string_view kMagic{"\x93NUMPY", 6};

Error Malformed(const std::string& what) { return Error{ErrorCode::kBadFile, what, 0}; }

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
  const auto major = static_cast<unsigned char>(start[6]);
  const auto minor = static_cast<unsigned char>(start[7]);
  if (major < 1 || major > 3 || minor != 0) {
    return Error{ErrorCode::kUnsupported,
                 "has format version " + std::to_string(major) + "." + std::to_string(minor) +
                     ", 1.0 to 3.0 are read",
                 0};
  }
  const bool long_length = major >= 2;
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
  const bool ascii = std::all_of(record.name.begin(), record.name.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (!ascii && !record.name_is_utf8) {
    return Error{ErrorCode::kUnsupported, "its name is in an encoding from before UTF-8", 0};
  }
  auto start = ReadStart(files, file, record);
  if (!start.ok()) {
    return std::move(start).error();
  }
  auto end = HeaderEnd(*start);
  if (!end.ok()) {
    return std::move(end).error();
  }
  const std::size_t text_at = (*start)[6] >= 2 ? 12 : 10;
  auto tensor = ParseNpyHeader(std::string_view(*start).substr(text_at, *end - text_at));
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
  const auto header = std::as_bytes(std::span(*start)).first(*end);
  plan.storages.push_back({"record " + Quoted(record.name), present,
                           SkipHeader(RecordBytes(file, record), *end),
                           RecordCrc{record.crc32, CrcOf(header)}});
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
