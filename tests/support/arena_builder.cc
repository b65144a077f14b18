// Lays tensors out, writes them into memfds and seals those.
#include "tests/support/arena_builder.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "common/digest.h"
#include "common/mapping.h"
#include "common/memfd.h"
#include "proto/arena_layout.h"

namespace modelcache {
namespace {

template <typename T>
T Need(Result<T> result) {
  if (!result.ok()) {
    throw std::runtime_error(result.error().message);
  }
  return std::move(*result);
}

template <typename Id>
Id RandomId() {
  static std::mt19937 random(std::random_device{}());
  Id id;
  for (std::uint8_t& byte : id.bytes) {
    byte = static_cast<std::uint8_t>(random());
  }
  return id;
}

ManifestSpec MakeSpec(const std::vector<BuiltTensor>& tensors, const BuildOptions& options) {
  ManifestSpec spec;
  spec.format = options.format;
  spec.metadata_json = options.metadata_json;
  for (const BuiltTensor& tensor : tensors) {
    const auto bytes = std::as_bytes(std::span(tensor.bytes));
    StorageSpec storage;
    storage.size_bytes = bytes.size();
    storage.digest = HashStorage(bytes);
    storage.sample = SampleStorage(bytes);
    TensorSpec entry;
    entry.name = tensor.name;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.shape;
    entry.stride = ContiguousStride(tensor.shape);
    entry.storage = static_cast<std::uint32_t>(spec.storages.size());
    spec.storages.push_back(storage);
    spec.tensors.push_back(std::move(entry));
  }
  return spec;
}

ArenaLayout Layout(const ManifestSpec& spec, std::uint64_t arena_max_bytes) {
  std::vector<std::uint64_t> sizes;
  for (const StorageSpec& storage : spec.storages) {
    sizes.push_back(storage.size_bytes);
  }
  std::size_t arenas = 1;
  while (true) {
    ArenaLayout layout = Need(PlanLayout(sizes, ManifestBytes(spec, arenas), arena_max_bytes));
    if (layout.arenas.size() == arenas) {
      return layout;
    }
    arenas = layout.arenas.size();
  }
}

void WriteAt(const UniqueFd& fd, std::uint64_t offset_bytes, std::string_view bytes) {
  if (!bytes.empty() &&
      ::pwrite(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes)) !=
          static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("pwrite");
  }
}

void WriteHeader(const UniqueFd& fd, ArenaHeader header, const BuildOptions& options) {
  if (options.edit_header) {
    options.edit_header(header);
  }
  std::string page(kArenaHeaderBytes, '\0');
  EncodeArenaHeader(header, std::as_writable_bytes(std::span(page)));
  WriteAt(fd, 0, page);
}

}  // namespace

BuiltModel BuildModel(const std::vector<BuiltTensor>& tensors, const BuildOptions& options) {
  ManifestSpec spec = MakeSpec(tensors, options);
  const ArenaLayout layout = Layout(spec, options.arena_max_bytes);
  BuiltModel model;
  model.reply.model_id = RandomId<ModelId>();
  model.reply.name = "built";
  model.reply.lease = 7;
  model.reply.hit = true;
  model.reply.reason = "resident";
  for (const ArenaPlan& plan : layout.arenas) {
    spec.arenas.push_back({RandomId<ArenaId>(), plan.size_bytes});
    model.arenas.push_back(Need(CreateMemfd("test", plan.size_bytes)));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    spec.storages[i].arena = layout.placements[i].arena;
    spec.storages[i].offset_bytes = layout.placements[i].offset_bytes;
    WriteAt(model.arenas[spec.storages[i].arena], spec.storages[i].offset_bytes, tensors[i].bytes);
  }
  if (options.edit_spec) {
    options.edit_spec(spec);
  }
  std::string manifest = Need(EncodeManifest(spec));
  if (options.edit_manifest) {
    options.edit_manifest(manifest);
  }
  WriteAt(model.arenas.back(), layout.manifest_offset_bytes, manifest);
  for (std::size_t i = 0; i < model.arenas.size(); ++i) {
    ArenaHeader header;
    header.arena_id = spec.arenas[i].id;
    header.model_id = model.reply.model_id;
    header.arena_index = static_cast<std::uint32_t>(i);
    header.arena_count = static_cast<std::uint32_t>(model.arenas.size());
    header.arena_bytes = spec.arenas[i].size_bytes;
    if (i + 1 == model.arenas.size()) {
      header.manifest = {layout.manifest_offset_bytes, manifest.size()};
    }
    WriteHeader(model.arenas[i], header, options);
    if (options.seal && !SealMemfd(model.arenas[i].get()).ok()) {
      throw std::runtime_error("seal");
    }
    const MemfdInfo info = Need(InspectMemfd(model.arenas[i].get()));
    model.reply.arenas.push_back(
        {header.arena_id, model.arenas[i].get(), info.inode, info.size_bytes});
  }
  return model;
}

BuiltTensor Floats(const std::string& name, std::int64_t count, float start) {
  BuiltTensor tensor{name, Dtype::kFloat32, {count}, {}};
  tensor.bytes.resize(static_cast<std::size_t>(count) * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = start + static_cast<float>(i);
    std::memcpy(&tensor.bytes[static_cast<std::size_t>(i) * sizeof value], &value, sizeof value);
  }
  return tensor;
}

}  // namespace modelcache
