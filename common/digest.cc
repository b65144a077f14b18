// XXH3 leaves, their combination, and the sample used to find equal storages.
#include "common/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace modelcache {
namespace {

constexpr std::size_t kSampleBytes = 4096;

Digest Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Digest digest;
  std::memcpy(digest.bytes.data(), canonical.digest, digest.bytes.size());
  return digest;
}

}  // namespace

Digest HashBytes(std::span<const std::byte> bytes) {
  return Canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

Digest CombineLeaves(std::span<const Digest> leaves, std::uint64_t size_bytes) {
  return Canonical(
      XXH3_128bits_withSeed(leaves.data(), leaves.size() * sizeof(Digest), size_bytes));
}

Digest HashStorage(std::span<const std::byte> bytes) {
  std::vector<Digest> leaves;
  for (std::size_t at = 0; at < bytes.size(); at += kDigestLeafBytes) {
    leaves.push_back(
        HashBytes(bytes.subspan(at, std::min<std::size_t>(kDigestLeafBytes, bytes.size() - at))));
  }
  return CombineLeaves(leaves, bytes.size());
}

Digest SampleStorage(std::span<const std::byte> bytes) {
  if (bytes.size() <= 4 * kSampleBytes) {
    return HashStorage(bytes);
  }
  // Ends and thirds: padded or partly zero storages usually differ at one of them.
  const std::size_t last = bytes.size() - kSampleBytes;
  std::array<Digest, 4> pieces;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = HashBytes(bytes.subspan(last / (pieces.size() - 1) * i, kSampleBytes));
  }
  return CombineLeaves(pieces, bytes.size());
}

}  // namespace modelcache
