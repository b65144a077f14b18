// Several files read as one model: an index (`*.index.json`) and the shards it names, or files that
// no index joins.
#pragma once

#include <span>
#include <string_view>

#include "common/result.h"
#include "server/loader/format.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// True when a file starts like a JSON object.
bool LooksLikeIndex(std::string_view first_bytes);

// Reads files[0] as the index; the shards are told by their FileRef::name. Exactly the tensors of
// `weight_map` are taken, each from its own shard; what else the shards hold is not loaded.
// Errors: kBadFile (a shard name with a folder in it, a tensor its shard lacks, a malformed shard),
// kNotFound naming the shards that are missing, and what the shards' reader gives.
Result<ModelPlan> ReadIndexedModel(std::span<const SourceFile> files, const ReadOptions& options);

// Reads all tensors of all files, in the order of the files. REQUIRES that all are safetensors:
// other formats have metadata that belongs to one file. Errors: kBadFile naming both files when a
// tensor is in two, and what the files' reader gives.
Result<ModelPlan> ReadUnindexedModel(std::span<const SourceFile> files, const ReadOptions& options);

}  // namespace modelcache
