// Table 3-7 of the Unicode Standard.
#include "common/utf8.h"

#include <cstddef>

namespace modelcache {
namespace {

constexpr unsigned kFirstContinuation = 0x80;
constexpr unsigned kLastContinuation = 0xBF;

// What may follow a leading byte: how many bytes, and the range of the first of them.
struct Sequence {
  std::size_t continuation_count = 0;
  unsigned low = kFirstContinuation;
  unsigned high = kLastContinuation;
  bool valid = true;
};

Sequence SequenceOf(unsigned lead) {
  if (lead < 0x80) {
    return {};
  }
  if (lead >= 0xC2 && lead <= 0xDF) {
    return {1};
  }
  if (lead >= 0xE0 && lead <= 0xEF) {
    return {2, lead == 0xE0 ? 0xA0U : kFirstContinuation, lead == 0xED ? 0x9FU : kLastContinuation};
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    return {3, lead == 0xF0 ? 0x90U : kFirstContinuation, lead == 0xF4 ? 0x8FU : kLastContinuation};
  }
  return {0, 0, 0, false};
}

}  // namespace

bool IsUtf8(std::string_view bytes) {
  for (std::size_t i = 0; i < bytes.size();) {
    const Sequence sequence = SequenceOf(static_cast<unsigned char>(bytes[i++]));
    if (!sequence.valid || bytes.size() - i < sequence.continuation_count) {
      return false;
    }
    for (std::size_t k = 0; k < sequence.continuation_count; ++k) {
      const auto byte = static_cast<unsigned char>(bytes[i++]);
      const unsigned low = k == 0 ? sequence.low : kFirstContinuation;
      const unsigned high = k == 0 ? sequence.high : kLastContinuation;
      if (byte < low || byte > high) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace modelcache
