// Base64 with padding (RFC 4648), for bytes inside metadata.
#pragma once

#include <string>
#include <string_view>

namespace modelcache {

std::string Base64(std::string_view bytes);

}  // namespace modelcache
