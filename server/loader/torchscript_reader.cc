// Finds and calls modelcached_torchscript.so and turns its answer into a plan.
#include "server/loader/torchscript_reader.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "common/checked_math.h"
#include "server/loader/base64.h"
#include "server/loader/json_guard.h"
#include "server/loader/torchscript_claims.h"
#include "server/loader/torchscript_module.h"
#include "server/loader/zip_directory.h"

namespace modelcache {
namespace {

constexpr std::uint64_t kMaxExtraFileBytes = 16U << 20U;
constexpr std::uint64_t kMaxCodeBytes = 64U << 20U;
constexpr const char kLibraryName[] = "modelcached_torchscript.so";

struct Library {
  TorchscriptEntry read = nullptr;
};

// The library stays loaded: a loader process lives for one job.
Result<Library> LoadLibrary() {
  std::error_code failed;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", failed);
  const auto lib = program.parent_path().parent_path() / "lib";
  std::string why = "it is not there";
  for (const auto& folder : {lib / "modelcache", lib}) {
    const std::string path = (folder / kLibraryName).string();
    if (!std::filesystem::exists(path, failed)) {
      continue;
    }
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* entry = library != nullptr ? ::dlsym(library, kTorchscriptEntry) : nullptr;
    if (entry != nullptr) {
      return Library{reinterpret_cast<TorchscriptEntry>(entry)};
    }
    const char* fault = ::dlerror();
    why = fault != nullptr ? fault : "unknown fault";
  }
  return Error{ErrorCode::kUnsupported,
               "TorchScript archives need " + std::string(kLibraryName) + " in " +
                   (lib / "modelcache").string() + ": " + why,
               0};
}

// Bounds the private memory of this process while libtorch reads: a few bytes of a pickle can claim
// gigabytes. Large tensors count although they are left unread, hence the size of the file.
class DataLimit {
 public:
  explicit DataLimit(std::uint64_t file_bytes) {
    constexpr std::uint64_t kOwnBytes = 2ULL << 30U;
    if (::getrlimit(RLIMIT_DATA, &before_) == 0) {
      rlimit limited = before_;
      limited.rlim_cur = std::min<rlim_t>(before_.rlim_cur, kOwnBytes + 2 * file_bytes);
      (void)::setrlimit(RLIMIT_DATA, &limited);
    }
  }
  ~DataLimit() { (void)::setrlimit(RLIMIT_DATA, &before_); }
  DataLimit(const DataLimit&) = delete;
  DataLimit& operator=(const DataLimit&) = delete;

 private:
  rlimit before_{RLIM_INFINITY, RLIM_INFINITY};
};

// TorchScript runs a class's `__setstate__` while it rebuilds an object. A loader executes nothing
// from a file, and what such a method computes is not in the file's records.
Result<void> CheckRunsNoCode(std::span<const SourceFile> files, std::size_t file,
                             const ZipDirectory& directory) {
  const std::string folder = directory.folder() + "/code/";
  for (const ZipRecord& record : directory.records()) {
    if (!record.name.starts_with(folder) || !record.name.ends_with(".py")) {
      continue;
    }
    auto text = ReadRecord(files, file, record, kMaxCodeBytes);
    if (!text.ok()) {
      return std::move(text).error();
    }
    if (text->find("__setstate__") != std::string::npos) {
      return files[file].Fault(ErrorCode::kUnsupported,
                               "record " + Quoted(record.name) +
                                   " defines __setstate__, code of the file that would run while "
                                   "it is loaded; load it with torch.jit.load");
    }
  }
  return {};
}

Result<nlohmann::json> ExtraFiles(std::span<const SourceFile> files, std::size_t file,
                                  const ZipDirectory& directory) {
  const std::string folder = directory.folder() + "/extra/";
  nlohmann::json extra = nlohmann::json::object();
  for (const ZipRecord& record : directory.records()) {
    if (record.name.compare(0, folder.size(), folder) != 0) {
      continue;
    }
    auto text = ReadRecord(files, file, record, kMaxExtraFileBytes);
    if (!text.ok()) {
      return std::move(text).error();
    }
    extra[record.name.substr(folder.size())] = Base64(*text);
  }
  return extra;
}

// A storage that is no copy of a file range must have been computed.
bool AllInFile(const TorchscriptModule& module) {
  for (const TorchscriptStorage& storage : module.storages) {
    if (!storage.in_file && storage.size_bytes > 0) {
      return false;
    }
  }
  return true;
}

class Reader {
 public:
  Reader(const SourceFile& source, std::size_t file, const std::string& device)
      : source_(source), file_(file), device_(device) {}

  Result<TorchscriptModule> Read(const Library& library, bool read_everything) {
    TorchscriptInput input;
    input.size_bytes = source_.size();
    input.device = device_;
    input.read_everything = read_everything;
    input.read = [this](std::uint64_t offset_bytes, void* out, std::size_t size) -> std::size_t {
      const bool inside = Within({offset_bytes, size}, source_.size());
      return inside && source_.ReadAt(offset_bytes, {static_cast<std::byte*>(out), size}).ok()
                 ? size
                 : 0;
    };
    TorchscriptModule module;
    std::string message;
    switch (library.read(input, module, message)) {
      case TorchscriptFault::kNone:
        return module;
      case TorchscriptFault::kUnsupported:
        return source_.Fault(ErrorCode::kUnsupported, message);
      case TorchscriptFault::kBadFile:
        break;
    }
    std::replace(message.begin(), message.end(), '\n', ' ');
    return source_.Bad("TorchScript archive: " + message);
  }

  // The storages of the module, then its archive as the last one.
  [[nodiscard]] ModelPlan Plan(TorchscriptModule module, nlohmann::json extra_files) const {
    ModelPlan plan;
    plan.format = "torchscript";
    nlohmann::json records = nlohmann::json::object();
    for (const TorchscriptStorage& storage : module.storages) {
      records[storage.name] = plan.storages.size();
      const StorageBytes bytes = storage.in_file
                                     ? StorageBytes(FileBytes{file_, storage.offset_bytes})
                                     : StorageBytes(MemoryBytes{storage.data, module.keep_alive});
      plan.storages.push_back({"record " + Quoted(storage.name), storage.size_bytes, bytes});
    }
    nlohmann::json script{{"archive", plan.storages.size()},
                          {"records", std::move(records)},
                          {"extra_files", std::move(extra_files)}};
    const std::uint64_t archive_bytes = module.archive.size();
    plan.storages.push_back(
        {"the module's code", archive_bytes, OwnedBytes(std::move(module.archive))});
    plan.tensors = UniqueNames(std::move(module.tensors));
    nlohmann::json metadata = nlohmann::json::object();
    metadata["torchscript"] = std::move(script);
    plan.metadata_json = DumpJson(metadata);
    return plan;
  }

 private:
  // A name that several tensors have is the name of none: each gets a number of its own.
  static std::vector<TensorSpec> UniqueNames(std::vector<TensorSpec> tensors) {
    std::map<std::string, int> uses;
    for (const TensorSpec& tensor : tensors) {
      ++uses[tensor.name];
    }
    std::map<std::string, int> numbers;
    for (TensorSpec& tensor : tensors) {
      if (uses[tensor.name] < 2) {
        continue;
      }
      std::string numbered;
      do {
        numbered = tensor.name + "#" + std::to_string(++numbers[tensor.name]);
      } while (!uses.try_emplace(numbered, 1).second);
      tensor.name = std::move(numbered);
    }
    return tensors;
  }

  const SourceFile& source_;
  std::size_t file_;
  const std::string& device_;
};

}  // namespace

Result<ModelPlan> ReadTorchscript(std::span<const SourceFile> files, std::size_t file,
                                  const std::string& device) {
  auto directory = ZipDirectory::Read(files[file]);
  if (!directory.ok()) {
    return std::move(directory).error();
  }
  if (auto checked = directory->CheckCases(files[file]); !checked.ok()) {
    return std::move(checked).error();
  }
  if (auto checked = CheckTorchscriptClaims(files, file, *directory); !checked.ok()) {
    return std::move(checked).error();
  }
  if (auto checked = CheckRunsNoCode(files, file, *directory); !checked.ok()) {
    return std::move(checked).error();
  }
  auto extra_files = ExtraFiles(files, file, *directory);
  if (!extra_files.ok()) {
    return std::move(extra_files).error();
  }
  auto library = LoadLibrary();
  if (!library.ok()) {
    return files[file].Fault(library.error().code, library.error().message);
  }
  const DataLimit limit(files[file].size());
  Reader reader(files[file], file, device);
  auto module = reader.Read(*library, false);
  if (module.ok() && !AllInFile(*module)) {
    module = reader.Read(*library, true);
  }
  if (!module.ok()) {
    return std::move(module).error();
  }
  return reader.Plan(std::move(*module), std::move(*extra_files));
}

}  // namespace modelcache
