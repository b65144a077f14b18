// The first page of an arena: what it is, without the daemon that made it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/checked_math.h"
#include "common/ids.h"
#include "common/result.h"

namespace modelcache {

// Fields of the header page. A restarted daemon groups arenas by model id and orders them by index.
struct ArenaHeader {
  ArenaId arena_id;
  ModelId model_id;
  std::uint32_t arena_index = 0;  // among the arenas made for this model
  std::uint32_t arena_count = 0;
  std::uint64_t arena_bytes = 0;  // size of the memfd
  ByteRange manifest;             // 0 bytes in every arena but the last
};

// Writes the page, checksum included. REQUIRES page.size() >= kArenaHeaderBytes.
void EncodeArenaHeader(const ArenaHeader& header, std::span<std::byte> page);

// Reads and validates the first page of an arena of `arena_bytes` bytes.
// Errors: kCorrupt with the field, the expected and the found value.
Result<ArenaHeader> DecodeArenaHeader(std::span<const std::byte> page, std::uint64_t arena_bytes);

}  // namespace modelcache
