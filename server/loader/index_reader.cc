// With an index, weight_map is followed to the letter: a stray shard or a stray tensor is never
// merged in. Without one, every tensor of every file is taken.
#include "server/loader/index_reader.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "server/loader/json_guard.h"

namespace modelcache {
namespace {

using Json = nlohmann::json;

constexpr int kMaxIndexDepth = 16;
constexpr std::uint64_t kMaxIndexBytes = 64U << 20U;

// Tensors wanted of each shard.
using WeightMap = std::map<std::string, std::set<std::string>>;

struct MergedModel {
  ModelPlan plan;
  std::unordered_map<std::string, std::size_t> file_of;  // by name of the tensor
};

Result<WeightMap> ReadWeightMap(const SourceFile& index, const Json& root) {
  const auto found = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || found == root.end() || !found->is_object()) {
    return index.Bad("is JSON, but no index: it has no object 'weight_map'");
  }
  WeightMap shards;
  for (const auto& [tensor, shard] : found->items()) {
    if (!shard.is_string()) {
      return index.Bad("weight_map: the shard of tensor " + Quoted(tensor) + " must be text");
    }
    const auto name = shard.get<std::string>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
      return index.Bad("weight_map sends tensor " + Quoted(tensor) + " to " + Quoted(name) +
                       ", which is not a file of the same folder");
    }
    shards[name].insert(tensor);
  }
  return shards;
}

Result<std::map<std::string, std::size_t>> MatchShards(std::span<const SourceFile> files,
                                                       const WeightMap& wanted) {
  std::map<std::string, std::size_t> numbers;
  for (std::size_t i = 1; i < files.size(); ++i) {
    numbers.emplace(files[i].name(), i);
  }
  std::string missing;
  for (const auto& [shard, tensors] : wanted) {
    if (numbers.count(shard) == 0) {
      missing += (missing.empty() ? "" : ", ") + shard;
    }
  }
  if (!missing.empty()) {
    return files[0].Fault(ErrorCode::kNotFound,
                          "shards named by the index are missing: " + missing);
  }
  return numbers;
}

// Moves the tensors in `wanted`, and the storages they use, from `shard` to `model`.
Result<void> Merge(const SourceFile& file, const std::set<std::string>& wanted, ModelPlan shard,
                   ModelPlan& model) {
  std::unordered_map<std::uint32_t, std::uint32_t> moved;
  std::set<std::string> missing = wanted;
  for (TensorSpec& tensor : shard.tensors) {
    if (missing.erase(tensor.name) == 0) {
      continue;
    }
    if (tensor.storage != kNoStorage) {
      const auto next = static_cast<std::uint32_t>(model.storages.size());
      const auto [place, added] = moved.emplace(tensor.storage, next);
      if (added) {
        model.storages.push_back(std::move(shard.storages[tensor.storage]));
      }
      tensor.storage = place->second;
    }
    model.tensors.push_back(std::move(tensor));
  }
  if (!missing.empty()) {
    return file.Bad("the index says that tensor " + Quoted(*missing.begin()) + " is in shard " +
                    Quoted(file.name()) + ", but the shard has no such tensor");
  }
  return {};
}

// __metadata__ of all shards; where two disagree the first wins.
void MergeMetadata(const std::string& shard_json, Json& metadata) {
  auto shard = ParseJson(shard_json, kMaxIndexDepth);
  if (shard.ok() && shard->is_object() && shard->contains("metadata")) {
    for (const auto& [key, value] : (*shard)["metadata"].items()) {
      metadata.emplace(key, value);
    }
  }
}

Result<Json> ReadIndex(const SourceFile& index) {
  if (index.size() > kMaxIndexBytes) {
    return index.Bad("starts like an index but has " + std::to_string(index.size()) +
                     " bytes, limit " + std::to_string(kMaxIndexBytes));
  }
  auto text = index.ReadText({0, index.size()});
  if (!text.ok()) {
    return std::move(text).error();
  }
  auto root = ParseJson(*text, kMaxIndexDepth);
  if (!root.ok()) {
    return index.Bad(root.error().message);
  }
  return root;
}

// A tensor that an earlier file has too is an error that names both: neither is the right one.
Result<void> Append(std::span<const SourceFile> files, std::size_t number, ModelPlan part,
                    MergedModel& merged) {
  const auto base = static_cast<std::uint32_t>(merged.plan.storages.size());
  for (TensorSpec& tensor : part.tensors) {
    const auto [first, added] = merged.file_of.emplace(tensor.name, number);
    if (!added) {
      return files[number].Bad("tensor " + Quoted(tensor.name) + " is also in " +
                               files[first->second].path() +
                               ", and no index says which of the two is meant");
    }
    if (tensor.storage != kNoStorage) {
      tensor.storage += base;
    }
    merged.plan.tensors.push_back(std::move(tensor));
  }
  std::move(part.storages.begin(), part.storages.end(), std::back_inserter(merged.plan.storages));
  return {};
}

}  // namespace

bool LooksLikeIndex(std::string_view first_bytes) {
  std::size_t at = 0;
  while (at < first_bytes.size() &&
         std::isspace(static_cast<unsigned char>(first_bytes[at])) != 0) {
    ++at;
  }
  return at < first_bytes.size() && first_bytes[at] == '{';
}

Result<ModelPlan> ReadIndexedModel(std::span<const SourceFile> files, const ReadOptions& options) {
  auto root = ReadIndex(files[0]);
  if (!root.ok()) {
    return std::move(root).error();
  }
  auto wanted = ReadWeightMap(files[0], *root);
  if (!wanted.ok()) {
    return std::move(wanted).error();
  }
  auto numbers = MatchShards(files, *wanted);
  if (!numbers.ok()) {
    return std::move(numbers).error();
  }
  ModelPlan model;
  Json metadata = Json::object();
  for (const auto& [shard, tensors] : *wanted) {
    const std::size_t number = numbers->at(shard);
    auto plan = ReadOneFile(files, number, options);
    if (!plan.ok()) {
      return std::move(plan).error();
    }
    model.format = plan->format;
    MergeMetadata(plan->metadata_json, metadata);
    if (auto merged = Merge(files[number], tensors, std::move(*plan), model); !merged.ok()) {
      return std::move(merged).error();
    }
  }
  Json all = Json::object();
  all["metadata"] = std::move(metadata);
  if (const auto own = root->find("metadata"); own != root->end()) {
    all["index_metadata"] = *own;
  }
  model.metadata_json = DumpJson(all);
  return model;
}

Result<ModelPlan> ReadUnindexedModel(std::span<const SourceFile> files,
                                     const ReadOptions& options) {
  MergedModel merged;
  Json metadata = Json::object();
  for (std::size_t number = 0; number < files.size(); ++number) {
    auto part = ReadOneFile(files, number, options);
    if (!part.ok()) {
      return std::move(part).error();
    }
    merged.plan.format = part->format;
    MergeMetadata(part->metadata_json, metadata);
    if (auto added = Append(files, number, std::move(*part), merged); !added.ok()) {
      return std::move(added).error();
    }
  }
  Json all = Json::object();
  all["metadata"] = std::move(metadata);
  merged.plan.metadata_json = DumpJson(all);
  return std::move(merged.plan);
}

}  // namespace modelcache
