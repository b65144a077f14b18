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

// Length of the well-formed character at the start of `bytes`; 0 when there is none.
std::size_t CharacterBytes(std::string_view bytes) {
  const Sequence sequence = SequenceOf(static_cast<unsigned char>(bytes.front()));
  if (!sequence.valid || bytes.size() - 1 < sequence.continuation_count) {
    return 0;
  }
  for (std::size_t k = 0; k < sequence.continuation_count; ++k) {
    const auto byte = static_cast<unsigned char>(bytes[k + 1]);
    const unsigned low = k == 0 ? sequence.low : kFirstContinuation;
    const unsigned high = k == 0 ? sequence.high : kLastContinuation;
    if (byte < low || byte > high) {
      return 0;
    }
  }
  return 1 + sequence.continuation_count;
}

// Of ASCII, or U+0080 to U+009F. REQUIRES a well-formed character.
bool IsControl(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  return first < 0x20 || first == 0x7F ||
         (first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0);
}

}  // namespace

bool IsUtf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t length = CharacterBytes(bytes);
    if (length == 0) {
      return false;
    }
    bytes.remove_prefix(length);
  }
  return true;
}

std::string Printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const std::size_t length = CharacterBytes(text);
    if (length > 0 && !IsControl(text)) {
      shown += text.substr(0, length);
      text.remove_prefix(length);
      continue;
    }
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(text.front());
    shown += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
    text.remove_prefix(1);
  }
  return shown;
}

}  // namespace modelcache
