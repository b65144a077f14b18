// Content digests: XXH3-128 over 1 MiB leaves, so that threads can share one storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/ids.h"

namespace modelcache {

// A storage is hashed in leaves of this size; the last one may be shorter.
inline constexpr std::uint64_t kDigestLeafBytes = 1U << 20U;

// XXH3-128 of one run of bytes (canonical, big-endian form). Detects damage and finds candidates;
// it is not cryptographic, so equality of content is always decided by comparing bytes.
// Source: Yann Collet, xxHash, https://xxhash.com (XXH3, 128-bit variant).
Digest HashBytes(std::span<const std::byte> bytes);

// The digest of a storage from the digests of its leaves, in order; `size_bytes` is hashed too.
// An empty storage has no leaves.
Digest CombineLeaves(std::span<const Digest> leaves, std::uint64_t size_bytes);

// CombineLeaves of the leaves of `bytes`.
Digest HashStorage(std::span<const std::byte> bytes);

// A digest of the size and of a few pages of the content, cheap whatever the size: storages whose
// samples differ are different; those whose samples agree are worth comparing.
Digest SampleStorage(std::span<const std::byte> bytes);

// Fills `out` with the bytes from `offset_bytes` on; false when they cannot be read.
using ReadBytesAt = std::function<bool(std::uint64_t offset_bytes, std::span<std::byte> out)>;

// As SampleStorage for bytes that are not in memory: reads only what the sample looks at, 16 KiB at
// most. Nothing when `read_at` gave false.
std::optional<Digest> SampleStorage(std::uint64_t size_bytes, const ReadBytesAt& read_at);

}  // namespace modelcache
