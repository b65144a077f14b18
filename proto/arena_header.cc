// The header page as it lies in memory.
#include "proto/arena_header.h"

#include <cstring>
#include <string>

#include "common/digest.h"
#include "proto/arena_layout.h"
#include "proto/version.h"

namespace modelcache {
namespace {

constexpr char kMagic[8] = {'M', 'C', 'A', 'R', 'E', 'N', 'A', '1'};

struct HeaderPage {
  char magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint8_t arena_id[16];
  std::uint8_t model_id[16];
  std::uint32_t arena_index;
  std::uint32_t arena_count;
  std::uint64_t arena_bytes;
  std::uint64_t manifest_offset;
  std::uint64_t manifest_bytes;
  std::uint8_t digest[16];  // of the 80 bytes before it
};
static_assert(sizeof(HeaderPage) == 96);
static_assert(sizeof(HeaderPage) <= kArenaHeaderBytes);

Digest DigestOf(const HeaderPage& page) {
  return HashBytes(std::as_bytes(std::span(&page, 1)).first(offsetof(HeaderPage, digest)));
}

Error Corrupt(const std::string& field, std::uint64_t expected, std::uint64_t found) {
  return Error{ErrorCode::kCorrupt,
               "arena header: " + field + " is " + std::to_string(found) + ", expected " +
                   std::to_string(expected),
               0};
}

}  // namespace

void EncodeArenaHeader(const ArenaHeader& header, std::span<std::byte> page) {
  HeaderPage raw{};
  std::memcpy(raw.magic, kMagic, sizeof raw.magic);
  raw.version = kArenaFormatVersion;
  raw.header_bytes = kArenaHeaderBytes;
  std::memcpy(raw.arena_id, header.arena_id.bytes.data(), sizeof raw.arena_id);
  std::memcpy(raw.model_id, header.model_id.bytes.data(), sizeof raw.model_id);
  raw.arena_index = header.arena_index;
  raw.arena_count = header.arena_count;
  raw.arena_bytes = header.arena_bytes;
  raw.manifest_offset = header.manifest.offset_bytes;
  raw.manifest_bytes = header.manifest.size_bytes;
  const Digest digest = DigestOf(raw);
  std::memcpy(raw.digest, digest.bytes.data(), sizeof raw.digest);
  std::memset(page.data(), 0, kArenaHeaderBytes);
  std::memcpy(page.data(), &raw, sizeof raw);
}

Result<ArenaHeader> DecodeArenaHeader(std::span<const std::byte> page, std::uint64_t arena_bytes) {
  if (page.size() < kArenaHeaderBytes || arena_bytes < kArenaHeaderBytes) {
    return Corrupt("size of the arena", kArenaHeaderBytes, arena_bytes);
  }
  HeaderPage raw;
  std::memcpy(&raw, page.data(), sizeof raw);
  if (std::memcmp(raw.magic, kMagic, sizeof raw.magic) != 0) {
    return Error{ErrorCode::kCorrupt, "arena header: wrong magic, this memory is no arena", 0};
  }
  if (raw.version != kArenaFormatVersion) {
    return Corrupt("format version", kArenaFormatVersion, raw.version);
  }
  const Digest digest = DigestOf(raw);
  if (std::memcmp(raw.digest, digest.bytes.data(), sizeof raw.digest) != 0) {
    return Error{ErrorCode::kCorrupt, "arena header: its checksum does not match", 0};
  }
  if (raw.header_bytes != kArenaHeaderBytes) {
    return Corrupt("header size", kArenaHeaderBytes, raw.header_bytes);
  }
  if (raw.arena_bytes != arena_bytes) {
    return Corrupt("arena size", arena_bytes, raw.arena_bytes);
  }
  if (raw.arena_index >= raw.arena_count) {
    return Corrupt("arena index (below the count)", raw.arena_count, raw.arena_index);
  }
  ArenaHeader header;
  std::memcpy(header.arena_id.bytes.data(), raw.arena_id, sizeof raw.arena_id);
  std::memcpy(header.model_id.bytes.data(), raw.model_id, sizeof raw.model_id);
  header.arena_index = raw.arena_index;
  header.arena_count = raw.arena_count;
  header.arena_bytes = raw.arena_bytes;
  header.manifest = {raw.manifest_offset, raw.manifest_bytes};
  const bool last = raw.arena_index + 1 == raw.arena_count;
  if (!Within(header.manifest, arena_bytes) || last != (raw.manifest_bytes != 0) ||
      raw.manifest_offset % 8 != 0) {
    return Corrupt("manifest end", arena_bytes, raw.manifest_offset + raw.manifest_bytes);
  }
  return header;
}

}  // namespace modelcache
