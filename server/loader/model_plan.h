// ModelPlan: what a reader found in the files of a model, before any byte of a storage is read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "proto/manifest.h"
#include "server/loader/source_file.h"

namespace modelcache {

// Bytes that lie in a file as they are.
struct FileBytes {
  std::size_t file = 0;  // index into the job's files
  std::uint64_t offset_bytes = 0;
};

// Bytes behind a raw deflate stream of a file.
struct DeflatedBytes {
  std::size_t file = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t compressed_bytes = 0;
  std::uint64_t skip_bytes = 0;  // of the inflated stream, before the storage starts
};

// Bytes a reader already holds; `keep_alive` owns them.
struct MemoryBytes {
  const std::byte* data = nullptr;
  std::shared_ptr<const void> keep_alive;
};

using StorageBytes = std::variant<FileBytes, DeflatedBytes, MemoryBytes>;

// The sum over the record that a storage ends.
struct RecordCrc {
  std::uint32_t expected = 0;
  std::uint32_t before = 0;  // of the record's bytes in front of the storage
};

// One storage to be put into an arena.
struct PlannedStorage {
  std::string name;  // tensor or record, for messages
  std::uint64_t size_bytes = 0;
  StorageBytes bytes;
  std::optional<RecordCrc> crc = std::nullopt;  // checked while the bytes are read; never of memory
};

// Everything but the bytes. TensorSpec::storage is an index into `storages`; every tensor has been
// checked to lie inside its storage, and every FileBytes inside its file.
struct ModelPlan {
  std::string format;
  std::string metadata_json = "{}";  // an object; docs/protocol.md lists the members
  std::vector<PlannedStorage> storages;
  std::vector<TensorSpec> tensors;
};

// Memory that holds `text`, shared.
MemoryBytes OwnedBytes(std::string text);

}  // namespace modelcache
