// Runs independent pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "common/result.h"

namespace modelcache {

// Does item number `item`; `scratch` is one digest leaf of memory that no other thread uses.
using WorkItem = std::function<Result<void>(std::size_t item, std::span<std::byte> scratch)>;

// Runs `work` for every item below `count`, in rising order of their starts, on at most 4 threads
// (and no more than there are cores). The calling thread runs `tick` about ten times a second until
// all is done. The first error, of `work` or `tick`, stops what has not started and is returned.
// Exceptions of `work` become kSystem errors.
Result<void> ParallelFor(std::size_t count, const WorkItem& work,
                         const std::function<Result<void>()>& tick = {});

}  // namespace modelcache
