// JSON from model files, without exceptions and without unbounded nesting.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "common/result.h"

namespace modelcache {

// The metadata of a manifest is nested by the structure of its checkpoint.
inline constexpr int kMaxMetadataDepth = 2000;

// Errors: kBadFile with the byte position and the cause; nesting deeper than `max_depth` is one.
Result<nlohmann::json> ParseJson(std::string_view text, int max_depth);

// `value` as text; bytes that are not UTF-8 are replaced.
std::string DumpJson(const nlohmann::json& value);

}  // namespace modelcache
