// The zip side of a checkpoint: records, byte order, storages.
#include "server/loader/torch_reader.h"

#include <map>
#include <string>
#include <utility>

#include "server/loader/pickle.h"
#include "server/loader/torch_checkpoint.h"
#include "server/loader/zip_directory.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxPickleBytes = 256U << 20U;
constexpr std::uint64_t kMaxSmallRecordBytes = 4096;

Result<void> CheckFolder(const SourceFile& file, const ZipDirectory& directory) {
  if (!directory.folder().empty()) {
    return {};
  }
  std::string tops;
  for (std::size_t i = 0; i < directory.tops().size() && i < 4; ++i) {
    tops += (i > 0 ? ", " : "") + Quoted(directory.tops()[i]);
  }
  return file.Bad("a checkpoint has one top folder, this archive has " +
                  std::to_string(directory.tops().size()) + ": " + tops);
}

Result<void> CheckByteOrder(std::span<const SourceFile> files, std::size_t file,
                            const ZipDirectory& directory) {
  const ZipRecord* record = directory.FindInFolder("byteorder");
  if (record == nullptr) {
    return {};  // older writers left it out, and were little-endian in practice
  }
  auto order = ReadRecord(files, file, *record, kMaxSmallRecordBytes);
  if (!order.ok()) {
    return std::move(order).error();
  }
  if (order->compare(0, 6, "little") != 0) {
    return files[file].Fault(ErrorCode::kUnsupported, "the checkpoint was saved with byte order " +
                                                          Quoted(*order) +
                                                          ", only little-endian ones are read");
  }
  return {};
}

// Storages of one archive, each added to the plan at its first use.
class RecordStorages {
 public:
  RecordStorages(std::size_t file, const ZipDirectory& directory, ModelPlan& plan)
      : file_(file), directory_(directory), plan_(plan) {}

  Result<std::uint32_t> Resolve(const StorageId& id) {
    if (const auto known = numbers_.find(id.key); known != numbers_.end()) {
      return CheckSize(id, plan_.storages[known->second].size_bytes, known->second);
    }
    const ZipRecord* record = directory_.Find(directory_.folder() + "/data/" + id.key);
    if (record == nullptr && id.size_bytes > 0) {
      return Error{ErrorCode::kBadFile,
                   "record " + Quoted(id.key) + " is missing: " + std::to_string(id.size_bytes) +
                       " bytes needed",
                   0};
    }
    const auto number = static_cast<std::uint32_t>(plan_.storages.size());
    const std::uint64_t present = record != nullptr ? record->size_bytes : 0;
    plan_.storages.push_back(
        {"record " + Quoted(id.key), present,
         record != nullptr ? RecordBytes(file_, *record) : StorageBytes(OwnedBytes(""))});
    numbers_.emplace(id.key, number);
    return CheckSize(id, present, number);
  }

 private:
  [[nodiscard]] Result<std::uint32_t> CheckSize(const StorageId& id, std::uint64_t present,
                                                std::uint32_t number) const {
    if (id.size_bytes == present) {  // as torch.load
      return number;
    }
    return Error{ErrorCode::kBadFile,
                 "record " + Quoted(id.key) + ": needs " + std::to_string(id.size_bytes) +
                     " bytes, has " + std::to_string(present),
                 0};
  }

  std::size_t file_;
  const ZipDirectory& directory_;
  ModelPlan& plan_;
  std::map<std::string, std::uint32_t> numbers_;
};

}  // namespace

Result<ModelPlan> ReadTorch(std::span<const SourceFile> files, std::size_t file) {
  const SourceFile& source = files[file];
  auto directory = ZipDirectory::Read(source);
  if (!directory.ok()) {
    return std::move(directory).error();
  }
  auto checked = directory->CheckCases(source);
  if (checked.ok()) {
    checked = CheckFolder(source, *directory);
  }
  if (checked.ok()) {
    checked = CheckByteOrder(files, file, *directory);
  }
  if (!checked.ok()) {
    return std::move(checked).error();
  }
  const ZipRecord* record = directory->FindInFolder("data.pkl");
  if (record == nullptr) {
    return source.Bad("has no record data.pkl");
  }
  auto pickle = ReadRecord(files, file, *record, kMaxPickleBytes);
  if (!pickle.ok()) {
    return std::move(pickle).error();
  }
  auto document = ReadPickle(*pickle);
  if (!document.ok()) {
    return source.Fault(document.error().code, "record 'data.pkl': " + document.error().message);
  }
  ModelPlan plan;
  plan.format = "torch";
  RecordStorages storages(file, *directory, plan);
  auto planned = PlanCheckpoint(
      *document, files, [&](const StorageId& id) { return storages.Resolve(id); }, plan);
  if (!planned.ok()) {
    return source.Fault(planned.error().code, planned.error().message);
  }
  return plan;
}

}  // namespace modelcache
