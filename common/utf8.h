// Bytes from outside as text.
#pragma once

#include <string>
#include <string_view>

namespace modelcache {

// True for well-formed UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
// Source: The Unicode Standard, table 3-7 "Well-Formed UTF-8 Byte Sequences".
bool IsUtf8(std::string_view bytes);

// Control characters and bytes that are not UTF-8 as \xNN: what a file or a peer calls things must
// not cut a message, add a line to a log or steer a terminal.
std::string Printable(std::string_view text);

}  // namespace modelcache
