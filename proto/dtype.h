// Element types: fixed numbers, PyTorch's names, sizes in bits.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace modelcache {

// The numbers are part of the arena format and of the C ABI. Names are PyTorch's.
enum class Dtype : std::uint16_t {
  kBool = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt16 = 4,
  kInt32 = 5,
  kInt64 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kUint64 = 9,
  kFloat16 = 10,
  kBfloat16 = 11,
  kFloat32 = 12,
  kFloat64 = 13,
  kComplex32 = 14,
  kComplex64 = 15,
  kComplex128 = 16,
  kFloat8E4m3fn = 17,
  kFloat8E5m2 = 18,
  kFloat8E4m3fnuz = 19,
  kFloat8E5m2fnuz = 20,
  kFloat8E8m0fnu = 21,
  kFloat4E2m1fnX2 = 22,  // one element is a packed pair
  kQint8 = 23,
  kQuint8 = 24,
  kQint32 = 25,
  kQuint4x2 = 26,  // one element is a packed pair
  kQuint2x4 = 27,  // one element is four packed values
  kBits8 = 28,
  kBits16 = 29,
  kBits4x2 = 30,
  kBits2x4 = 31,
  kBits1x8 = 32,
  kFloat6E2m3 = 33,  // safetensors F6_E2M3: six bits each, packed; PyTorch has no such type
  kFloat6E3m2 = 34,  // safetensors F6_E3M2: six bits each, packed; PyTorch has no such type
};

inline constexpr std::uint16_t kDtypeCount = 34;  // the largest number in use

// "float32", "float8_e4m3fn", …: the attribute of the torch module. Empty for an unknown number.
std::string_view DtypeName(Dtype dtype);

// Bits of one element; 0 for an unknown number.
std::uint32_t DtypeBits(Dtype dtype);

// The dtype of a name as DtypeName gives it.
std::optional<Dtype> DtypeFromName(std::string_view name);

}  // namespace modelcache
