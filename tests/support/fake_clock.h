// FakeClock: time that passes only when a test says so.
#pragma once

#include "common/clock.h"

namespace modelcache {

class FakeClock {
 public:
  [[nodiscard]] TimePoint Now() const { return now_; }
  void Advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{std::chrono::hours(1000)};
};

}  // namespace modelcache
