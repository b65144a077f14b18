// Clock: where logic gets the time from, so that tests can set it.
#pragma once

#include <chrono>

namespace modelcache {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

// A point no wait ever reaches.
inline constexpr TimePoint kNoDeadline = TimePoint::max();

// Now() + timeout, saturating at kNoDeadline.
inline TimePoint DeadlineAfter(Duration timeout) {
  const TimePoint now = std::chrono::steady_clock::now();
  return timeout >= kNoDeadline - now ? kNoDeadline : now + timeout;
}

}  // namespace modelcache
