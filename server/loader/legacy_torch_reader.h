// Checkpoints of torch.save from before the zip format (1.5 and older, or asked for).
#pragma once

#include <span>
#include <string_view>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// True when a file starts with the pickled magic number of that format.
bool LooksLikeLegacyTorch(std::string_view first_bytes);

// As ReadTorch. Errors: the same.
Result<ModelPlan> ReadLegacyTorch(std::span<const SourceFile> files, std::size_t file);

}  // namespace modelcache
