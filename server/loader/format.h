// Tells the format of a model file from its content, never from its name, and reads it.
#pragma once

#include <span>
#include <string>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// What the caller of a load asked for.
struct ReadOptions {
  std::string format = "auto";  // auto|safetensors|torch|torchscript|npz
  std::string device = "cpu";   // anything else only for TorchScript
};

// Reads and validates everything but the bytes of the storages. One file; an index followed by
// the shards it names; or several safetensors files that no index joins.
// Errors: kBadFile (malformed; the message has file, tensor or record, and the numbers),
// kUnsupported (a format, dtype or option this build does not know), kFileChanged, kSystem.
Result<ModelPlan> ReadModel(std::span<const SourceFile> files, const ReadOptions& options);

// As ReadModel for one file of the job, which is no index. `file` is an index into `files`.
Result<ModelPlan> ReadOneFile(std::span<const SourceFile> files, std::size_t file,
                              const ReadOptions& options);

}  // namespace modelcache
