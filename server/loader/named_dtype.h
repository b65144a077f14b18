// How a file format calls the dtypes.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>

#include "proto/dtype.h"

namespace modelcache {

struct NamedDtype {
  std::string_view name;
  Dtype dtype;
};

// The first row with exactly this name.
inline std::optional<Dtype> FindDtype(std::span<const NamedDtype> table, std::string_view name) {
  const auto row = std::find_if(table.begin(), table.end(),
                                [&](const NamedDtype& known) { return known.name == name; });
  return row == table.end() ? std::nullopt : std::optional(row->dtype);
}

}  // namespace modelcache
