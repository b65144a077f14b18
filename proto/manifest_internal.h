// What the writer and the reader of manifests share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/ids.h"
#include "common/result.h"
#include "proto/dtype.h"

namespace modelcache {

inline constexpr char kManifestMagic[8] = {'M', 'C', 'M', 'A', 'N', 'I', 'F', '1'};

// The checksum of a manifest, its own field left out. REQUIRES bytes.size() >= the header's.
Digest ManifestDigest(std::span<const std::byte> bytes);

// TensorExtentBytes for records. REQUIRES shape.size() == stride.size() and a known dtype.
Result<std::uint64_t> ViewExtentBytes(std::span<const std::int64_t> shape,
                                      std::span<const std::int64_t> stride, Dtype dtype);

}  // namespace modelcache
