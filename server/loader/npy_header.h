// The header of a .npy array: what it holds, in which order.
#pragma once

#include <string_view>

#include "common/result.h"
#include "proto/manifest.h"

namespace modelcache {

// Dtype, shape and stride of the array, without name and storage. `text` is the header alone: a
// Python dict of exactly descr, fortran_order and shape, as numpy writes it.
// Errors: kBadFile (another form, a member twice, a shape beyond 64 bits), kUnsupported (a dtype
// that is none of a tensor: big-endian, structured, objects, text, times).
Result<TensorSpec> ParseNpyHeader(std::string_view text);

}  // namespace modelcache
