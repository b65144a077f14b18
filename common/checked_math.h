// Unsigned 64-bit arithmetic on sizes from outside, which cannot overflow unseen.
#pragma once

#include <cstdint>
#include <optional>

namespace modelcache {

inline std::optional<std::uint64_t> CheckedAdd(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::nullopt : std::optional(sum);
}

inline std::optional<std::uint64_t> CheckedMul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::nullopt : std::optional(product);
}

// The smallest multiple of `alignment` that is at least `value`. REQUIRES a power of two.
inline std::optional<std::uint64_t> CheckedAlignUp(std::uint64_t value, std::uint64_t alignment) {
  auto sum = CheckedAdd(value, alignment - 1);
  return sum ? std::optional(*sum & ~(alignment - 1)) : std::nullopt;
}

// As CheckedAlignUp for values known to be small enough. REQUIRES value <= 2^64 - alignment.
constexpr std::uint64_t AlignUp(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

constexpr std::uint64_t AlignDown(std::uint64_t value, std::uint64_t alignment) {
  return value & ~(alignment - 1);
}

// A half-open range of bytes.
struct ByteRange {
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
};

// True when the range lies inside [0, total_bytes), without computing offset + size.
constexpr bool Within(ByteRange range, std::uint64_t total_bytes) {
  return range.offset_bytes <= total_bytes && range.size_bytes <= total_bytes - range.offset_bytes;
}

}  // namespace modelcache
