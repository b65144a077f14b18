// Manifest::Parse and DecodeArenaHeader on the bytes of another process. The checksum would stop
// every random change, so it is put right first: the checks behind it are what is tried.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/digest.h"
#include "proto/arena_header.h"
#include "proto/arena_layout.h"
#include "proto/manifest.h"
#include "tests/fuzz/fuzz_target.h"

namespace modelcache {
namespace {

// Reads all a client may read of a manifest that was found valid.
void UseAll(const Manifest& manifest) {
  std::uint64_t sum = manifest.PayloadBytes() + manifest.metadata_json().size();
  for (const TensorRecord& tensor : manifest.tensors()) {
    const std::string name(manifest.Name(tensor));
    auto found = manifest.Find(name);
    Require(found.has_value() && &manifest.tensors()[*found] == &tensor, "each name is found");
    for (std::int64_t size : manifest.Shape(tensor)) {
      Require(size >= 0, "no size is negative");
    }
    for (std::int64_t stride : manifest.Stride(tensor)) {
      sum += static_cast<std::uint64_t>(stride);
    }
    if (tensor.storage == kNoStorage) {
      continue;
    }
    Require(tensor.storage < manifest.storages().size(), "the storage exists");
    const StorageRecord& storage = manifest.storages()[tensor.storage];
    Require(Within({tensor.data_offset_bytes, tensor.extent_bytes}, storage.size_bytes),
            "a view lies inside its storage");
    Require(storage.arena < manifest.arenas().size(), "the arena exists");
    Require(Within({storage.offset_bytes, storage.size_bytes},
                   manifest.arenas()[storage.arena].size_bytes),
            "a storage lies inside its arena");
  }
  asm volatile("" : : "r"(sum));  // keeps the reads
}

void TryManifest(std::vector<std::uint64_t> words) {
  std::span<std::byte> bytes = std::as_writable_bytes(std::span(words));
  if (bytes.size() >= sizeof(ManifestHeader)) {
    ManifestHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    std::memset(header.digest, 0, sizeof header.digest);
    std::memcpy(bytes.data(), &header, sizeof header);
    const Digest digest = HashBytes(bytes);
    std::memcpy(header.digest, digest.bytes.data(), sizeof header.digest);
    std::memcpy(bytes.data(), &header, sizeof header);
  }
  auto manifest = Manifest::Parse(bytes);
  if (manifest.ok()) {
    UseAll(*manifest);
  } else {
    Require(manifest.error().code == ErrorCode::kCorrupt, "a bad manifest is kCorrupt");
  }
}

}  // namespace
}  // namespace modelcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Whole words: the manifest starts on a page boundary of its arena, and its size is a multiple
  // of 8.
  std::vector<std::uint64_t> words(size / sizeof(std::uint64_t));
  if (!words.empty()) {
    std::memcpy(words.data(), data, words.size() * sizeof(std::uint64_t));
  }
  modelcache::TryManifest(words);
  std::vector<std::byte> page(modelcache::kArenaHeaderBytes);
  if (size != 0) {
    std::memcpy(page.data(), data, std::min(size, page.size()));
  }
  (void)modelcache::DecodeArenaHeader(page, std::uint64_t{1} << 30U);
  return 0;
}
