// Sealed arenas made in the test itself, as a daemon and its loader would leave them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "proto/arena_header.h"
#include "proto/manifest.h"
#include "proto/messages.h"

namespace modelcache {

// A contiguous tensor with a storage of its own.
struct BuiltTensor {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

struct BuildOptions {
  bool seal = true;
  std::string format = "safetensors";
  std::string metadata_json = "{}";
  std::uint64_t arena_max_bytes = 1U << 30U;
  std::function<void(ManifestSpec&)> edit_spec;     // before the manifest is encoded
  std::function<void(ArenaHeader&)> edit_header;    // before a header page is written
  std::function<void(std::string&)> edit_manifest;  // its bytes, same length
};

// The descriptors stay open as long as this lives; `reply` names them as they are in this process.
struct BuiltModel {
  std::vector<UniqueFd> arenas;
  OpenReply reply;
};

BuiltModel BuildModel(const std::vector<BuiltTensor>& tensors, const BuildOptions& options = {});

// A float32 tensor of `count` elements with the values start, start + 1, …
BuiltTensor Floats(const std::string& name, std::int64_t count, float start);

}  // namespace modelcache
