// Whether bytes from outside are text.
#pragma once

#include <string_view>

namespace modelcache {

// True for well-formed UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
// Source: The Unicode Standard, table 3-7 "Well-Formed UTF-8 Byte Sequences".
bool IsUtf8(std::string_view bytes);

}  // namespace modelcache
