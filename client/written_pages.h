// Which private maps this process has written to.
#pragma once

#include <span>

#include "common/mapping.h"
#include "common/result.h"

namespace modelcache {

// True when any page of these copy-on-write maps is a copy of this process (or of an ancestor that
// it was forked from) instead of the file's own. Errors: kSystem when the kernel does not tell.
Result<bool> AnyPageWritten(std::span<const Mapping> mappings);

}  // namespace modelcache
