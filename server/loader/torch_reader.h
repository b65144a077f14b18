// Checkpoints of torch.save in its zip format, without libtorch and without running anything.
#pragma once

#include <span>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// Interprets data.pkl with the restricted pickle machine; every storage record becomes a storage,
// whole, however small the views on it are. The structure of the checkpoint is kept in the
// metadata. Storages of any device come as bytes for the CPU.
// Errors: kBadFile (the message names record or tensor, needed and present bytes; a pickle that
// would run code, naming the callable; a cycle), kUnsupported (big-endian checkpoints, whole
// pickled objects, unknown dtypes), kFileChanged, kSystem.
Result<ModelPlan> ReadTorch(std::span<const SourceFile> files, std::size_t file);

}  // namespace modelcache
