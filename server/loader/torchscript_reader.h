// TorchScript archives, through a library of their own that is the only code to see libtorch.
#pragma once

#include <span>
#include <string>

#include "common/result.h"
#include "server/loader/model_plan.h"
#include "server/loader/source_file.h"

namespace modelcache {

// Loads modelcached_torchscript.so on first use: from ../lib/modelcache or ../lib next to this
// program. Errors: kUnsupported (the library is missing, the device is), kBadFile with libtorch's
// message, kFileChanged, kSystem.
Result<ModelPlan> ReadTorchscript(std::span<const SourceFile> files, std::size_t file,
                                  const std::string& device);

}  // namespace modelcache
