// Placeholder until the library exists.
#include "server/loader/torchscript_reader.h"

namespace modelcache {
Result<ModelPlan> ReadTorchscript(std::span<const SourceFile> files, std::size_t file,
                                  const std::string& /*device*/) {
  return files[file].Fault(ErrorCode::kUnsupported, "TorchScript is not built in");
}
}  // namespace modelcache
