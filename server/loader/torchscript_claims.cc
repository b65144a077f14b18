// Looks at every persistent id, used or not.
#include "server/loader/torchscript_claims.h"

#include <string>
#include <utility>

#include "server/loader/pickle.h"
#include "server/loader/torch_tensor.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxPickleBytes = 256U << 20U;

Result<void> CheckNode(const PickleDocument& document, const PickleNode& node,
                       const ZipDirectory& directory, const std::string& folder) {
  auto id = ReadStorageId(document, node);
  if (!id.ok()) {
    return std::move(id).error();
  }
  const ZipRecord* record = directory.FindInFolder(folder + id->key);
  const std::uint64_t present = record != nullptr ? record->size_bytes : 0;
  if (id->size_bytes > present) {
    return Error{ErrorCode::kBadFile,
                 "record " + Quoted(folder + id->key) + ": needs " +
                     std::to_string(id->size_bytes) + " bytes, has " + std::to_string(present),
                 0};
  }
  return {};
}

Result<void> CheckPickle(std::string_view pickle, const ZipDirectory& directory,
                         const std::string& folder) {
  auto document = ReadPickle(pickle);
  if (!document.ok()) {
    return std::move(document).error();
  }
  for (const PickleNode& node : document->nodes) {
    if (node.kind != PickleKind::kPersistent) {
      continue;
    }
    if (auto checked = CheckNode(*document, node, directory, folder); !checked.ok()) {
      return checked;
    }
  }
  return {};
}

}  // namespace

Result<void> CheckTorchscriptClaims(std::span<const SourceFile> files, std::size_t file,
                                    const ZipDirectory& directory) {
  for (const char* name : {"data", "constants"}) {
    const std::string pickle_name = std::string(name) + ".pkl";
    const ZipRecord* record = directory.FindInFolder(pickle_name);
    if (record == nullptr) {
      continue;
    }
    auto pickle = ReadRecord(files, file, *record, kMaxPickleBytes);
    if (!pickle.ok()) {
      return std::move(pickle).error();
    }
    auto checked = CheckPickle(*pickle, directory, std::string(name) + "/");
    if (!checked.ok()) {
      return files[file].Fault(checked.error().code, "TorchScript archive: record '" + pickle_name +
                                                         "': " + checked.error().message);
    }
  }
  return {};
}

}  // namespace modelcache
