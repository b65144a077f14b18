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

std::optional<Digest> SampleStorage(std::uint64_t size_bytes, const ReadBytesAt& read_at) {
  constexpr std::size_t kPieces = 4;
  std::array<std::byte, kPieces * kSampleBytes> buffer;
  if (size_bytes <= buffer.size()) {
    const auto all = std::span(buffer).first(size_bytes);
    return read_at(0, all) ? std::optional(HashStorage(all)) : std::nullopt;
  }
  // Ends and thirds: padded or partly zero storages usually differ at one of them.
  const std::uint64_t last = size_bytes - kSampleBytes;
  const auto piece = std::span(buffer).first(kSampleBytes);
  std::array<Digest, kPieces> pieces;
  for (std::size_t i = 0; i < kPieces; ++i) {
    if (!read_at(last / (kPieces - 1) * i, piece)) {
      return std::nullopt;
    }
    pieces[i] = HashBytes(piece);
  }
  return CombineLeaves(pieces, size_bytes);
}

Digest SampleStorage(std::span<const std::byte> bytes) {
  const auto copy = [&](std::uint64_t offset_bytes, std::span<std::byte> out) {
    std::memcpy(out.data(), bytes.data() + offset_bytes, out.size());
    return true;
  };
  return *SampleStorage(bytes.size(), copy);
}

}  // namespace modelcache
