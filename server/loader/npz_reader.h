// numpy's .npz: a zip archive of .npy arrays.
#pragma once

#include <span>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// Each array becomes a tensor named like its record without ".npy"; Fortran order becomes strides.
// Errors: kBadFile, kUnsupported (object arrays, big-endian numbers, structured dtypes),
// kFileChanged, kSystem.
Result<ModelPlan> ReadNpz(std::span<const SourceFile> files, std::size_t file);

}  // namespace modelcache
