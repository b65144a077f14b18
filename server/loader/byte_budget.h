// ByteBudget: bounds what a pickle may become in memory.
#pragma once

#include <cstdint>
#include <string>

#include "common/result.h"

namespace modelcache {

// A pickle refers to one value any number of times for two bytes each: bounds on values alone would
// let a megabyte of text become terabytes of copies. Not synchronised.
class ByteBudget {
 public:
  // For a pickle of which `pickle_bytes` have been read.
  static constexpr std::uint64_t Limit(std::uint64_t pickle_bytes) {
    return kFreeBytes + kBytesPerByte * pickle_bytes;
  }

  // False once more than Limit(pickle_bytes) has been used.
  [[nodiscard]] bool Charge(std::uint64_t bytes, std::uint64_t pickle_bytes) {
    used_bytes_ += bytes;  // each charge is the size of something that is in memory: no overflow
    return used_bytes_ <= Limit(pickle_bytes);
  }

  [[nodiscard]] std::string Complaint(std::uint64_t pickle_bytes) const {
    return "needs " + std::to_string(used_bytes_) + " bytes or more for copies of its values, " +
           "limit " + std::to_string(Limit(pickle_bytes)) + " for " + std::to_string(pickle_bytes) +
           " bytes of pickle";
  }

 private:
  static constexpr std::uint64_t kFreeBytes = 64U << 20U;
  static constexpr std::uint64_t kBytesPerByte = 16;

  std::uint64_t used_bytes_ = 0;
};

}  // namespace modelcache
