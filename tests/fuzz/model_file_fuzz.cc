// Any model file, its format told from its content: safetensors, zip checkpoints and their pickles,
// legacy checkpoints, npz. What a reader accepts must lie inside the file.
#include <sys/mman.h>
#include <unistd.h>

#include <variant>

#include "common/checked_math.h"
#include "common/unique_fd.h"
#include "server/loader/format.h"
#include "tests/fuzz/fuzz_target.h"

namespace modelcache {
namespace {

void CheckStorage(const PlannedStorage& storage, std::uint64_t file_bytes) {
  if (const auto* plain = std::get_if<FileBytes>(&storage.bytes)) {
    Require(plain->file == 0, "the file exists");
    Require(Within({plain->offset_bytes, storage.size_bytes}, file_bytes),
            "a storage lies inside its file");
  } else if (const auto* deflated = std::get_if<DeflatedBytes>(&storage.bytes)) {
    Require(deflated->file == 0, "the file exists");
    Require(Within({deflated->offset_bytes, deflated->compressed_bytes}, file_bytes),
            "a compressed storage lies inside its file");
  } else if (storage.size_bytes != 0) {
    const auto& held = std::get<MemoryBytes>(storage.bytes);
    Require(held.data != nullptr && held.keep_alive != nullptr, "held bytes are owned");
  }
}

void CheckPlan(const ModelPlan& plan, std::uint64_t file_bytes) {
  for (const PlannedStorage& storage : plan.storages) {
    CheckStorage(storage, file_bytes);
  }
  for (const TensorSpec& tensor : plan.tensors) {
    Require(tensor.shape.size() == tensor.stride.size(), "shape and stride agree");
    if (tensor.storage == kNoStorage) {
      continue;
    }
    Require(tensor.storage < plan.storages.size(), "the storage exists");
    auto extent = TensorExtentBytes(tensor);
    Require(extent.ok(), "the extent of an accepted tensor can be computed");
    Require(Within({tensor.data_offset_bytes, *extent}, plan.storages[tensor.storage].size_bytes),
            "a view lies inside its storage");
  }
}

}  // namespace
}  // namespace modelcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace modelcache;  // NOLINT(google-build-using-namespace): a short entry point
  UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  Require(fd.valid() && ::write(fd.get(), data, size) == static_cast<ssize_t>(size), "a file");
  auto file = SourceFile::Open(std::move(fd), {"model", "/model"});
  if (!file.ok()) {
    return 0;
  }
  auto plan = ReadModel({&*file, 1}, {});
  if (plan.ok()) {
    CheckPlan(*plan, size);
  } else {
    Require(!plan.error().message.empty(), "an error says something");
  }
  return 0;
}
