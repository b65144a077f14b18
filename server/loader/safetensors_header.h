// The JSON header of a safetensors file as plain values: form only, no meaning.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"

namespace modelcache {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint64_t> data_offsets;  // exactly two
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> entries;
};

// Reads the header text. A stream of events, never a tree: 100,000 open brackets cost nothing.
// Errors: kBadFile; the message names the tensor or metadata key, the member, what was expected and
// what was found, or the byte at which the text stops being JSON.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text);

}  // namespace modelcache
