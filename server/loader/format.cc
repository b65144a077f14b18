// Detection by the first bytes, and by the record names inside a zip archive.
#include "server/loader/format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "server/loader/index_reader.h"
#include "server/loader/legacy_torch_reader.h"
#include "server/loader/npz_reader.h"
#include "server/loader/safetensors_reader.h"
#include "server/loader/torch_reader.h"
#include "server/loader/torchscript_reader.h"
#include "server/loader/zip_directory.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kSniffBytes = 512;

enum class Kind { kSafetensors, kTorch, kLegacyTorch, kTorchscript, kNpz, kIndex };

std::string_view FormatName(Kind kind) {
  switch (kind) {
    case Kind::kSafetensors:
      return "safetensors";
    case Kind::kTorch:
    case Kind::kLegacyTorch:
      return "torch";
    case Kind::kTorchscript:
      return "torchscript";
    case Kind::kNpz:
      return "npz";
    case Kind::kIndex:
      return "index";
  }
  return "";
}

struct Clue {
  std::string_view start;
  std::string_view meaning;
};

// What people find under a model's name instead of a model.
constexpr std::array<Clue, 15> kClues = {{
    {"version https://git-lfs",
     "a Git LFS pointer: the weights were not downloaded (git lfs pull)"},
    {"<!DOCTYPE", "an HTML page, perhaps of a failed download"},
    {"<!doctype", "an HTML page, perhaps of a failed download"},
    {"<html", "an HTML page, perhaps of a failed download"},
    {"<?xml", "an XML document, perhaps of a failed download"},
    {"GGUF", "a GGUF model, which this build does not read"},
    {"\x93NUMPY", "a single numpy array (.npy), which this build does not read"},
    {"\x89HDF\r\n", "an HDF5 file, which this build does not read"},
    {"\x1f\x8b", "gzip data: unpack it first"},
    {"7z\xbc\xaf", "a 7-Zip archive: unpack it first"},
    {"BZh", "bzip2 data: unpack it first"},
    {"\xfd"
     "7zXZ",
     "xz data: unpack it first"},
    {"\x28\xb5\x2f\xfd", "zstd data: unpack it first"},
    {"PK\x05\x06", "an empty zip archive"},
    {"\x80", "a plain Python pickle, not a checkpoint of torch.save"},
}};

// What the length field of a safetensors file would be: people compare it with other programs'
// messages.
std::string ClaimedHeader(std::string_view first_bytes) {
  std::uint64_t length = 0;
  if (first_bytes.size() < sizeof length) {
    return "";
  }
  std::memcpy(&length, first_bytes.data(), sizeof length);
  return "; read as safetensors its header would have " + std::to_string(length) + " bytes";
}

Error UnknownFormat(const SourceFile& file, std::string_view first_bytes) {
  if (file.size() == 0) {
    return file.Bad("is empty (0 bytes)");
  }
  const std::string size = " (" + std::to_string(file.size()) + " bytes";
  const auto* clue = std::find_if(kClues.begin(), kClues.end(), [&](const Clue& known) {
    return first_bytes.substr(0, known.start.size()) == known.start;
  });
  std::string message = "is no model file of a known format" + size;
  if (clue != kClues.end()) {
    message = "looks like " + std::string(clue->meaning) + size + ClaimedHeader(first_bytes) + ")";
  } else {
    message += ", it starts with " + Quoted(first_bytes) + ")";
  }
  return file.Bad(message);
}

Result<Kind> DetectZip(const SourceFile& file) {
  auto directory = ZipDirectory::Read(file);
  if (!directory.ok()) {
    return std::move(directory).error();
  }
  const auto has = [&](std::string_view base) { return directory->FindInFolder(base) != nullptr; };
  if (has("constants.pkl")) {
    return Kind::kTorchscript;
  }
  if (has("data.pkl")) {
    return Kind::kTorch;
  }
  const auto& records = directory->records();
  const auto is_npy = [](const ZipRecord& record) {
    return record.name.size() > 4 && record.name.substr(record.name.size() - 4) == ".npy";
  };
  if (!records.empty() && std::all_of(records.begin(), records.end(), is_npy)) {
    return Kind::kNpz;
  }
  return file.Bad("is a zip archive of " + std::to_string(records.size()) +
                  " records, but neither a torch checkpoint (no data.pkl) nor an npz file" +
                  (records.empty() ? "" : "; first record " + Quoted(records.front().name)));
}

Result<Kind> Detect(const SourceFile& file) {
  auto start = file.ReadText({0, std::min(kSniffBytes, file.size())});
  if (!start.ok()) {
    return std::move(start).error();
  }
  if (start->compare(0, 4, "PK\x03\x04") == 0) {
    return DetectZip(file);
  }
  if (LooksLikeLegacyTorch(*start)) {
    return Kind::kLegacyTorch;
  }
  if (LooksLikeSafetensors(*start, file.size())) {
    return Kind::kSafetensors;
  }
  if (LooksLikeIndex(*start)) {
    return Kind::kIndex;
  }
  return UnknownFormat(file, *start);
}

Result<void> CheckOptions(const SourceFile& file, Kind kind, const ReadOptions& options) {
  const std::string_view name = FormatName(kind);
  if (options.format != "auto" && options.format != name) {
    return file.Bad("is of format " + std::string(name) + ", but format " + options.format +
                    " was asked for");
  }
  if (options.device != "cpu" && kind != Kind::kTorchscript) {
    return file.Fault(ErrorCode::kUnsupported,
                      "device " + Quoted(options.device) + " was asked for, but format " +
                          std::string(name) + " is loaded on the CPU only");
  }
  return {};
}

// Of several files without an index, each must be of the one format that can be merged.
Result<void> CheckUnindexed(std::span<const SourceFile> files) {
  for (const SourceFile& file : files) {
    auto kind = Detect(file);
    if (!kind.ok()) {
      return std::move(kind).error();
    }
    if (*kind == Kind::kIndex) {
      return file.Bad("is an index, which must be the first of the files of a model");
    }
    if (*kind != Kind::kSafetensors) {
      return file.Bad("is of format " + std::string(FormatName(*kind)) +
                      "; without an index only " + "safetensors files are read together, and " +
                      std::to_string(files.size()) + " files were given");
    }
  }
  return {};
}

Result<ModelPlan> ReadAs(Kind kind, std::span<const SourceFile> files, std::size_t file,
                         const ReadOptions& options) {
  switch (kind) {
    case Kind::kSafetensors:
      return ReadSafetensors(files, file);
    case Kind::kTorch:
      return ReadTorch(files, file);
    case Kind::kLegacyTorch:
      return ReadLegacyTorch(files, file);
    case Kind::kTorchscript:
      return ReadTorchscript(files, file, options.device);
    case Kind::kNpz:
      return ReadNpz(files, file);
    case Kind::kIndex:
      break;
  }
  return files[file].Bad("is an index, where a shard was expected");
}

}  // namespace

Result<ModelPlan> ReadOneFile(std::span<const SourceFile> files, std::size_t file,
                              const ReadOptions& options) {
  auto kind = Detect(files[file]);
  if (!kind.ok()) {
    return std::move(kind).error();
  }
  if (auto checked = CheckOptions(files[file], *kind, options); !checked.ok()) {
    return std::move(checked).error();
  }
  return ReadAs(*kind, files, file, options);
}

Result<ModelPlan> ReadModel(std::span<const SourceFile> files, const ReadOptions& options) {
  if (files.empty()) {
    return Error{ErrorCode::kInvalidArgument, "a load without files", 0};
  }
  auto kind = Detect(files[0]);
  if (!kind.ok()) {
    return std::move(kind).error();
  }
  if (*kind == Kind::kIndex) {
    return ReadIndexedModel(files, options);
  }
  if (files.size() == 1) {
    return ReadOneFile(files, 0, options);
  }
  if (auto checked = CheckUnindexed(files); !checked.ok()) {
    return std::move(checked).error();
  }
  return ReadUnindexedModel(files, options);
}

}  // namespace modelcache
