// Values of the small tensors that describe other tensors.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "common/result.h"
#include "server/loader/model_plan.h"

namespace modelcache {

// More would be no description.
inline constexpr std::uint64_t kMaxNumbersBytes = 16U << 20U;

// The elements of a one-dimensional tensor of float32, float64, int32 or int64 as JSON numbers.
// REQUIRES that the tensor lies inside its storage, one of `storages`.
// Errors: kBadFile (another form, values that are not finite, a range over kMaxNumbersBytes),
// kFileChanged, kSystem.
Result<nlohmann::json> ReadNumbers(std::span<const SourceFile> files,
                                   std::span<const PlannedStorage> storages,
                                   const TensorSpec& tensor);

}  // namespace modelcache
