// Versions of the wire protocol and of the arena format.
#pragma once

#include <cstdint>

namespace modelcache {

inline constexpr std::uint32_t kProtocolVersion = 1;        // what this build speaks
inline constexpr std::uint32_t kOldestProtocolVersion = 1;  // the oldest it accepts
inline constexpr std::uint32_t kArenaFormatVersion = 1;     // header page and manifest
inline constexpr const char kProductVersion[] = "0.1.0";

}  // namespace modelcache
