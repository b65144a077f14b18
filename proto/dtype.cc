// The table of element types.
#include "proto/dtype.h"

#include <array>

namespace modelcache {
namespace {

struct DtypeRow {
  std::string_view name;
  std::uint32_t bits;
};

// Indexed by the number of the dtype; row 0 is no dtype.
constexpr std::array<DtypeRow, kDtypeCount + 1> kRows = {{
    {"", 0},
    {"bool", 8},
    {"uint8", 8},
    {"int8", 8},
    {"int16", 16},
    {"int32", 32},
    {"int64", 64},
    {"uint16", 16},
    {"uint32", 32},
    {"uint64", 64},
    {"float16", 16},
    {"bfloat16", 16},
    {"float32", 32},
    {"float64", 64},
    {"complex32", 32},
    {"complex64", 64},
    {"complex128", 128},
    {"float8_e4m3fn", 8},
    {"float8_e5m2", 8},
    {"float8_e4m3fnuz", 8},
    {"float8_e5m2fnuz", 8},
    {"float8_e8m0fnu", 8},
    {"float4_e2m1fn_x2", 8},
    {"qint8", 8},
    {"quint8", 8},
    {"qint32", 32},
    {"quint4x2", 8},
    {"quint2x4", 8},
    {"bits8", 8},
    {"bits16", 16},
    {"bits4x2", 8},
    {"bits2x4", 8},
    {"bits1x8", 8},
    {"float6_e2m3", 6},
    {"float6_e3m2", 6},
}};

const DtypeRow& Row(Dtype dtype) {
  const auto number = static_cast<std::size_t>(dtype);
  return kRows[number < kRows.size() ? number : 0];
}

}  // namespace

std::string_view DtypeName(Dtype dtype) { return Row(dtype).name; }

std::uint32_t DtypeBits(Dtype dtype) { return Row(dtype).bits; }

std::optional<Dtype> DtypeFromName(std::string_view name) {
  for (std::uint16_t number = 1; number <= kDtypeCount; ++number) {
    if (kRows[number].name == name) {
      return static_cast<Dtype>(number);
    }
  }
  return std::nullopt;
}

}  // namespace modelcache
