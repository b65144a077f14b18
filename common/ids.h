// Strong identifier types: 128-bit ids of models and arenas, counters of sessions and leases.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace modelcache {

// 128 bits that print as 32 lower-case hexadecimal digits. Tag makes the types distinct.
template <typename Tag>
struct Id128 {
  std::array<std::uint8_t, 16> bytes{};

  auto operator<=>(const Id128&) const = default;
  [[nodiscard]] bool IsZero() const { return bytes == std::array<std::uint8_t, 16>{}; }

  [[nodiscard]] std::string Hex() const {
    static constexpr std::string_view kDigits = "0123456789abcdef";
    std::string text;
    text.reserve(32);
    for (std::uint8_t byte : bytes) {
      text += kDigits[byte >> 4U];
      text += kDigits[byte & 15U];
    }
    return text;
  }

  // Nothing unless `text` is exactly 32 hexadecimal digits.
  static std::optional<Id128> FromHex(std::string_view text) {
    Id128 id;
    if (text.size() != 2 * id.bytes.size()) {
      return std::nullopt;
    }
    for (std::size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      int digit = -1;
      if (c >= '0' && c <= '9') {
        digit = c - '0';
      } else if (c >= 'a' && c <= 'f') {
        digit = c - 'a' + 10;
      } else if (c >= 'A' && c <= 'F') {
        digit = c - 'A' + 10;
      }
      if (digit < 0) {
        return std::nullopt;
      }
      id.bytes[i / 2] = static_cast<std::uint8_t>(id.bytes[i / 2] << 4U | digit);
    }
    return id;
  }
};

using ModelId = Id128<struct ModelIdTag>;  // digest of the identity of what was loaded
using ArenaId = Id128<struct ArenaIdTag>;  // random; names one sealed memfd for its whole life
using Digest = Id128<struct DigestTag>;    // a content hash (common/digest.h)
using CallKey = Id128<struct CallKeyTag>;  // the client's digest of a Python call

// A counter that is never reused while the daemon lives; 0 names nothing.
template <typename Tag>
struct Counter {
  std::uint64_t value = 0;
  auto operator<=>(const Counter&) const = default;
};

using SessionId = Counter<struct SessionIdTag>;  // one connection of a client
using LeaseId = Counter<struct LeaseIdTag>;      // one use of a model by a session
using JobId = Counter<struct JobIdTag>;          // one loader process

}  // namespace modelcache

template <typename Tag>
struct std::hash<modelcache::Id128<Tag>> {
  std::size_t operator()(const modelcache::Id128<Tag>& id) const noexcept {
    std::size_t value = 0;
    std::memcpy(&value, id.bytes.data(), sizeof value);  // the ids are uniformly distributed
    return value;
  }
};

template <typename Tag>
struct std::hash<modelcache::Counter<Tag>> {
  std::size_t operator()(const modelcache::Counter<Tag>& counter) const noexcept {
    return std::hash<std::uint64_t>{}(counter.value);
  }
};
