// Reads the one range that holds the elements, then picks them.
#include "server/loader/tensor_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/checked_math.h"
#include "common/digest.h"
#include "server/loader/storage_stream.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

bool HoldsNumbers(Dtype dtype) {
  return dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64 || dtype == Dtype::kInt32 ||
         dtype == Dtype::kInt64;
}

template <typename Number>
Number Load(const std::byte* at) {
  Number value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

Json NumberAt(Dtype dtype, const std::byte* at) {
  switch (dtype) {
    case Dtype::kInt32:
      return Load<std::int32_t>(at);
    case Dtype::kInt64:
      return Load<std::int64_t>(at);
    case Dtype::kFloat32:
      return static_cast<double>(Load<float>(at));
    default:
      return Load<double>(at);
  }
}

// `out` from `offset_bytes` on, also of storages that can only be read from their start.
Result<void> ReadRange(std::span<const SourceFile> files, const PlannedStorage& storage,
                       std::uint64_t offset_bytes, std::span<std::byte> out) {
  if (IsSeekable(storage)) {
    return ReadStorage(files, storage, offset_bytes, out);
  }
  std::uint64_t at = 0;
  std::vector<std::byte> scratch(std::min(storage.size_bytes, kDigestLeafBytes));
  return StreamStorage(files, storage, scratch, [&](std::span<const std::byte> leaf) {
    const std::uint64_t first = std::max(at, offset_bytes);
    const std::uint64_t last = std::min(at + leaf.size(), offset_bytes + out.size());
    if (first < last) {
      std::memcpy(out.data() + (first - offset_bytes), leaf.data() + (first - at), last - first);
    }
    at += leaf.size();
    return Result<void>();
  });
}

// From the first element to the end of the last one.
Result<std::uint64_t> SpanBytes(const TensorSpec& tensor) {
  if (tensor.shape.size() != 1 || !HoldsNumbers(tensor.dtype) || tensor.storage == kNoStorage) {
    return Error{ErrorCode::kBadFile,
                 "must be one row of float32, float64, int32 or int64 values, not " +
                     std::to_string(tensor.shape.size()) + " dimensions of " +
                     std::string(DtypeName(tensor.dtype)),
                 0};
  }
  if (tensor.shape[0] == 0) {
    return std::uint64_t{0};
  }
  const std::uint64_t element_bytes = DtypeBits(tensor.dtype) / 8;
  const auto steps = CheckedMul(static_cast<std::uint64_t>(tensor.shape[0] - 1),
                                static_cast<std::uint64_t>(tensor.stride[0]));
  const auto before_last = steps ? CheckedMul(*steps, element_bytes) : std::nullopt;
  const auto span = before_last ? CheckedAdd(*before_last, element_bytes) : std::nullopt;
  const auto count = static_cast<std::uint64_t>(tensor.shape[0]);
  if (!span || *span > kMaxNumbersBytes || count > kMaxNumbersBytes / element_bytes) {
    return Error{
        ErrorCode::kBadFile,
        std::to_string(count) + " values, limit " + std::to_string(kMaxNumbersBytes) + " bytes", 0};
  }
  return *span;
}

}  // namespace

Result<Json> ReadNumbers(std::span<const SourceFile> files,
                         std::span<const PlannedStorage> storages, const TensorSpec& tensor) {
  auto span = SpanBytes(tensor);
  if (!span.ok()) {
    return std::move(span).error();
  }
  std::vector<std::byte> bytes(*span);
  auto read = ReadRange(files, storages[tensor.storage], tensor.data_offset_bytes, bytes);
  if (!read.ok()) {
    return std::move(read).error();
  }
  Json numbers = Json::array();
  const std::size_t element_bytes = DtypeBits(tensor.dtype) / 8;
  for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
    const auto at = static_cast<std::size_t>(i * tensor.stride[0]) * element_bytes;
    Json number = NumberAt(tensor.dtype, bytes.data() + at);
    if (number.is_number_float() && !std::isfinite(number.get<double>())) {
      return Error{ErrorCode::kBadFile, "value " + std::to_string(i) + " is not finite", 0};
    }
    numbers.push_back(std::move(number));
  }
  return numbers;
}

}  // namespace modelcache
