// Clock: where logic gets the time from, so that tests can set it; and times in plain numbers.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

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

inline double Seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

// Nanoseconds since the epoch. Times that do not fit (beyond the year 2262; files may have any)
// wrap around, so that different ones stay different.
inline std::int64_t ToNanoseconds(const timespec& time) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
                                   static_cast<std::uint64_t>(time.tv_nsec));
}

}  // namespace modelcache
